#!/usr/bin/env bash
# Train characters of Shakespeare (configs/shakespeare_char.yaml):  bash launch/shakespeare.sh tinyshakespeare.txt [key=value ...]
# The first 90% of the text is for training and the rest for validation, as in nanoGPT.

set -euo pipefail
[ $# -ge 1 ] && [ -f "$1" ] || { echo "usage: bash launch/shakespeare.sh TEXT_FILE [key=value ...]" >&2; exit 2; }
text=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python=.venv/bin/python
work=quickstart/shakespeare

if [ -e "$work/validation" ] && ! cat "$work/train.txt" "$work/validation.txt" 2>/dev/null | cmp -s - "$text"; then
  echo "error: $PWD/$work was prepared from another text than $text; delete that folder, and its run in runs/ or give another run.name=NAME" >&2
  exit 2
fi
bash launch/setup.sh plot
if [ ! -e "$work/validation" ]; then
  rm -rf "$work"
  mkdir -p "$work"
  # By characters, as nanoGPT cuts it: by bytes, one might be cut in two.
  $python - "$text" "$work" <<'PYTHON'
import pathlib, sys
text = pathlib.Path(sys.argv[1]).read_bytes().decode()
cut = len(text) * 9 // 10
for name, part in (("train", text[:cut]), ("validation", text[cut:])):
    pathlib.Path(sys.argv[2], f"{name}.txt").write_bytes(part.encode())
PYTHON
  $python tools/train_tokenizer.py --input "$text" --model-type char --output "$work/tokenizer"
  for part in train validation; do
    $python tools/prepare_data.py --input "$work/$part.txt" --tokenizer "$work/tokenizer" --output "$work/$part"
  done
fi
$python pretrain/run.py --config configs/shakespeare_char.yaml "$@"
