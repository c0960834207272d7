#!/usr/bin/env bash
# Part 2 of a day on an H200, at most ten minutes, one row after the other: tokens per second, MFU and memory; fp8, quality on a text, the Hugging
# Face Trainer, checkpoints, CUDA graphs. What matters most comes first: a row that finds less than 20 seconds left is left out.
#   bash tools/gpu_day/part2.sh            (after part 1: put its compiled-* into build/, and nothing is compiled twice;
#                                           TEXT=tinyshakespeare.txt, default build/tinyshakespeare.txt)

source "$(dirname "$0")/rows.sh"

speed 3b_blocks 60 llama3.2-3b 4096 4 2 --steps 5 "${profile[@]}" $bf16 $blocks
speed 3b_fp8 60 llama3.2-3b 4096 4 2 --steps 5 $bf16 $blocks precision.fp8=tensorwise
text=${TEXT:-build/tinyshakespeare.txt}
if [ -f "$text" ]; then
  head -c 1003854 "$text" > build/train.txt
  tail -c +1003855 "$text" > build/validation.txt
  row characters 20 "$PY" tools/train_tokenizer.py --input "$text" --model-type char --output quickstart/shakespeare/tokenizer
  for part in train validation; do
    row "characters_$part" 30 "$PY" tools/prepare_data.py --input build/$part.txt --tokenizer quickstart/shakespeare/tokenizer --output quickstart/shakespeare/$part
  done
  # nanoGPT's GPU size: 6 layers, 6 heads, width 384, context 256, batch 64; in 5,000 steps with dropout 0.2 it comes to 1.4697 at its best.
  steps=${TRY:+4} warmup=${TRY:+2}
  row shakespeare 100 "$PY" pretrain/run.py --config configs/shakespeare_char.yaml run.device=$device run.name=shakespeare_gpu "run.steps=${steps:-1500}" \
    model.dim=384 model.layers=6 model.heads=6 model.ffn_dim=1024 model.dropout=0.25 data.sequence_length=256 batch.sequences=64 batch.micro_sequences=64 \
    optim.lr=1e-3 "schedule.warmup_steps=${warmup:-100}" validation.every_steps=250 checkpoint.export_check=false $bf16 $blocks
fi
row hf_trainer 60 "$PY" tools/gpu_day/hf_trainer.py ${TRY:+--tiny}
# How long training stands still for a checkpoint of 3 GB. A scale: of layers and of the vocabulary.
scale=${TRY:+0.01}
row checkpoint 120 "$PY" tools/bench.py checkpoint --model configs/models/llama3.2-1b.yaml --device $device --work build --json "$OUT/checkpoint.jsonl" --scale ${scale:-0.2}
speed 1b_fsdp 60 llama3.2-1b 4096 4 2 $bf16 $blocks parallel.strategy=fsdp parallel.shard=1
# A model whose kernels are short: where its milliseconds go, and what launching kernels together gains.
speed small 50 llama-10m 256 64 1 --steps 20 "${profile[@]}" $bf16 $blocks
[ $device = cpu ] || speed small_recorded 50 llama-10m 256 64 1 --steps 20 $bf16 $blocks parallel.cuda_graph=true
# About the shape of autoresearch, which reports 1.665 million tokens/s on an H100.
speed 50m 50 llama-10m 2048 128 2 --steps 5 model.dim=512 model.layers=8 model.heads=4 model.kv_heads=4 model.ffn_dim=1408 model.vocab_size=8192 $bf16 $blocks
speed 8b_three 80 llama3.1-8b 4096 3 3 --steps 3 "$pure" $blocks
speed 8b_fp8 80 llama3.1-8b 4096 2 4 --steps 3 "$pure_fp8" $blocks
# KempnerForge's published shape, as it ran it.
speed 8b_recomputed 80 llama3.1-8b 4096 2 4 --steps 3 "$pure" $blocks parallel.activation_checkpointing=full
speed 1b_model 80 llama3.2-1b 4096 4 2 $bf16 parallel.compile=model
[ -n "${TRY:-}" ] || speed 1b_flash 50 llama3.2-1b 4096 4 2 $bf16 $blocks run.attention_kernel=flash # torch's own choice is cuDNN's
speed 1b_eager 50 llama3.2-1b 4096 4 2 $bf16
speed 1b_muon 50 llama3.2-1b 4096 4 2 $bf16 $blocks optim.name=muon
speed 3b_rowwise 60 llama3.2-3b 4096 4 2 --steps 5 $bf16 $blocks precision.fp8=rowwise
# Its compiler works for more than a minute.
row hf_trainer_compiled 200 "$PY" tools/gpu_day/hf_trainer.py --compile ${TRY:+--tiny}
