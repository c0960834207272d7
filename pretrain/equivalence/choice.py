"""Which layouts of a configuration are compared, and with which overrides."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.data.training_data import open_data
from pretrain.distributed.cores import cores_of_host
from pretrain.distributed.ranks import choose_device
from pretrain.equivalence.cases import Case, every_case, reason_against, wanted_cases, with_references
from pretrain.equivalence.shrink import shrunk
from pretrain.errors import ConfigError
from pretrain.train.plan import with_vocabularies
from pretrain.train.resolve import resolve


@dataclass(frozen=True)
class LayoutChoice:
    """The layouts to compare, after the single processes that they are compared with."""

    cases: list[Case]
    overrides: list[str]
    """For every layout: those that were given, and those that shrink the model."""
    lines: list[str]
    """What is to be said about it."""


def chosen(path: Path, overrides: list[str], texts: list[str] | None, ranks: int | None, shrink: bool) -> LayoutChoice:
    """The layouts that are asked for; without `texts` every legal one. Raises ConfigError where none is legal, or one that is asked for is not."""
    config, _ = load_config(path, overrides)
    if config.data.pairs is not None:
        raise ConfigError(
            "tools/check_equivalence.py compares steps of a fixed number of samples, and data.pairs has others in each; use an "
            "encoder-decoder on data.objective=span_corruption"
        )
    most = ranks or _processes(config)
    complete, vocabulary = _completed(config)
    lines, experts = [], bool(complete.model.experts.count)
    if shrink:
        sharing = [case.processes for case in wanted_cases(texts or [], config, experts, most)]
        small = shrunk(config, complete, vocabulary, max([most, *sharing]))
        lines.append("shrunk by " + " ".join(f"'{override}'" if " " in override else override for override in small))
        overrides = [*overrides, *small]
        config, _ = load_config(path, overrides)
    every = list(every_case(config, most)) if texts is None else wanted_cases(texts, config, experts, most)
    reasons = {case: reason_against(case, path, overrides) for case in every}
    legal = [case for case, reason in reasons.items() if reason is None]
    refused = {case: reason for case, reason in reasons.items() if reason is not None}
    if texts is not None and refused:
        case, reason = next(iter(refused.items()))
        raise ConfigError(f"--layouts {case.name!r}: {reason}")
    if not legal:
        raise ConfigError(f"no layout on up to {most} processes is legal: {next(iter(refused.values()))}")
    lines += [f"refused   {case.name}: {reason}" for case, reason in refused.items()]
    if texts is None:
        lines.append(f"{len(legal)} legal layouts on up to {most} processes")
    return LayoutChoice(with_references(legal, config.batch.sequences), overrides, lines)


def _completed(config: Config) -> tuple[Config, int]:
    """The configuration, complete on one process, and the tokens of its data's vocabulary."""
    alone = dataclasses.replace(config, parallel=type(config.parallel)())
    complete = resolve(alone)
    data = open_data(complete, complete.model.encoder.decoder_start_id)
    return with_vocabularies(complete, data), data.vocabularies["vocab_size"].size


def _processes(config: Config) -> int:
    """The GPUs of this host; on a CPU its cores, up to 4."""
    import torch

    if choose_device(config, 0).type == "cuda":
        return max(2, torch.cuda.device_count())
    return max(2, min(4, cores_of_host()))
