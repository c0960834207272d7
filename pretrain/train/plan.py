"""Everything that is decided before anything is allocated: data opened, model shape completed, layout checked."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.checkpoint.export_check import check_map, has_export
from pretrain.config.keys import check_effects, leaves
from pretrain.config.model_schema import Model
from pretrain.config.schema import Config
from pretrain.data.batch_schedule import BatchSchedule
from pretrain.data.objective import Objective
from pretrain.data.pairs.order import PairOrder
from pretrain.data.pairs.prepared import PreparedPairs
from pretrain.data.pairs.training import PairTraining
from pretrain.data.samples import Samples
from pretrain.data.sources import batch_schedule, check_length, open_stream
from pretrain.data.span_corruption import SpanCorruption, Spans, added_tokens
from pretrain.data.stream import Stream
from pretrain.data.text.training import TextTraining
from pretrain.data.training_data import TrainingData, open_data, open_objective, sentinel_ids
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.decoder import count_parameters
from pretrain.models.families import complete, family_of
from pretrain.models.masks import attention_backend
from pretrain.models.router import check_router
from pretrain.models.shape import check_encoder, resolved_switches
from pretrain.observe.flops import flops_per_token
from pretrain.observe.translation import require_sacrebleu
from pretrain.optim.schedule import fit
from pretrain.parallel.layout import Layout, plan_layout
from pretrain.train.identity import check_accepted

NO_IDENTITY = {leaf.path for leaf in leaves(Model, None, resume="never") if leaf.resume != "never"}
"""Keys of the model that change no tensor of a run under way (see `model_identity`)."""


@dataclass(frozen=True)
class Plan:
    """A run that can start. `config` is complete: every derived value is filled in."""

    config: Config
    layout: Layout
    data: TrainingData
    objective: Objective
    schedule: BatchSchedule | PairOrder
    validation: list[Samples] | list[PreparedPairs]
    parameters: int
    notes: list[str]
    """What the configuration says and this run does otherwise."""

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward; of an encoder-decoder per target token, of which `tokens_per_second` counts."""
        if isinstance(self.data, PairTraining):
            return flops_per_token(self.config.model, *self.data.mean_lengths)
        if isinstance(self.objective, SpanCorruption):
            spans = self.objective.spans
            return flops_per_token(self.config.model, spans.source_length, spans.target_length)
        return flops_per_token(self.config.model, self.config.data.sequence_length)

    @property
    def added_tokens(self) -> list[str]:
        """What an export adds to the data's tokenizer."""
        if not isinstance(self.objective, SpanCorruption):
            return []
        return added_tokens(self.objective.first_sentinel, self.data.vocab_size)

    def facts(self) -> dict[str, Any]:
        """What came of the configuration on this host, which every rank must have in common with it: JSON values by name."""
        data, held = self.data, list(self.data.holdings)
        held += [(f"data.validation.{i}", holding) for i, source in enumerate(self.validation) for holding in source.holdings]
        contents: dict[str, str] = {}
        for key, holding in held:  # of some several: tokens and a packing index, or sources and targets
            name = f"the content of {key}"
            contents[f"{name} ({holding.path})" if name in contents else name] = holding.content
        decides = data.identity(self.schedule.consumed(self.config.run.steps))
        return {
            "the layout": dataclasses.asdict(self.layout),
            **contents,
            "the data's tokenizer": data.tokenizer._asdict(),
            "the data": {name: value for name, value in decides.items() if not name.endswith(".path")},
        }

    def identity(self, samples: int) -> dict[str, Any]:
        """What makes a run this run after so many samples: a checkpoint that differs in any of these is another's.

        Flat, JSON values. Of the data, only what has decided these samples.
        """
        data = self.config.data
        identity = model_identity(dataclasses.asdict(self.config.model))
        identity["optim.name"] = self.config.optim.name
        cut = {name: getattr(data, name) for name in ("packing", "document_mask", "boundary_loss")}
        tokenizer = self.data.tokenizer
        cut |= {
            "tokenizer": tokenizer.sha256,
            "tokenizer.eod_id": tokenizer.eod_id,
            "tokenizer.vocab_size": tokenizer.vocab_size,
        }
        cut["kind"] = self.data.kind
        cut["objective"] = {"name": data.objective}
        if isinstance(self.objective, SpanCorruption):
            cut["objective"] |= {"first_sentinel": self.objective.first_sentinel} | dataclasses.asdict(self.objective.spans)
        return identity | {f"data.{k}": v for k, v in flatten(cut | self.data.identity(samples)).items()}


def make_plan(config: Config, world_size: int, device: torch.device) -> Plan:
    """Open the data and derive what the configuration leaves open. Raises ConfigError, DataError or LaunchError."""
    check_accepted(config.run.accept_changes)
    check_effects(
        config, usual=usual_values(config)
    )  # before data is opened; what depends on derived values is checked by complete_config
    given = config
    opened, validation = open_data(config)
    config = complete_config(config, *_vocabularies(config, opened))
    _check_encoder(config, opened)
    if has_export(config.model):
        family_of(config.model.family).to_hf(config.model)  # what could not be exported in the end is refused now
        if config.checkpoint.export_check:
            check_map(config.model)
    _check_backend(config, device)
    parameters = model_size(config)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    layout = plan_layout(config, world_size, parameters, memory)
    notes = _notes(given, config, layout)
    schedule = opened.order if isinstance(opened, PairTraining) else batch_schedule(config)
    data = open_stream(config, opened, schedule) if isinstance(opened, list) else opened
    return Plan(config, layout, data, open_objective(config, data), schedule, validation, parameters, notes)


def _notes(given: Config, config: Config, layout: Layout) -> list[str]:
    resolved = resolved_switches(config.model) | {"parallel.strategy": layout.strategy}
    notes = check_effects(given, resolved, usual_values(given, config.model))
    if config.schedule != given.schedule:
        shortened = f"{config.schedule.warmup_steps} steps of warmup"
        if config.schedule.decay_steps is not None:
            shortened += f" and {config.schedule.decay_steps} of decay"
        notes.append(f"schedule.warmup_steps={given.schedule.warmup_steps} is above run.steps={given.run.steps}: {shortened}")
    return notes


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


def complete_config(config: Config, vocab_size: int | None = None, source_vocab_size: int | None = None) -> Config:
    """The configuration with its derived values; the vocabularies only where they are given."""
    spans = Spans.of_data(config.data)
    longest = max(spans.source_length, spans.target_length) if spans else config.data.sequence_length
    model = complete(config.model, longest)
    check_effects(config, resolved_switches(model), usual_values(config, model))
    if model.family != "hf":
        check_router(model)
    if model.vocab_size is None:
        model = dataclasses.replace(model, vocab_size=vocab_size)
    if model.encoder_layers and model.source_vocab_size is None and not model.tie_source:
        model = dataclasses.replace(model, source_vocab_size=source_vocab_size)
    if model.encoder_layers:
        check_encoder(model)  # what depends on the vocabulary
    seed = config.run.seed if config.data.seed is None else config.data.seed
    data, schedule = dataclasses.replace(config.data, seed=seed), fit(config.schedule, config.run.steps)
    return dataclasses.replace(config, model=model, data=data, schedule=schedule)


def usual_values(given: Config, model: Model | None = None) -> dict[str, list[Any]]:
    """Values that say nothing, for `check_effects`: a resolved configuration, which may be read again, names them all.

    `model`: the model's section, complete.
    """
    return {"data.seed": [given.run.seed]} | (family_of(given.model.family).usual_switches(given.model, model) if model else {})


def model_size(config: Config) -> int:
    """Parameters of the model, counted on the meta device."""
    with torch.device("meta"):
        return count_parameters(build_network(config.model))


def _vocabularies(config: Config, opened: list[Samples] | TextTraining | PairTraining) -> tuple[int, int | None]:
    """Token ids of the data's tokenizer; of pairs those of the targets' and of the sources'."""
    if isinstance(opened, PairTraining):
        where, sources = opened.pairs.target.path, opened.pairs.source.path
        return (
            _at_least("model.vocab_size", config.model.vocab_size, opened.vocab_size, where),
            _at_least("model.source_vocab_size", config.model.source_vocab_size, opened.source_vocab_size, sources),
        )
    if not isinstance(opened, list):
        return _at_least("model.vocab_size", config.model.vocab_size, opened.vocab_size, config.data.text.tokenizer), None
    own = opened[0].data.vocab_size
    needed = max(own, sentinel_ids(config, own).stop)
    return _at_least("model.vocab_size", config.model.vocab_size, needed, opened[0].data.path), None


def _at_least(key: str, size: int | None, needed: int, where: object) -> int:
    if size is not None and size < needed:
        raise ConfigError(
            f"{key}={size} is below the {needed} tokens of the tokenizer of {where}; remove the key to take the data's, or raise it"
        )
    return needed


def _check_encoder(config: Config, opened: list[Samples] | TextTraining | PairTraining) -> None:
    """An encoder needs pairs or spans, one table for both languages one tokenizer, and what is about pairs only has no effect elsewhere."""
    pairs = opened.pairs if isinstance(opened, PairTraining) else None
    translation = config.validation.translation
    if pairs is None:
        if config.model.encoder_layers and config.data.objective != "span_corruption":
            raise ConfigError(
                f"model.encoder_layers={config.model.encoder_layers} is trained on sentence pairs or on spans; set data.pairs, or "
                "data.objective=span_corruption"
            )
        if config.model.encoder_layers and not config.model.tie_source:
            raise ConfigError(
                "data.objective=span_corruption has one vocabulary for sources and targets; set model.tie_source=true"
            )
        return
    if config.model.tie_source and pairs.source.tokenizer.sha256 != pairs.target.tokenizer.sha256:
        raise ConfigError(
            f"model.tie_source=true, but {pairs.path} has a tokenizer for each side; prepare the pairs with one, or set it to false"
        )
    if translation.every_steps:
        require_sacrebleu()


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
