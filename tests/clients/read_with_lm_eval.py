"""Run by another Python, which has lm-evaluation-harness: its tasks on an export, read by its own HFLM, and on the checkpoint, read by our
network and tokenizer. A task comes as JSON on standard input, the answer leaves as JSON.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pretrain.huggingface.open_model import open_model


class Ours(TemplateLM):
    """A checkpoint: a document begins after the end of another one, as in training."""

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        opened = open_model(Path(checkpoint))
        self.network, self.ours = opened.network, opened.tokenizer
        self.longest = self.network.config.max_sequence_length

    @property
    def eot_token_id(self) -> int:
        return self.ours.eod_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: object) -> list[int]:
        return self.ours.encode(string)

    @torch.no_grad()
    def scored(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = (context + continuation)[-self.longest - 1 :]
        scores = self.network(torch.tensor([ids[:-1]]))[0].log_softmax(-1)[-len(continuation) :]
        target = torch.tensor(continuation)
        return float(scores.gather(1, target[:, None]).sum()), bool((scores.argmax(-1) == target).all())

    def _loglikelihood_tokens(self, requests: list, **options: object) -> list[tuple[float, bool]]:
        return [self.scored(context, continuation) for _, context, continuation in requests]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        sums = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.longest, 1)
            sums.append(sum(self.scored(*make_disjoint_window(window))[0] for window in windows))
        return sums

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError


def tasks(task: dict) -> list[dict]:
    def of(name: str, kind: str, metrics: list[str], **more: object) -> dict:
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": task[name]}}, "test_split": "test"}
        return {"task": name, "output_type": kind, "metric_list": [{"metric": one} for one in metrics], **source, **more}

    choice = {
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": " ",
    }
    return [
        of("choices", "multiple_choice", ["acc", "acc_norm"], **choice),
        of("texts", "loglikelihood_rolling", ["bits_per_byte"], doc_to_text="", doc_to_target="{{text}}"),
    ]


def main() -> None:
    task = json.load(sys.stdin)
    torch.set_num_threads(1)
    said = {}
    with contextlib.redirect_stdout(sys.stderr):
        # Its cache of logits takes two windows of a periodic text for one where their contexts are of other lengths.
        theirs = HFLM(pretrained=task["directory"], dtype="float32", device="cpu", batch_size=4, logits_cache=False)
        for name, model in (("theirs", theirs), ("ours", Ours(task["checkpoint"]))):
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
