#!/usr/bin/env bash
# Rows of docs/benchmarks.md on an H200, part 1, about six minutes: does it run, do the tests for GPUs pass, is every layout equal there? All at the
# same time, because a GPU may be there for minutes only. Models of few layers stand for those that part 2 measures, and fill its cache of compiled
# kernels. Then, alone, the three speeds that are asked for most.
# It needs an H200: 8B takes 104 GB with two sequences, and 123 with three.
#   bash tools/gpu_day/part1.sh            (ALONE=95: with that many seconds for what runs alone, of which 8B is the first)

source "$(dirname "$0")/rows.sh"
export TORCHINDUCTOR_COMPILE_THREADS=3
alone=${ALONE:-180} # seconds that are kept for the rows at the end

quickstart() {
  row corpus 40 "$PY" tools/collect_source.py --output quickstart/corpus.jsonl
  row tokenizer 60 "$PY" tools/train_tokenizer.py --input quickstart/corpus.jsonl --vocab-size 4096 --model-type bpe --output quickstart/tokenizer
  row shards 60 "$PY" tools/prepare_data.py --input quickstart/corpus.jsonl --tokenizer quickstart/tokenizer --output quickstart/data --validation-fraction 0.02
  equality &
  local run=(pretrain/run.py --config configs/quickstart.yaml run.device=$device parallel.strategy=single validation.sequences=64 log.tensorboard=false) steps=${TRY:+4} format
  row check 40 "$PY" "${run[@]}" --check
  run+=("run.steps=${steps:-100}" schedule.warmup_steps=2)
  row run_bf16 80 "$PY" "${run[@]}" run.name=gpu_bf16 $bf16
  row run_fp32 80 "$PY" "${run[@]}" run.name=gpu_fp32 precision.compute=fp32
  row run_compiled 100 "$PY" "${run[@]}" run.name=gpu_compiled $bf16 $blocks
  wait
}

# Deterministic, because the kernels of attention add up gradients in any order, which in bf16 is more than layouts may differ by.
# DDP and FSDP2 on the one GPU, by NCCL, and DDP on two ranks that share it, by gloo.
equality() {
  local check=("$PY" tools/check_equivalence.py --config configs/equivalence.yaml --formats fp32 bf16) keys=(run.device=$device run.deterministic=true)
  row equal_alone 150 "${check[@]}" --layouts "strategy=ddp replicate=1" "strategy=fsdp shard=1" --output build/equal_alone "${keys[@]}" &
  row equal_two 150 "${check[@]}" --layouts strategy=ddp --ranks 2 --output build/equal_two "${keys[@]}" parallel.backend=gloo &
  wait
}

two_layers=(--steps 2 model.layers=2)
sizes() {
  speed try_1b 150 llama3.2-1b 4096 4 2 "${two_layers[@]}" $bf16 $blocks
  speed try_8b 120 llama3.1-8b 4096 2 2 --steps 2 model.layers=4 "$pure" $blocks # four, for four tensors of a shape are updated by one call
  speed try_3b 120 llama3.2-3b 4096 4 2 "${two_layers[@]}" $bf16 $blocks
}
formats() {
  speed try_3b_fp8 150 llama3.2-3b 4096 4 2 "${two_layers[@]}" $bf16 $blocks precision.fp8=tensorwise
  speed try_8b_fp8 120 llama3.1-8b 4096 2 2 "${two_layers[@]}" "$pure_fp8" $blocks
  speed try_8b_recomputed 120 llama3.1-8b 4096 2 2 "${two_layers[@]}" "$pure" $blocks parallel.activation_checkpointing=full
}
others() {
  speed try_fsdp 150 llama3.2-1b 4096 4 2 "${two_layers[@]}" $bf16 $blocks "${fsdp[@]}"
  speed try_ddp 120 llama3.2-1b 4096 4 2 "${two_layers[@]}" $bf16 $blocks "${ddp[@]}"
  [ $device = cpu ] || speed try_recorded 120 llama-125m 256 8 6 "${two_layers[@]}" $bf16 $blocks parallel.cuda_graph=true
}

[ -n "${TRY:-}" ] || row smi 20 nvidia-smi
row versions 90 "$PY" -c "import sys, torch, transformers, pretrain; print(sys.version, torch.__version__, transformers.__version__, torch.version.cuda, torch.cuda.is_available() and torch.cuda.get_device_name(), torch.backends.cudnn.version())"
SECONDS_LEFT=$((SECONDS_LEFT - alone))
quickstart &
sizes &
formats &
others &
row tests 190 env TORCHINDUCTOR_CACHE_DIR="$PWD/build/compiled_tests" "$PY" -m pytest -v -o addopts=--strict-markers -p no:cacheprovider -n 6 --timeout=150 --tb=short --maxfail=40 -m cuda tests/test_cuda.py tests/models/test_losses_cuda.py \
  tests/models/test_document_mask_cuda.py tests/models/test_experts_cuda.py tests/models/test_linear_attention_cuda.py tests/train/test_attention_kernel.py &
wait
SECONDS_LEFT=$((SECONDS_LEFT + alone))
printf '\n== alone from here, %s s into this part\n' "$SECONDS"
row products 30 "$PY" - << 'PY'
import os, time, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
for size in (256,) if os.environ.get("TRY") else (1024, 2048, 4096, 8192):
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    for turn in range(2):
        begin = time.perf_counter()
        for _ in range(20):
            a @ b
        torch.cuda.synchronize() if device == "cuda" else None
    print(size, round(20 * 2 * size**3 / (time.perf_counter() - begin) / 1e12, 1), "TFLOP/s in bf16")
PY
# KempnerForge's published shape, without recomputation; it reports 10,471 tokens/s on one H200 (54.5% by our count of FLOPs).
speed 8b_blocks 90 llama3.1-8b 4096 2 4 --steps 3 "${profile[@]}" "$pure" $blocks
speed 3b_blocks 60 llama3.2-3b 4096 4 2 --steps 4 "${profile[@]}" $bf16 $blocks
speed 1b_blocks 60 llama3.2-1b 4096 4 2 "${profile[@]}" $bf16 $blocks
