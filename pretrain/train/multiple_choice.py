"""Multiple choice in the loop: how often a model finds the right continuation of a question likelier than the wrong ones.

As in the CORE metric of DataComp-LM (arXiv 2406.11794), an accuracy is also given centred: 0 for guessing, 1 for knowing all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from pretrain.conventions import IGNORED
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.distributed.shards import own_passes
from pretrain.errors import ConfigError, DataError
from pretrain.train.callbacks import Callback, RunHandle


@dataclass(frozen=True)
class Question:
    """Tokens of a question and of each of its continuations; `answer`: the number of the right one."""

    context: list[int]
    choices: list[list[int]]
    answer: int


class MultipleChoice(Callback):
    """Evaluates the questions of a file every few steps, spread over all ranks, under any layout.

    A line of `file` is `{"question": TEXT, "choices": [TEXT, ...], "answer": NUMBER}`. A choice follows its question after a space. The likeliest one is
    chosen by its summed log-probability (`NAME`), and by its mean per token (`NAME mean`); `NAME centred` is the first, centred.
    """

    def __init__(self, file: str | Path, every_steps: int, name: str | None = None) -> None:
        self.file, self.every_steps = Path(file), every_steps
        self.name = name or self.file.stem

    def start(self, run: RunHandle) -> None:
        if self.every_steps < 1:
            raise ConfigError(f"MultipleChoice: every_steps={self.every_steps} must be at least 1")
        if run.config.data.objective != "next_token" or run.config.data.pairs is not None:
            raise ConfigError("MultipleChoice asks models of next tokens; data.pairs and span corruption have none")
        tokenizer = load_tokenizer(run.tokenizer_path)
        # A training sample begins within the text; a question begins after the end of a document.
        self.questions = read_questions(self.file, tokenizer, tokenizer.eod_id)
        self.longest = max(len(q.context) + max(map(len, q.choices)) for q in self.questions) - 1
        if self.longest > run.config.data.sequence_length:
            raise ConfigError(
                f"{self.file}: the longest question and choice have {self.longest} tokens, more than data.sequence_length="
                f"{run.config.data.sequence_length}; shorten it"
            )
        self.longest = run.config.data.sequence_length  # the shape that training has, and so nothing is compiled anew

    def evaluate(self, run: RunHandle, step: int) -> dict[str, float]:
        if step % self.every_steps and step != run.config.run.steps:
            return {}
        rows = [(number, choice) for number, question in enumerate(self.questions) for choice in range(len(question.choices))]
        size, mesh = run.config.batch.micro_sequences, run.mesh
        losses = torch.zeros(len(rows), dtype=torch.float64)
        for here in own_passes(len(rows), size, mesh.data_rank, mesh.data_size):
            tokens_BT = torch.zeros(size, self.longest, dtype=torch.long)
            targets_BT = torch.full((size, self.longest), IGNORED)
            for place, row in enumerate(here):
                question, choice = self.questions[rows[row][0]], rows[row][1]
                joined = question.context + question.choices[choice]
                tokens_BT[place, : len(joined) - 1] = torch.tensor(joined[:-1])
                begin = len(question.context) - 1
                targets_BT[place, begin : len(joined) - 1] = torch.tensor(question.choices[choice])
            found = run.losses(tokens_BT=tokens_BT, targets_BT=targets_BT).double().cpu()
            losses[here.start : here.stop] = found[: len(here)]
        return self._scores(mesh.sum_over_data(f"losses of {self.name}", losses).tolist())

    def _scores(self, losses: list[float]) -> dict[str, float]:
        """`losses`: of each choice of each question, in order."""
        right = mean_right = guessed = 0.0
        for question in self.questions:
            own, losses = losses[: len(question.choices)], losses[len(question.choices) :]
            means = [loss / len(choice) for loss, choice in zip(own, question.choices)]
            right += own.index(min(own)) == question.answer
            mean_right += means.index(min(means)) == question.answer
            guessed += 1 / len(question.choices)
        count = len(self.questions)
        accuracy, chance = right / count, guessed / count
        centred = (accuracy - chance) / (1 - chance)
        return {self.name: accuracy, f"{self.name} mean": mean_right / count, f"{self.name} centred": centred}


def read_questions(file: Path, tokenizer: Tokenizer, first: int) -> list[Question]:
    """The questions of a file, each after the token `first`. Raises DataError for a line that is not a question."""
    try:
        lines = list(file.open(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            said = json.loads(line)
            question, choices, answer = said["question"], said["choices"], said["answer"]
            # The letters of a text would be choices too, and true a number.
            good = isinstance(question, str) and isinstance(choices, list) and type(answer) is int
            good = good and len(choices) > 1 and all(choices) and 0 <= answer < len(choices)
            texts = [" " + choice for choice in choices]
        except (ValueError, TypeError, KeyError, RecursionError):
            good = False
        if not good:
            raise DataError(f'{file}:{number}: no object {{"question": TEXT, "choices": [TEXT, TEXT, ...], "answer": NUMBER}}')
        origin = f"{file}:{number}"
        context, continuations = tokenizer.encode(question, origin), [tokenizer.encode(text, origin) for text in texts]
        found.append(Question([first, *context], continuations, answer))
    if not found:
        raise DataError(f"{file}: has no question in it")
    return found
