#!/usr/bin/env bash
# Set up .venv and run the tests: 2 CPU cores, no GPU, no network but a package registry.
#   bash tests/run.sh                 everything but tests that are slow, for GPUs or listed in tests/thorough.yaml
#   bash tests/run.sh --thorough      what is listed there as well: what continuous integration runs
#   bash tests/run.sh --slow          the slow ones as well
#   bash tests/run.sh --cuda          only what needs a GPU
#   bash tests/run.sh --rehearse      the same, on a device that calls itself CUDA and computes on the CPU; needs g++
#   bash tests/run.sh tests/models    any pytest arguments; of what a path names, all but what is slow or for GPUs

set -euo pipefail
cd "$(dirname "$0")/.."
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME REHEARSAL_LIBRARY
unset PYTHONDONTWRITEBYTECODE # or each of some hundred processes compiles what it imports
bash launch/setup.sh test
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
select="not slow and not cuda and not thorough"
for argument in "$@"; do
  [[ $argument != tests* ]] || select="not slow and not cuda"
done
examples="--hypothesis-profile=quick"
workers="-n 3 --dist loadfile --no-loadscope-reorder" # most tests are one process with one thread; those with ranks wait a lot
if [ "${1:-}" = --thorough ]; then
  shift
  select="not slow and not cuda"
elif [ "${1:-}" = --slow ]; then
  shift
  select="not cuda"
  examples=
elif [ "${1:-}" = --cuda ]; then
  shift
  select="cuda"
  workers=
elif [ "${1:-}" = --rehearse ]; then
  shift
  select="cuda"
  workers="-n 2"
  REHEARSAL_LIBRARY=$(.venv/bin/python tests/rehearsal/build_device.py build/rehearsal)
  export REHEARSAL_LIBRARY PYTHONPATH="$PWD/tests/rehearsal"
fi
.venv/bin/ruff check --quiet .
# shellcheck disable=SC2086
exec .venv/bin/python -m pytest -m "$select" $workers $examples "$@"
