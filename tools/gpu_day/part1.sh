#!/usr/bin/env bash
# Part 1 of a day on a GPU, at most 9 minutes: does it run at all, do the tests for GPUs pass, is every layout equal there?
#   bash tools/gpu_day/part1.sh

source "$(dirname "$0")/rows.sh"

[ -n "${TRY:-}" ] || row smi 20 nvidia-smi
row versions 60 "$PY" -c "import sys, torch, transformers, pretrain; print(sys.version, torch.__version__, transformers.__version__, torch.version.cuda, torch.cuda.is_available() and torch.cuda.get_device_name(), torch.backends.cudnn.version())"
row corpus 40 "$PY" tools/collect_source.py --output quickstart/corpus.jsonl
row tokenizer 60 "$PY" tools/train_tokenizer.py --input quickstart/corpus.jsonl --vocab-size 4096 --model-type bpe --output quickstart/tokenizer
row shards 60 "$PY" tools/prepare_data.py --input quickstart/corpus.jsonl --tokenizer quickstart/tokenizer --output quickstart/data --validation-fraction 0.02
run=(pretrain/run.py --config configs/quickstart.yaml run.device=$device parallel.strategy=single validation.sequences=64 log.tensorboard=false)
row check 30 "$PY" "${run[@]}" --check
steps=${TRY:+4}
steps=${steps:-100}
for format in fp32 bf16; do
  row "run_$format" 60 "$PY" "${run[@]}" run.name=gpu_$format run.steps=$steps schedule.warmup_steps=2 precision.compute=$format
done
row run_compiled 90 "$PY" "${run[@]}" run.name=gpu_compiled run.steps=$steps schedule.warmup_steps=2 precision.compute=bf16 parallel.compile=blocks
# Deterministic, because the kernels of attention add up gradients in any order, which in bf16 is more than layouts may differ by.
# DDP and FSDP2 on the one GPU, by NCCL, and two ranks that share it, by gloo.
layouts=("strategy=ddp replicate=1" "strategy=fsdp shard=1")
row equal_alone 110 "$PY" tools/check_equivalence.py --config configs/equivalence.yaml --layouts "${layouts[@]}" --formats fp32 bf16 --output build/equal_alone run.device=$device run.deterministic=true
row equal_two 100 "$PY" tools/check_equivalence.py --config configs/equivalence.yaml --layouts strategy=ddp strategy=fsdp --ranks 2 --formats fp32 bf16 --output build/equal_two run.device=$device run.deterministic=true parallel.backend=gloo
row tests 240 "$PY" -m pytest -v -p no:cacheprovider -m cuda --maxfail=12 tests/models/test_losses_cuda.py tests/models/test_document_mask_cuda.py \
  tests/models/test_experts_cuda.py tests/train/test_attention_kernel.py tests/test_cuda.py
