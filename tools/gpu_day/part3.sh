#!/usr/bin/env bash
# Rows of docs/benchmarks.md on an H200, part 3, ten minutes: bits per byte after a minute of training, of pretrain, the HF Trainer and nanoGPT's loop.
# There are three settings of each (tools/benchmarks/quality_settings_gpu.yaml), and a row tries one of each program: how many steps fit is measured
# while nothing else runs, and then the three train at a time, which changes how long they take and not what comes out. The first row also prepares
# the text.
# Results add up: put the quality.jsonl of an earlier machine into build/, and what it has is not run again.
#   bash tools/gpu_day/part3.sh                                                          as many rows as the time is enough for
#   SEEDS="0 1 2" SETTINGS="muon-512x8 llama-512x8 512x8" bash tools/gpu_day/part3.sh    seeds of chosen ones
#   MINUTES=5 SECONDS_LEFT=3600 bash tools/gpu_day/part3.sh                              the record's own time, where an hour is left

minutes=${MINUTES:-1}
if ! [[ $minutes =~ ^[1-9][0-9]*$ ]]; then
  echo "MINUTES=$minutes is not a number of whole minutes; set it to 1 or more, or leave it out" >&2
  exit 2
fi

source "$(dirname "$0")/rows.sh"

results=$OUT/quality.jsonl
[ -f "$results" ] || [ ! -f build/quality.jsonl ] || cp build/quality.jsonl "$results"
tries=("muon-384x6 llama-384x6 384x6" "muon-512x8 llama-512x8 512x8" "muon-512x8-dropout gpt2-512x8-dropout 512x8-dropout")
[ -z "${SETTINGS:-}" ] || tries=("$SETTINGS")
scale=()
if [ -n "${TRY:-}" ]; then # on a CPU: these models are too large for a pretended GPU
  device=cpu tries=("192x4 adamw-256x4 llama-192x4") scale=(--format fp32 --scale 0.05 --minutes 0.1)
fi
for number in "${!tries[@]}"; do
  limit=$((SECONDS_LEFT - SECONDS)) # all that is left, if that is enough
  [ -n "${TRY:-}" ] || [ "$limit" -ge $((180 + 90 * minutes)) ] || limit=9999
  # shellcheck disable=SC2086
  row "quality_$number" "$limit" "$PY" tools/bench.py quality --device $device --minutes "$minutes" --at-once 3 --work build/quality --json "$results" \
    --seeds ${SEEDS:-0} --settings ${tries[$number]} "${scale[@]}"
  [ ! -f "$logs/quality_$number.log" ] || cat "$logs/quality_$number.log"
  cp build/quality/quality-*.log "$logs" 2> /dev/null || true # all that the programs printed
done
