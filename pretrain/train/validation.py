"""Validation: the loss and translations of a fixed list of samples. These are the first of each source, in order, at any world size.

A stop request is honoured inside: the evaluation is abandoned, and none of its results is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.conventions import IGNORED
from pretrain.data.pairs.prepared_pairs import PreparedPairs
from pretrain.data.training_data import BatchLoader, TrainingData, ValidationData
from pretrain.distributed.ranks import Ranks
from pretrain.distributed.shards import own_passes
from pretrain.errors import DataError
from pretrain.optim.rules import model_is_mean
from pretrain.parallel.strategy import Strategy
from pretrain.train.prompts import Prompts
from pretrain.train.stop import StopPoll
from pretrain.train.translation import translate_and_score


def on_device(inputs: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The inputs on the device. The host does not wait for what a GPU has yet to compute before it copies them."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in inputs.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in inputs.items()}


class Evaluation:
    """The evaluations of a run on its validation sources, and when they are due. All ranks call all methods together."""

    def __init__(
        self,
        config: Config,
        data: TrainingData,
        strategy: Strategy,
        loader: BatchLoader,
        ranks: Ranks,
        averaged: Callable[[], AbstractContextManager],
    ) -> None:
        self.config, self.data, self.loader, self.ranks = config, data, loader, ranks
        self.strategy, self.averaged = strategy, averaged
        self.prompts = Prompts(config, data.tokenizer_path) if config.validation.prompts else None

    def due(self, step: int) -> list[str]:
        """The evaluations that are due after a step: `validation`, the same of the running mean of the weights, `samples`, `translation`."""
        validation, last = self.config.validation, step == self.config.run.steps
        found = []
        if self.data.validation and (last or (validation.every_steps and step % validation.every_steps == 0)):
            found.append("validation")
            if self.config.optim.ema_decay is not None:
                found.append("ema_validation")
            if self.prompts:
                found.append("samples")
        if validation.translation.every_steps and (last or step % validation.translation.every_steps == 0):
            found.append("translation")
        return found

    def run(self, names: list[str], poll: StopPoll) -> dict[str, Any]:
        """The results by name and source. Raises Stopped on all ranks if one was asked to stop."""
        actions = {"validation": self._validate, "ema_validation": self._validate, "translation": self._translate}
        try:
            found: dict[str, Any] = {}
            for name in names:
                with self.ranks.part(name, device=True), self.weights(name):
                    if name == "samples":
                        found[name] = self.prompts.continued(self.strategy.evaluate, self.ranks, poll)
                    else:
                        found[name] = {source.name: actions[name](source, poll) for source in self.data.validation}
            return found
        finally:
            self.strategy.release()

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """The weights that an evaluation is of: those of the model, or their running mean."""
        if name != "ema_validation" and not model_is_mean(self.config.optim):
            yield
            return
        self.strategy.release()  # what is gathered are the weights themselves
        with self.averaged():
            yield
            self.strategy.release()

    def bits_per_byte(self, losses: dict[str, float]) -> dict[str, float]:
        """Validation losses by source in bits per byte of text, for sources with a known size of the text."""
        sizes = {source.name: self.data.bytes_per_token(source) for source in self.data.validation}
        return {name: loss / math.log(2) / sizes[name] for name, loss in losses.items() if sizes[name]}

    @torch.no_grad()
    def _validate(self, source: ValidationData, poll: StopPoll) -> float:
        """Mean token loss over the first `validation.sequences` samples of a source (0: all), the same on every rank.

        Each sample's summed loss has its place in one list, and the list is added up in order in fp64. So the result does not depend
        on how the samples were spread over ranks. Every rank makes the same number of forward passes, because all ranks gather
        sharded weights together. The host reads the losses of a pass when the next one is queued. Raises Stopped on all ranks if one
        was asked to stop.
        """
        loader, sequences, rows = self.loader, self.config.validation.sequences, self.data.validation_rows(source)
        count = min(sequences, len(source)) if sequences else len(source)
        losses = torch.zeros(count, dtype=torch.float64)
        tokens = torch.zeros(count, dtype=torch.int64)
        problem: str | None = None
        queued: list[tuple[range, Tensor]] = []

        def read_first() -> None:
            here, losses_B = queued.pop(0)
            losses[here.start : here.stop] = losses_B.cpu()

        poll.begin()
        for here in own_passes(count, rows, loader.data_rank, loader.data_size):
            try:
                inputs = loader.validation_inputs(source, np.array(here, dtype=np.int64), rows)
            except (DataError, OSError) as error:  # raised by all at the end: the others are in the same passes
                problem, inputs = problem or str(error), loader.validation_inputs(source, np.empty(0, dtype=np.int64), rows)
            losses_B = self.strategy.evaluate(**on_device(inputs, self.ranks.device))[: len(here)].double()
            if problem is None:
                queued.append((here, losses_B))
                tokens[here.start : here.stop] = (inputs["targets_BT"][: len(here)] != IGNORED).sum(dim=1)
            if len(queued) > 1:
                read_first()
            poll.check()
        while queued:
            read_first()
        self.ranks.agree("reading of validation data", problem, DataError)
        return float(self.ranks.sum("validation losses", losses).sum() / self.ranks.sum("validation tokens", tokens).sum())

    def _translate(self, source: PreparedPairs, poll: StopPoll) -> dict[str, float] | None:
        share = self.loader.data_rank, self.loader.data_size
        return translate_and_score(self.strategy.evaluate, source, self.config, self.ranks, share, poll)
