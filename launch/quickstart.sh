#!/usr/bin/env bash
# From nothing to a trained, exported language model on a laptop: installs into .venv, gathers the Python standard library's
# source, trains a tokenizer, prepares shards, trains about 4M parameters on 2 processes, exports to Hugging Face format and
# prints a sample. Needs Python 3.10 and a package registry; no GPU, no other network. Run again, it continues where it was.

set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME
bash launch/setup.sh plot
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
work=quickstart
run=runs/quickstart
python=.venv/bin/python
mkdir -p "$work"
case " $* " in
  *" run.name="* | *" run.dir="*)
    echo "error: the quickstart's run is $run; for another name call pretrain/run.py itself" >&2
    exit 2
    ;;
esac

step() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - started)); }

if [ ! -e "$work/corpus.jsonl" ]; then
  step "gathering the Python standard library's source"
  $python tools/collect_source.py --output "$work/corpus.jsonl"
fi
if [ ! -e "$work/tokenizer" ]; then
  step "training a tokenizer"
  $python tools/train_tokenizer.py --input "$work/corpus.jsonl" --vocab-size 4096 --model-type bpe --output "$work/tokenizer"
fi
if [ ! -e "$work/data" ]; then
  step "preparing token shards"
  $python tools/prepare_data.py --input "$work/corpus.jsonl" --tokenizer "$work/tokenizer" --output "$work/data" \
    --validation-fraction 0.02
fi

step "training on 2 processes"
# Chosen once: a run that is continued stays as it was.
if [ ! -e "$work/format" ]; then
  OMP_NUM_THREADS=1 $python tools/bench.py formats --fastest > "$work/format.part"
  mv "$work/format.part" "$work/format"
fi
options=(precision.compute="$(cat "$work/format")")
if [ "$(cat "$work/format")" = bf16 ]; then
  echo "matrix products are faster in bf16 on this CPU: ${options[*]}"
else
  options+=(run.steps=280)
  echo "matrix products are no faster in bf16 on this CPU: ${options[*]}, and fewer steps"
fi
OMP_NUM_THREADS=1 .venv/bin/torchrun --nproc-per-node 2 pretrain/run.py --config configs/quickstart.yaml \
  "${options[@]}" "$@"

if ! grep -q '"finished"' "$run/status.json"; then
  echo "the run was interrupted and has saved its state; the same command continues it"
  exit 0
fi

step "exporting to Hugging Face format"
newest=$(basename "$(find "$run/checkpoints" -maxdepth 1 -name 'step-*' | sort | tail -n 1)")
if [ "$(cat "$run/exported" 2>/dev/null || true)" != "$newest" ]; then
  rm -rf "$run/huggingface"
  $python tools/convert_checkpoint.py to-hf --checkpoint "$run" --output "$run/huggingface" --verify
  echo "$newest" > "$run/exported"
else
  echo "$run/huggingface is of $newest already"
fi

step "a sample: the model continues 'class Reader:'"
$python tools/generate.py --model "$run/huggingface" --prompt $'class Reader:\n' --max-tokens 160 --temperature 0.6 --seed 1

step "done"
$python tools/report.py "$run" --output "$run/loss.png" --output "$run/report.html"
cat <<TXT
run          $run (checkpoints, metrics.jsonl, logs)
model        $run/huggingface   transformers.AutoModelForCausalLM.from_pretrained("$run/huggingface")
curves       $run/report.html (a file for your browser), or .venv/bin/tensorboard --logdir $run/tensorboard
TXT
