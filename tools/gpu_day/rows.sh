# Rows of docs/benchmarks.md on an H200, each with a time limit of its own. A row that fails stops no other one. To be sourced by the parts.
#
#   OUT           folder for results (default: build/gpu_day): rows.jsonl has a line per row, speed.jsonl one per measured speed; logs and profiles in .tgz
#   SECONDS_LEFT  time for the rows of the part (default: 570, of a command of ten minutes); packing comes after it
#   TRY           set it to try the part with tiny models on a CPU, or on the pretended GPU of a rehearsal (tests/rehearsal), with ten times the limits
#   PY            the Python to use (default: python3); build/wheels may have packages that it lacks:
#                 python3 -m pip wheel --no-deps -w build/wheels omegaconf==2.4.0 antlr4-python3-runtime==4.9.3
#   COMMIT        what is measured, where there is no .git

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-build/gpu_day}
PY=${PY:-python3}
SECONDS_LEFT=${SECONDS_LEFT:-570}
mkdir -p "$OUT" build
if [ -d build/wheels ]; then
  $PY -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target build/site build/wheels/*.whl
  export PYTHONPATH=$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ -n "${TRY:-}" ]; then
  device=${REHEARSAL_LIBRARY:+cuda} # where tests/run.sh --rehearse pretends one
  device=${device:-cpu}
  export OMP_NUM_THREADS=1
else
  device=cuda
  export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
  if ! nvidia-smi --query-gpu=name --format=csv,noheader | grep -qw H200; then
    echo "the rows are made for an H200, whose memory 8B and 3B need; run them there" >&2
    exit 1
  fi
fi

# What was compiled in an earlier part is not compiled again: it comes back as warm-kernels-aa, -ab, ..., which are put into build/ for the next one.
export TORCHINDUCTOR_CACHE_DIR=$PWD/build/compiled
! ls build/warm-kernels-* > /dev/null 2>&1 || cat build/warm-kernels-* | tar -C build -xJ

# A machine of somebody else may give back few files, and small ones. So logs and profiles are written elsewhere, and packed at the end in pieces of
# 15 MB, also where the part is killed.
script=$(basename "$0" .sh)
logs=build/logs/$script
rm -rf "$logs"
mkdir -p "$logs"
pack() {
  cp "$OUT"/*.jsonl "$logs" 2> /dev/null # in the archive too, which is then all that is needed
  tar -C "$logs" -czf "$OUT/$script.tgz" --exclude=profile .
  [ ! -d "$logs/profile" ] || tar -C "$logs" -cz profile | split -b 15M - "$OUT/$script-profile.tgz-"
  [ ! -d build/compiled ] || [ "$script" != part1 ] || [ -n "${TRY:-}" ] || tar -C build -c compiled | xz -1 -T0 | split -b 15M - "$OUT/warm-kernels-"
}
trap pack EXIT

# either A B: A where a part is tried, else B
either() { if [ -n "${TRY:-}" ]; then echo "$1"; else echo "$2"; fi; }

# row NAME SECONDS COMMAND...
row() {
  local name=$1 limit=$2 begin=$SECONDS rc=0 commit=${COMMIT:-$(git rev-parse --short HEAD 2> /dev/null)} shown
  shift 2
  if [ -n "${TRY:-}" ]; then
    limit=$((limit * 10))
  elif [ $((SECONDS_LEFT - SECONDS)) -lt $((limit * 2 / 3)) ]; then
    limit=0 # it would not end, and a row that does not end prints nothing
  elif [ $((SECONDS_LEFT - SECONDS)) -lt "$limit" ]; then
    limit=$((SECONDS_LEFT - SECONDS))
  fi
  if [ "$limit" -eq 0 ]; then
    printf '\n== %s: left out, because the part has taken %s s\n' "$name" "$SECONDS"
    printf '{"row": "%s", "rc": null, "seconds": 0, "commit": "%s"}\n' "$name" "$commit" >> "$OUT/rows.jsonl"
    return
  fi
  timeout --signal=INT --kill-after=10 "$limit" "$@" > "$logs/$name.log" 2>&1 || rc=$?
  shown=$(tail -n $((rc == 0 ? 3 : 12)) "$logs/$name.log" | cut -c1-260)
  printf '\n== %s: rc %s, %s s of %s, begun at %s s\n%s\n' "$name" "$rc" $((SECONDS - begin)) "$limit" "$begin" "$shown"
  printf '{"row": "%s", "rc": %s, "seconds": %s, "commit": "%s"}\n' "$name" "$rc" $((SECONDS - begin)) "$commit" >> "$OUT/rows.jsonl"
}

# speed NAME SECONDS PRESET LENGTH MICRO ACCUMULATION [--profile DIR] [--steps N] KEY=VALUE...
speed() {
  local name=$1 limit=$2 preset=$3 length=$4 micro=$5 accumulation=$6 tiny=()
  shift 6
  if [ -n "${TRY:-}" ]; then
    length=64 tiny=(model.dim=64 model.layers=2 model.heads=4 model.kv_heads=2 model.ffn_dim=128 model.vocab_size=512)
  fi
  row "$name" "$limit" "$PY" tools/bench.py speed --config "configs/models/$preset.yaml" --length "$length" --micro "$micro" --accumulation "$accumulation" \
    --name "$name" --json "$OUT/speed.jsonl" "$@" run.device=$device "${tiny[@]}"
}

bf16=precision.compute=bf16
pure="precision={compute: bf16, master: bf16, moments: bf16}"
pure_fp8="precision={compute: bf16, master: bf16, moments: bf16, fp8: tensorwise}"
blocks=parallel.compile=blocks
ddp=(parallel.strategy=ddp parallel.replicate=1) fsdp=(parallel.strategy=fsdp parallel.shard=1)
profile=(--profile "$logs")
[ -z "${REHEARSAL_LIBRARY:-}" ] || profile=() # torch's profiler knows no pretended GPU
