"""Our models in lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness), without an export in between.

Its package is imported here, so this file is imported where tasks are asked for. Nothing of a task runs code: custom Python functions of task files
are the harness's own feature, and are loaded only from the folder that the user names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from pretrain.errors import ConfigError, shown
from pretrain.evaluation.scores import Scorer, Window
from pretrain.evaluation.texts import TextWatch
from pretrain.models.generate import Sampling, generate_batch

MOST_TOKENS = 256
"""The length of a generated answer, where a task does not say."""


class HarnessModel(TemplateLM):
    """A model as the harness asks it. A text begins after what the model expects before one, as in `tools/generate.py`."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer, self.opened = scorer, scorer.opened

    @property
    def eot_token_id(self) -> int:
        return self.opened.tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        return self.scorer.begin[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: object) -> list[int]:
        return self.opened.known(self.opened.tokenizer.encode(string), f"the text {shown(string)}")

    def _loglikelihood_tokens(self, requests: list, **options: object) -> list[tuple[float, bool]]:
        return self.scorer.log_likelihoods([self._window(context, continuation) for _, context, continuation in requests])

    def _window(self, context: list[int], continuation: list[int]) -> Window:
        begin = self.opened.begin if context[: len(self.opened.begin)] != self.opened.begin else []
        return begin + context, continuation

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        sums = []
        for request in requests:
            windows = list(self.scorer.windows(self.tok_encode(request.args[0])))
            sums.append(sum(value for value, _ in self.scorer.log_likelihoods(windows)))
        return sums

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        answers = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(i)
        for chosen in alike.values():
            for first in range(0, len(chosen), self.scorer.rows):
                part = chosen[first : first + self.scorer.rows]
                texts = self._generate([requests[i].args[0] for i in part], requests[part[0]].args[1])
                for i, text in zip(part, texts):
                    answers[i] = text
        return answers

    def _generate(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        watch = TextWatch(self.opened.tokenizer, [until] if isinstance(until, str) else until)
        most = int(options.get("max_gen_toks", MOST_TOKENS))
        draws = options.get("do_sample", False) and float(options.get("temperature", 0.0)) > 0
        sampling = Sampling(
            float(options["temperature"]) if draws else 0.0, int(options.get("top_k", 0)), float(options.get("top_p", 1.0))
        )
        room = self.opened.network.config.max_sequence_length - most
        if room < 1:
            raise ConfigError(
                f"a task generates {most} tokens, and the model knows {room + most} positions, so no room is left for its questions; "
                "give the task a smaller max_gen_toks, or leave it out"
            )
        prompts = [(self.opened.begin + self.tok_encode(context) or self.scorer.begin)[-room:] for context in contexts]
        rows = generate_batch(self.opened.network, prompts, most, self.opened.ends, sampling, ends=watch)
        return [watch.finish(row, tokens) for row, tokens in enumerate(rows)]


def run_tasks(
    scorer: Scorer, tasks: Sequence[str], folder: Path | None, limit: int | None, shots: int | None
) -> dict[str, Any]:
    """Results by task and metric. `folder`: task files of the user's own. Raises ConfigError for a task that is not known."""
    manager = TaskManager(include_path=str(folder) if folder else None)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise ConfigError(
            f"--tasks {unknown[0]}: lm-evaluation-harness knows no such task; --task-folder names a folder of task files"
        )
    found = simple_evaluate(
        HarnessModel(scorer), tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=shots, bootstrap_iters=0
    )
    return {
        task: {name.removesuffix(",none"): value for name, value in metrics.items() if isinstance(value, float)}
        for task, metrics in found["results"].items()
    }
