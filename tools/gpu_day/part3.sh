#!/usr/bin/env bash
# Part 3 of a day on a GPU, at most 9 minutes: fp8, the Hugging Face Trainer, CUDA graphs, checkpoints, and quality on a text.
#   bash tools/gpu_day/part3.sh            (TEXT=tinyshakespeare.txt, default build/tinyshakespeare.txt)

source "$(dirname "$0")/rows.sh"

bf16=precision.compute=bf16
speed 3b_fp8 80 llama3.2-3b 4096 2 4 --steps 5 $bf16 parallel.compile=blocks precision.fp8=tensorwise
speed 3b_fp8_rowwise 80 llama3.2-3b 4096 2 4 --steps 5 $bf16 parallel.compile=blocks precision.fp8=rowwise
speed 8b_fp8 90 llama3.1-8b 4096 1 8 --steps 3 "precision={compute: bf16, master: bf16, moments: bf16, fp8: tensorwise}" parallel.compile=blocks
row hf_trainer 90 "$PY" tools/gpu_day/hf_trainer.py ${TRY:+--tiny}
speed 1b_muon 60 llama3.2-1b 4096 4 2 $bf16 parallel.compile=blocks optim.name=muon
# A model whose kernels are short: what launching them together gains.
speed small 60 llama-125m 256 8 4 $bf16 parallel.compile=blocks
[ $device = cpu ] || speed small_recorded 60 llama-125m 256 8 4 $bf16 parallel.compile=blocks parallel.cuda_graph=true
text=${TEXT:-build/tinyshakespeare.txt}
if [ -f "$text" ]; then
  head -c 1003854 "$text" > build/train.txt
  tail -c +1003855 "$text" > build/validation.txt
  row characters 20 "$PY" tools/train_tokenizer.py --input "$text" --model-type char --output quickstart/shakespeare/tokenizer
  for part in train validation; do
    row "characters_$part" 30 "$PY" tools/prepare_data.py --input build/$part.txt --tokenizer quickstart/shakespeare/tokenizer --output quickstart/shakespeare/$part
  done
  # nanoGPT's GPU size: 6 layers, 6 heads, width 384, context 256, batch 64, 5,000 steps, dropout 0.2; it reports 1.4697.
  steps=${TRY:+4} warmup=${TRY:+2}
  row shakespeare 185 "$PY" pretrain/run.py --config configs/shakespeare_char.yaml run.device=$device run.name=shakespeare_gpu run.steps=${steps:-5000} \
    model.dim=384 model.layers=6 model.heads=6 model.ffn_dim=1024 model.dropout=0.2 data.sequence_length=256 batch.sequences=64 batch.micro_sequences=64 \
    optim.lr=1e-3 schedule.warmup_steps=${warmup:-100} validation.every_steps=250 $bf16 parallel.compile=blocks
fi
# How long training stands still for a checkpoint of 3 GB. A scale: of layers and of the vocabulary.
scale=${TRY:+0.01}
row checkpoint 120 "$PY" tools/bench.py checkpoint --model configs/models/llama3.2-1b.yaml --device $device --work build --json "$OUT/checkpoint.jsonl" --scale ${scale:-0.2}
