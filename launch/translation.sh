#!/usr/bin/env bash
# German to English on Multi30k (configs/translation_multi30k.yaml), on 2 processes:  bash launch/translation.sh FOLDER [key=value ...]
# FOLDER holds multi30k.train.de.gz, multi30k.train.en.gz, multi30k.val.de.gz and multi30k.val.en.gz: line i of .de and of .en are a pair.

set -euo pipefail
[ $# -ge 1 ] && [ -f "$1/multi30k.train.de.gz" ] || { echo "usage: bash launch/translation.sh FOLDER [key=value ...]" >&2; exit 2; }
data=$(realpath "$1")/multi30k
shift
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
work=quickstart/translation
case " $* " in
  *" run.name="* | *" run.dir="*)
    echo "error: the run is runs/translation_multi30k, which is scored at the end; for another name call pretrain/run.py and tools/translate.py" >&2
    exit 2
    ;;
esac

files=("$data".train.{de,en}.gz "$data".val.{de,en}.gz)
found=$(sha256sum "${files[@]}" | cut -d " " -f 1)
if [ -e "$work/pairs" ] && ! echo "$found" | cmp -s - "$work/files.sha256"; then
  echo "error: $PWD/$work was prepared from other files than those in ${data%/*}, or by an earlier version; delete that folder and runs/translation_multi30k" >&2
  exit 2
fi
bash launch/setup.sh translation
if [ ! -e "$work/pairs" ]; then
  rm -rf "$work"
  mkdir -p "$work"
  echo "$found" > "$work/files.sha256"
  .venv/bin/python tools/train_tokenizer.py --input "$data".train.*.gz --documents line --lowercase --model-type bpe --vocab-size 6000 \
    --output "$work/tokenizer"
  .venv/bin/python tools/prepare_pairs.py --source "$data.train.de.gz" --target "$data.train.en.gz" \
    --validation-source "$data.val.de.gz" --validation-target "$data.val.en.gz" --tokenizer "$work/tokenizer" --lowercase \
    --output "$work/pairs"
fi
.venv/bin/torchrun --nproc-per-node 2 pretrain/run.py --config configs/translation_multi30k.yaml "$@"
rm -f runs/translation_multi30k/validation.en  # of an earlier call
.venv/bin/python tools/translate.py --model runs/translation_multi30k --input "$data.val.de.gz" --reference "$data.val.en.gz" \
  --lowercase --beam 5 --output runs/translation_multi30k/validation.en
