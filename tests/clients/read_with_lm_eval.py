"""Run by another Python, which has lm-evaluation-harness: its tasks on an export, read by its own HFLM, and on the checkpoint,
read by pretrain/evaluation. A task comes as JSON on standard input, the answer leaves as JSON.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

from pretrain.evaluation.harness import HarnessModel
from pretrain.evaluation.scores import Scorer
from pretrain.huggingface.open_model import open_model


def tasks(task: dict) -> list[dict]:
    def of(name: str, kind: str, metrics: list[str], **more: object) -> dict:
        source = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": task["choices" if name == "answers" else name]}},
            "test_split": "test",
        }
        return {"task": name, "output_type": kind, "metric_list": [{"metric": one} for one in metrics], **source, **more}

    choice = {
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": " ",
    }
    return [
        of("choices", "multiple_choice", ["acc", "acc_norm"], **choice),
        of(
            "answers",
            "generate_until",
            ["exact_match"],
            doc_to_text="{{question}}",
            doc_to_target="x",
            generation_kwargs={"until": ["e"], "max_gen_toks": 12, "do_sample": False},
        ),
        of("texts", "loglikelihood_rolling", ["bits_per_byte"], doc_to_text="", doc_to_target="{{text}}"),
    ]


def main() -> None:
    task = json.load(sys.stdin)
    torch.set_num_threads(1)
    said = {}
    with contextlib.redirect_stdout(sys.stderr):
        # Its cache of logits takes two windows of a periodic text for one where their contexts are of other lengths.
        theirs = HFLM(pretrained=task["directory"], dtype="float32", device="cpu", batch_size=4, logits_cache=False)
        ours = HarnessModel(Scorer(open_model(Path(task["checkpoint"])), rows=4))
        for name, model in (("theirs", theirs), ("ours", ours)):
            found = simple_evaluate(model, tasks=tasks(task), bootstrap_iters=0, log_samples=True, verbosity="ERROR")
            said[name] = {
                "metrics": {
                    f"{of} {metric}": value
                    for of, metrics in found["results"].items()
                    for metric, value in metrics.items()
                    if metric.endswith(",none") and isinstance(value, float)
                },
                "samples": {of: [sample["resps"] for sample in samples] for of, samples in found["samples"].items()},
            }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
