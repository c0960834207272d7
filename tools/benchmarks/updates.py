"""What an optimizer's step costs beside the forward and backward passes of its batch: GPT-2's shape of 125M parameters, on one thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from benchmarks.measure import Options, Row, in_turns, require

from pretrain.config.load import load_config
from pretrain.models import network_without_values
from pretrain.optim.optimizer import OptimizerSet
from pretrain.parallel.initialise import initialise
from pretrain.train.resolve import resolve

NAMES = ("adamw", "lion", "muon", "adafactor", "schedule_free_adamw")
BATCH_TOKENS = 32_768


def updates(options: Options) -> list[Row]:
    """CPU seconds of a step, and what share that is of the passes over `BATCH_TOKENS` tokens."""
    width, layers, length = options.scaled(12, 1) * 64, options.scaled(12, 2), options.scaled(512, 16)
    model = f"model={{family: gpt2, dim: {width}, layers: {layers}, heads: {width // 64}, vocab_size: {options.scaled(32_000, 64)}}}"
    config = resolve(load_config(None, [model, f"data.sequence_length={length}"])[0])
    network = network_without_values(config).to_empty(device="cpu")
    initialise(network, 0)
    tokens_BT = torch.randint(config.model.vocab_size, (4, length + 1))

    def passes() -> None:
        network.zero_grad()
        loss = network(tokens_BT=tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:]).sum() / (4 * length)
        loss.backward()

    def stepping(name: str) -> Callable[[], None]:
        optimizers = OptimizerSet(network, dataclasses.replace(config.optim, name=name))
        return lambda: optimizers.step(1e-6, torch.tensor(True))

    passes()
    turns = in_turns({"passes": passes, **{name: stepping(name) for name in NAMES}}, options)
    require(all(bool(p.isfinite().all()) for p in network.parameters()), "a weight is not finite")
    per_batch = turns["passes"].best / (4 * length) * BATCH_TOKENS
    return [
        Row(
            "optimizers", name, turns[name].best, "s", "cpu", turns[name].median, better="lower", baseline=turns["adamw"].best,
            note=f"{turns[name].best / per_batch:.2%} of the passes over {BATCH_TOKENS:,} tokens, {per_batch:.3g} s",
        )
        for name in NAMES
    ]  # fmt: skip
