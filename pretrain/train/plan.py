"""Everything that is decided before anything is allocated: data opened, model shape completed, layout checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.config.schema import Config, Source
from pretrain.data.shards import PreparedData
from pretrain.data.stream import Samples, Stream
from pretrain.data.tokenizer import tokenizer_fingerprint
from pretrain.errors import ConfigError, DataError
from pretrain.models.decoder import Decoder, count_parameters
from pretrain.models.families import family_of
from pretrain.models.shape import complete
from pretrain.parallel.layout import Layout, plan_layout

# Keys of the model that change no tensor of a run under way.
NO_IDENTITY = {"init_std", "max_sequence_length", "attention"}


@dataclass(frozen=True)
class Plan:
    """A run that can start. `config` is complete: every derived value is filled in."""

    config: Config
    layout: Layout
    stream: Stream
    validation: list[Samples]
    parameters: int

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's files, in the first source."""
        return self.stream.sources[0].data.tokenizer_path

    def identity(self) -> dict[str, Any]:
        """What makes a run this run: a checkpoint that differs in any of these is another's. Flat, JSON values."""
        model = dataclasses.asdict(self.config.model)
        identity = {f"model.{k}": v for k, v in flatten(model).items() if k not in NO_IDENTITY}
        identity["optim.name"] = self.config.optim.name
        return identity | {f"data.{k}": v for k, v in flatten(self.stream.identity()).items()}


def make_plan(config: Config, world_size: int, device: torch.device) -> Plan:
    """Open the data and derive what the configuration leaves open. Raises ConfigError, DataError or LaunchError."""
    data = config.data
    if not data.sources:
        raise ConfigError("data.sources is empty; name a directory of tools/prepare_data.py: data.sources=[{path: DIR}]")
    sources = [_open(source, data.sequence_length) for source in data.sources]
    validation = [_open(source, data.sequence_length) for source in data.validation]
    config = complete_config(config, _vocabulary(config, sources + validation))
    family_of(config.model.family).to_hf(config.model)  # what could not be exported in the end is refused now
    stream = Stream(sources, [source.weight for source in data.sources], config.data.seed)
    parameters = model_size(config)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    layout = plan_layout(config, world_size, parameters, memory)
    available = sum(len(source) for source in sources)
    if available < config.batch.sequences:
        raise DataError(
            f"data.sources hold {available} samples of data.sequence_length={data.sequence_length}, less than one step of "
            f"batch.sequences={config.batch.sequences}; prepare more data, or lower one of the two"
        )
    return Plan(config, layout, stream, validation, parameters)


def complete_config(config: Config, vocab_size: int | None = None) -> Config:
    """The configuration with its derived values; the vocabulary only where it is given."""
    model = complete(config.model, config.data.sequence_length)
    if model.vocab_size is None:
        model = dataclasses.replace(model, vocab_size=vocab_size)
    seed = config.run.seed if config.data.seed is None else config.data.seed
    return dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, seed=seed))


def model_size(config: Config) -> int:
    """Parameters of the model, counted on the meta device."""
    with torch.device("meta"):
        return count_parameters(Decoder(config.model))


def _open(source: Source, sequence_length: int) -> Samples:
    return Samples(source.name or Path(source.path).name, PreparedData.open(source.path), sequence_length)


def _vocabulary(config: Config, sources: list[Samples]) -> int:
    first = sources[0].data
    if tokenizer_fingerprint(first.tokenizer_path) != first.tokenizer_sha256:
        raise DataError(
            f"{first.tokenizer_path} is not the tokenizer that {first.path} was prepared with; restore it or prepare again"
        )
    for other in (source.data for source in sources[1:]):
        if other.tokenizer_sha256 != first.tokenizer_sha256:
            raise DataError(
                f"{first.path} and {other.path} were prepared with different tokenizers; prepare both with the same one"
            )
    size = config.model.vocab_size
    if size is not None and size < first.vocab_size:
        raise ConfigError(
            f"model.vocab_size={size} is below the {first.vocab_size} tokens of the tokenizer of {first.path}; "
            "remove the key to take the data's, or raise it"
        )
    return first.vocab_size


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping of dotted paths."""
    if isinstance(values, (dict, list)):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        flat: dict[str, Any] = {}
        for name, value in items:
            flat |= flatten(value, f"{path}.{name}" if path else str(name))
        return flat
    return {path: values}
