"""Everything that is decided before anything is allocated: data opened, model shape completed, layout checked."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.checkpoint.export_check import check_map, has_export
from pretrain.config.schema import Config
from pretrain.data.batch_schedule import BatchSchedule
from pretrain.data.samples import Samples
from pretrain.data.sources import batch_schedule, check_length, open_stream
from pretrain.data.stream import Stream
from pretrain.data.text.training import TextTraining
from pretrain.data.training_data import TrainingData, open_data
from pretrain.errors import ConfigError
from pretrain.models.decoder import count_parameters
from pretrain.models.families import family_of
from pretrain.models.masks import attention_backend
from pretrain.models.network import build_network
from pretrain.models.shape import complete
from pretrain.parallel.layout import Layout, plan_layout
from pretrain.train.identity import check_accepted

# Keys of the model that change no tensor of a run under way (see `model_identity`).
NO_IDENTITY = {
    "init_std", "max_sequence_length", "attention_backend",
    "experts.correction_rate", "experts.balance_loss", "experts.router_z_loss",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A run that can start. `config` is complete: every derived value is filled in."""

    config: Config
    layout: Layout
    data: TrainingData
    schedule: BatchSchedule
    validation: list[Samples]
    parameters: int

    def identity(self, samples: int) -> dict[str, Any]:
        """What makes a run this run after so many samples: a checkpoint that differs in any of these is another's.

        Flat, JSON values. Of the data, only what has decided these samples.
        """
        data = self.config.data
        identity = model_identity(dataclasses.asdict(self.config.model))
        identity["optim.name"] = self.config.optim.name
        cut = {name: getattr(data, name) for name in ("packing", "document_mask", "boundary_loss")}
        cut["tokenizer"] = self.data.tokenizer_sha256
        cut["kind"] = "prepared" if isinstance(self.data, Stream) else "text"
        return identity | {f"data.{k}": v for k, v in flatten(cut | self.data.identity(samples)).items()}


def make_plan(config: Config, world_size: int, device: torch.device) -> Plan:
    """Open the data and derive what the configuration leaves open. Raises ConfigError, DataError or LaunchError."""
    check_accepted(config.run.accept_changes)
    opened, validation = open_data(config)
    config = complete_config(config, _vocabulary(config, opened))
    if has_export(config.model):
        family_of(config.model.family).to_hf(config.model)  # what could not be exported in the end is refused now
        if config.checkpoint.export_check:
            check_map(config.model)
    _check_backend(config, device)
    parameters = model_size(config)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    layout = plan_layout(config, world_size, parameters, memory)
    schedule = batch_schedule(config)
    data = open_stream(config, opened, schedule) if isinstance(opened, list) else opened
    return Plan(config, layout, data, schedule, validation, parameters)


def _check_backend(config: Config, device: torch.device) -> None:
    model = config.model
    if model.family == "hf":
        if config.data.document_mask:
            raise ConfigError("data.document_mask=true: models of model.family=hf take no masks of documents; set it to false")
        return
    switches = model.attention
    if config.data.document_mask or switches.window or switches.soft_cap or switches.sinks:
        attention_backend(model, device, training=True)
    elif model.attention_backend != "auto":
        raise ConfigError(
            f"model.attention_backend={model.attention_backend} is about masks of documents and windows, and this run has neither; "
            "remove it"
        )


def check_data_suffices(plan: Plan, step: int = 0, samples: int = 0) -> None:
    """Raise ConfigError when the run, going on after `step` steps that took `samples`, would outlast its data."""
    if isinstance(plan.data, Stream):
        check_length(plan.config, plan.data.mixture, plan.schedule, step, samples)


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
        return count_parameters(build_network(config.model))


def _vocabulary(config: Config, opened: list[Samples] | TextTraining) -> int:
    needed, where = (
        (opened[0].data.vocab_size, opened[0].data.path)
        if isinstance(opened, list)
        else (opened.vocab_size, config.data.text.tokenizer)
    )
    size = config.model.vocab_size
    if size is not None and size < needed:
        raise ConfigError(
            f"model.vocab_size={size} is below the {needed} tokens of the tokenizer of {where}; "
            "remove the key to take the data's, or raise it"
        )
    return needed


def model_identity(model: dict[str, Any]) -> dict[str, Any]:
    """What of a model section makes its tensors these tensors, flat. The longest sequence does where each position has a vector."""
    if model["family"] == "hf":
        return {"model.family": "hf", **{f"model.hf_config.{k}": v for k, v in flatten(json.loads(model["hf_config"])).items()}}
    free = NO_IDENTITY - {"max_sequence_length"} if model["positions"] == "learned" else NO_IDENTITY
    return {f"model.{name}": value for name, value in flatten(model).items() if name not in free}


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping of dotted paths."""
    if isinstance(values, (dict, list)):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        flat: dict[str, Any] = {}
        for name, value in items:
            flat |= flatten(value, f"{path}.{name}" if path else str(name))
        return flat
    return {path: values}
