#!/usr/bin/env bash
# Rows of docs/benchmarks.md on an H200, part 2, at most ten minutes: one row after the other, those first that have never had a figure. A row that
# would not end in what is left is left out.
#   bash tools/gpu_day/part2.sh            (after part 1: put its warm-kernels-* into build/, and nothing is compiled twice;
#                                           TEXT=tinyshakespeare.txt, default build/tinyshakespeare.txt)

source "$(dirname "$0")/rows.sh"

text=${TEXT:-build/tinyshakespeare.txt}
# nanoGPT's GPU size: 6 layers, 6 heads, width 384, context 256, batch 64; in 5,000 steps with dropout 0.2 it comes to 1.4697 at its best. It reads windows
# that begin anywhere. Ours are cut at the same places in every epoch; of 16 copies of the text, whose length is no multiple of 256, at 16 places.
characters() {
  local part
  for part in $(seq 16); do head -c 1003854 "$text"; done > build/train.txt
  tail -c +1003855 "$text" > build/validation.txt
  row characters 20 "$PY" tools/train_tokenizer.py --input "$text" --model-type char --output quickstart/shakespeare/tokenizer
  for part in train validation; do
    row "characters_$part" 40 "$PY" tools/prepare_data.py --input build/$part.txt --tokenizer quickstart/shakespeare/tokenizer --output quickstart/shakespeare/$part
  done
}
shakespeare() {
  local name=$1 limit=$2 steps=$3
  shift 3
  rm -rf "runs/$name"
  row "$name" "$limit" "$PY" pretrain/run.py --config configs/shakespeare_char.yaml run.device=$device run.name="$name" "run.steps=$steps" \
    model.dim=384 model.layers=6 model.heads=6 model.ffn_dim=1024 data.sequence_length=256 batch.sequences=64 batch.micro_sequences=64 \
    optim.lr=1e-3 "schedule.warmup_steps=$(either 2 100)" validation.every_steps=100 checkpoint.export_check=false $bf16 $blocks "${recorded[@]}" "$@"
}
recorded=(parallel.cuda_graph=true)
[ $device = cuda ] || recorded=()
recomputed=parallel.activation_checkpointing=selective
speed try_8b_selective 120 llama3.1-8b 4096 2 2 --steps 2 model.layers=4 "$pure" $blocks $recomputed &
speed try_1b_muon 120 llama3.2-1b 4096 4 2 --steps 2 model.layers=2 $bf16 $blocks optim.name=muon &
speed try_1b_model 120 llama3.2-1b 4096 4 2 --steps 2 $bf16 parallel.compile=model &
wait
printf '\n== alone from here, %s s into this part\n' "$SECONDS"
# What FSDP2's wrappers cost: with weights gathered twice in each micro-step, once in a step, and gradients reduced once in a step too. All in one part,
# because two machines differ by more than that.
speed 1b_single 35 llama3.2-1b 4096 4 2 --steps 8 $bf16 $blocks
speed 1b_fsdp_last 35 llama3.2-1b 4096 4 2 --steps 8 $bf16 $blocks "${fsdp[@]}" parallel.reshard_after_forward=never parallel.grad_sync=last
speed 1b_fsdp_kept 35 llama3.2-1b 4096 4 2 --steps 8 $bf16 $blocks "${fsdp[@]}" parallel.reshard_after_forward=never
speed 1b_fsdp 40 llama3.2-1b 4096 4 2 --steps 8 $bf16 $blocks "${fsdp[@]}"
speed 1b_muon 50 llama3.2-1b 4096 4 2 $bf16 $blocks optim.name=muon
speed 1b_model 80 llama3.2-1b 4096 4 2 $bf16 parallel.compile=model
speed 8b_selective 80 llama3.1-8b 4096 2 4 --steps 3 "$pure" $blocks $recomputed
# One GPU as a rank of 64: a bound for such a run, and its memory beside what tools/estimate_memory.py says.
speed 8b_of_64 70 llama3.1-8b 4096 1 2 --steps 3 --one-rank-of 64 $bf16 $blocks parallel.strategy=fsdp
speed 8b_of_64_tensor 70 llama3.1-8b 4096 1 2 --steps 3 --one-rank-of 64 $bf16 $blocks parallel.strategy=fsdp parallel.tensor=2
# A model whose kernels are short: where its milliseconds go, and what launching kernels together gains.
speed small 50 llama-10m 256 64 1 --steps 100 "${profile[@]}" $bf16 $blocks
[ $device = cpu ] || speed small_recorded 50 llama-10m 256 64 1 --steps 100 $bf16 $blocks parallel.cuda_graph=true
# The best of the tries on 2026-11-27 (1.4342 in 89 s, beside three others), alone and with another seed.
[ ! -f "$text" ] || { characters; shakespeare shakespeare_alone 90 "$(either 4 1600)" model.dropout=0.3 model.attention_dropout=0.2 loss.label_smoothing=0.05 optim.ema_decay=0.99 run.seed=1; }
# The width, depth and vocabulary of autoresearch, which reports 1.665 million tokens/s on an H100; it has 50M parameters with its embeddings of values, and this has 30M.
speed 50m 50 llama-10m 2048 128 2 --steps 5 "${profile[@]}" model.dim=512 model.layers=8 model.heads=4 model.kv_heads=4 model.ffn_dim=1408 model.vocab_size=8192 $bf16 $blocks
# How long training stands still for a checkpoint of 2 GB. A scale: of layers and of the vocabulary.
row checkpoint 60 "$PY" tools/bench.py checkpoint stall --model configs/models/llama3.2-1b.yaml --device $device --work build --json "$OUT/checkpoint.jsonl" \
  --scale "$(either 0.01 0.099)"
row hf_trainer 60 "$PY" tools/gpu_day/hf_trainer.py ${TRY:+--tiny}
speed 8b_fp8 80 llama3.1-8b 4096 2 4 --steps 3 "$pure_fp8" $blocks
speed 3b_fp8 60 llama3.2-3b 4096 4 2 --steps 5 $bf16 $blocks precision.fp8=tensorwise
[ -n "${TRY:-}" ] || speed 1b_flash 50 llama3.2-1b 4096 4 2 $bf16 $blocks run.attention_kernel=flash # torch's own choice is cuDNN's
speed 1b_eager 50 llama3.2-1b 4096 4 2 $bf16
speed 3b_rowwise 60 llama3.2-3b 4096 4 2 --steps 5 $bf16 $blocks precision.fp8=rowwise
row hf_trainer_compiled 90 "$PY" tools/gpu_day/hf_trainer.py --compile ${TRY:+--tiny}
# The rows of docs/benchmarks.md that no other row measures again: 8B at its fastest, with KempnerForge's recomputation, and DDP beside 1b_single.
speed 8b_3x3 80 llama3.1-8b 4096 3 3 --steps 3 "$pure" $blocks
speed 8b_recomputed 80 llama3.1-8b 4096 2 4 --steps 3 "$pure" $blocks parallel.activation_checkpointing=full
speed 1b_ddp 35 llama3.2-1b 4096 4 2 --steps 8 $bf16 $blocks "${ddp[@]}"
