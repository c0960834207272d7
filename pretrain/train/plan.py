"""Everything that is decided before anything is allocated: data opened, model shape completed, layout checked."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.checkpoint.export_check import check_map, has_export
from pretrain.config.data_schema import Text
from pretrain.config.keys import check_effects, leaves
from pretrain.config.model_schema import Model
from pretrain.config.schema import Config
from pretrain.data.span_corruption import Spans
from pretrain.data.training_data import TrainingData, data_identity, open_data
from pretrain.errors import ConfigError
from pretrain.models.decoder import count_parameters
from pretrain.models.families import family_of
from pretrain.models.masks import attention_backend
from pretrain.models.network import build_network
from pretrain.models.router import check_router
from pretrain.models.shape import check_encoder, complete, resolved_switches, usual_switches
from pretrain.observe.flops import flops_per_target_token, flops_per_token
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
    parameters: int
    notes: list[str]
    """What the configuration says and this run does otherwise."""

    @property
    def flops_per_token(self) -> int:
        """FLOPs of one forward and backward pass per token. For encoder-decoders: per target token, the unit of `tokens_per_second`."""
        count = flops_per_target_token if self.config.model.encoder_layers else flops_per_token
        return count(self.config.model, *self.data.lengths)

    def facts(self) -> dict[str, Any]:
        """What came of the configuration on this host, which every rank must have in common with it: JSON values by name."""
        contents: dict[str, str] = {}
        for key, holding in self.data.holdings:  # of some several: tokens and a packing index, or sources and targets
            name = f"the content of {key}"
            contents[f"{name} ({holding.path})" if name in contents else name] = holding.content
        decides = self.data.identity(self.data.samples_after(0, self.config.run.steps))
        return {
            "the layout": dataclasses.asdict(self.layout),
            **contents,
            "the data's tokenizer": self.data.tokenizer._asdict(),
            "the data": {name: value for name, value in decides.items() if not name.endswith(".path")},
        }

    def identity(self, samples: int) -> dict[str, Any]:
        """What makes a run this run after so many samples: a checkpoint that differs in any of these is another's.

        Flat, JSON values. Of the data, only what has decided these samples.
        """
        identity = model_identity(dataclasses.asdict(self.config.model))
        identity["optim.name"] = self.config.optim.name
        decided = data_identity(self.config, self.data, samples)
        return identity | {f"data.{name}": value for name, value in flatten(decided).items()}


def make_plan(config: Config, world_size: int, device: torch.device) -> Plan:
    """Open the data and derive what the configuration leaves open. Raises ConfigError, DataError or LaunchError."""
    check_accepted(config.run.accept_changes)
    check_effects(
        config, usual=usual_values(config)
    )  # before data is opened; what depends on derived values is checked by complete_config
    given = config
    config = complete_config(config)
    data = open_data(config, config.model.start_id)
    config = with_vocabularies(config, data)
    if has_export(config.model):
        family_of(config.model.family).to_hf(config.model)  # what could not be exported in the end is refused now
        if config.checkpoint.export_check:
            check_map(config.model)
    _check_backend(config, device)
    parameters = model_size(config)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    layout = plan_layout(config, world_size, parameters, memory)
    return Plan(config, layout, data, parameters, _notes(given, config, layout))


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


def complete_config(config: Config) -> Config:
    """The configuration with its derived values, but for the sizes of vocabularies, which the data has. Nothing is opened."""
    spans = Spans.of_data(config.data)
    longest = max(spans.source_length, spans.target_length) if spans else config.data.sequence_length
    model = complete(config.model, longest)
    _check_encoder(config, model)
    check_effects(config, resolved_switches(model), usual_values(config, model))
    if model.family != "hf":
        check_router(model)
    seed = config.run.seed if config.data.seed is None else config.data.seed
    data, schedule = dataclasses.replace(config.data, seed=seed), fit(config.schedule, config.run.steps)
    return dataclasses.replace(config, model=model, data=data, schedule=schedule)


def with_vocabularies(config: Config, data: TrainingData) -> Config:
    """The configuration with the vocabularies of its data. Raises ConfigError for a network whose vocabulary is too small."""
    model, vocabularies = config.model, data.vocabularies
    for key, vocabulary in vocabularies.items():
        size = getattr(model, key)
        if size is not None and size < vocabulary.size:
            raise ConfigError(
                f"model.{key}={size} is below the {vocabulary.size} tokens of the tokenizer of {vocabulary.place}; remove the key to "
                "take the data's, or raise it"
            )
    source, target = vocabularies.get("source_vocab_size"), vocabularies["vocab_size"]
    if model.tie_source and source is not None and source.tokenizer != target.tokenizer:
        raise ConfigError(
            f"model.tie_source=true, but {source.place} and {target.place} were prepared with different tokenizers; prepare the pairs with "
            "one, or set it to false"
        )
    if model.vocab_size is None:
        model = dataclasses.replace(model, vocab_size=target.size)
    if model.encoder_layers and model.source_vocab_size is None and not model.tie_source and source is not None:
        model = dataclasses.replace(model, source_vocab_size=source.size)
    if model.encoder_layers:
        check_encoder(model)  # what depends on the vocabulary
    return dataclasses.replace(config, model=model)


def usual_values(given: Config, model: Model | None = None) -> dict[str, list[Any]]:
    """Values that say nothing, for `check_effects`: a resolved configuration, which may be read again, names them all.

    `model`: the model's section, complete.
    """
    return {"data.seed": [given.run.seed]} | (usual_switches(given.model, model) if model else {})


def model_size(config: Config) -> int:
    """Parameters of the model, counted on the meta device."""
    with torch.device("meta"):
        return count_parameters(build_network(config.model))


def _check_encoder(config: Config, model: Model) -> None:
    """Raise ConfigError unless the task fits the network: an encoder is trained on pairs or on spans, and they need one."""
    data, family = config.data, model.family
    has_data = data.pairs is None and (data.sources or data.text != Text())
    if model.encoder_layers and has_data and data.objective != "span_corruption":
        raise ConfigError(
            f"model.encoder_layers={model.encoder_layers} is trained on sentence pairs or on spans; set data.pairs, or "
            "data.objective=span_corruption"
        )
    if not model.encoder_layers and data.pairs is not None:
        raise ConfigError(
            f"data.pairs needs an encoder-decoder, but model.family={family} is decoder-only; set model.family to transformer or t5"
        )
    if not model.encoder_layers and data.objective == "span_corruption":
        raise ConfigError(
            f"data.objective=span_corruption needs an encoder-decoder, but model.family={family} is decoder-only; set model.family to t5"
        )
    if data.objective == "span_corruption" and not model.tie_source:
        raise ConfigError(
            "data.objective=span_corruption has one vocabulary for sources and targets; set model.tie_source=true"
        )
    if data.pairs is not None and config.validation.translation.every_steps:
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
