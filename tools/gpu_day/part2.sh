#!/usr/bin/env bash
# Part 2 of a day on a GPU, at most 9 minutes: tokens per second, MFU and memory of the sizes that everyone asks for.
#   bash tools/gpu_day/part2.sh

source "$(dirname "$0")/rows.sh"

bf16=precision.compute=bf16
pure="precision={compute: bf16, master: bf16, moments: bf16}"
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
profile=(--profile "$OUT")
[ -z "${REHEARSAL_LIBRARY:-}" ] || profile=() # torch's profiler knows no pretended GPU
# What matters most comes first: a part has ten minutes, and what is left of them decides whether a later row is measured.
speed 1b_blocks 90 llama3.2-1b 4096 4 2 "${profile[@]}" $bf16 parallel.compile=blocks
# KempnerForge's published shape: 10,471 tokens/s on one H200 (54.5% by our count of FLOPs).
# 32 layers that are compiled one by one would take the whole limit, so blocks are: one for all of them.
speed 8b_blocks 120 llama3.1-8b 4096 1 8 --steps 3 "$pure" parallel.compile=blocks
speed 3b_blocks 80 llama3.2-3b 4096 2 4 --steps 5 $bf16 parallel.compile=blocks
speed 1b_eager 60 llama3.2-1b 4096 4 2 $bf16
speed 8b_recomputed 90 llama3.1-8b 4096 2 4 --steps 3 "$pure" parallel.compile=blocks parallel.activation_checkpointing=full
speed 1b_fsdp 80 llama3.2-1b 4096 4 2 $bf16 parallel.compile=blocks parallel.strategy=fsdp parallel.shard=1
for kernel in flash efficient; do # torch's own choice is cuDNN's
  [ -n "${TRY:-}" ] || speed "1b_$kernel" 60 llama3.2-1b 4096 4 2 $bf16 parallel.compile=blocks run.attention_kernel=$kernel
done
speed 1b_model 80 llama3.2-1b 4096 4 2 $bf16 parallel.compile=model
