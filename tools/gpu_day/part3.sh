#!/usr/bin/env bash
# Part 3 of a day on an H200, ten minutes: bits per byte after minutes of training, of pretrain, the HF Trainer and nanoGPT's loop, each at its best of three settings
# (tools/benchmarks/quality_settings_gpu.yaml). How many steps fit is measured while nothing else runs; then three train at a time, which changes how long they take
# and not what comes out. Results add up: put the quality.jsonl of an earlier machine into build/, and what it has is not run again.
#   bash tools/gpu_day/part3.sh                                          one setting of each program after the other, a minute each
#   SEEDS="0 1 2" SETTINGS="muon-512x8 llama-512x8 512x8" bash tools/gpu_day/part3.sh      seeds of the best ones
#   MINUTES=5 bash tools/gpu_day/part3.sh                                the record's own time, where a machine is lent for an hour

source "$(dirname "$0")/rows.sh"

results=$OUT/quality.jsonl
[ ! -f build/quality.jsonl ] || cp build/quality.jsonl "$results"
minutes=${MINUTES:-1}
# Each of a program's own: text and compiler take two minutes, and a machine may be taken back after any of them.
tries=("${SETTINGS:-muon-384x6 llama-384x6 384x6}" "muon-512x8 llama-512x8 512x8" "muon-512x8-dropout gpt2-512x8-dropout 512x8-dropout")
[ -z "${SETTINGS:-}${TRY:-}" ] || tries=("${SETTINGS:-192x4}")
scale=(--programs "nanoGPT's loop" --scale 0.05 --steps 12)
[ -n "${TRY:-}" ] || scale=()
for number in "${!tries[@]}"; do
  # shellcheck disable=SC2086
  row "quality_$number" $((240 + 180 * minutes)) "$PY" tools/bench.py quality --device $device --minutes "$minutes" --at-once 3 --work build/quality \
    --json "$results" --seeds ${SEEDS:-0} --settings ${tries[$number]} "${scale[@]}"
  [ ! -f "$logs/quality_$number.log" ] || cat "$logs/quality_$number.log"
done
