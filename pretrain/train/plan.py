"""The plan of a run, made before anything is allocated: data opened, model shape completed, layout checked."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pretrain.config.keys import check_effects
from pretrain.config.parallel_schema import Precision
from pretrain.config.schema import Config
from pretrain.config.written import flatten, model_identity, to_yaml
from pretrain.data.training_data import TrainingData, open_data
from pretrain.errors import ConfigError
from pretrain.huggingface.export_check import check_map
from pretrain.models import network_without_values
from pretrain.models.decoder import count_parameters
from pretrain.models.families import family_of
from pretrain.models.masks import attention_backend
from pretrain.models.shape import check_encoder, flat, with_values
from pretrain.observe.trackers import check_trackers
from pretrain.optim.rules import check_groups, count_moments, describe
from pretrain.parallel.blocks import check_compiled_blocks
from pretrain.parallel.cuda_graph import check_cuda_graph
from pretrain.parallel.layout import Layout, plan_layout, take_rest
from pretrain.parallel.legality import check_backend, check_tensor
from pretrain.train.attention_kernel import check_attention_kernel
from pretrain.train.number_format import (
    FormatChoice,
    check_gradients,
    chosen_format,
    notes_on_format,
    plan_fp8,
)
from pretrain.train.prompts import Prompts, check_prompts
from pretrain.train.resolve import needs_masks, resolve, tokens_as_steps, unreached_stages, usual_values
from pretrain.train.translation import require_sacrebleu

STAND_IN_VOCABULARY = 1 << 15
"""The vocabulary for checking a network without its data. Nothing that is printed depends on it."""


@dataclass(frozen=True)
class Plan:
    """A run that can start. `config` is resolved, with the data's vocabularies, numbers for axes of -1 and the format to compute in.

    `layout` has what `parallel.strategy`, `replicate` and `shard` come to; in `config` they stay as they were given.
    """

    config: Config
    layout: Layout
    parameters: int
    moments: int
    """Numbers that the optimizers keep beside the parameters."""
    optimizers: list[str]
    """Lines on who updates what."""
    notes: list[str]
    """Lines about what this run does differently from the configuration."""
    data: TrainingData
    tokens: dict[str, int]
    """The keys that were given in tokens, and are counted in steps now."""

    @functools.cached_property
    def written_config(self) -> str:
        """`config` as YAML. Every save needs it while training waits, and making it takes tens of milliseconds."""
        return to_yaml(self.config)

    def flops_per_token(self, consumed: int) -> int:
        """FLOPs of a forward and backward pass per token, in the step after `consumed` samples. For encoder-decoders: per target token, the
        unit of `tokens_per_second`.
        """
        return network_without_values(self.config).flops_per_token(*self.data.lengths(consumed))

    def facts(self) -> dict[str, Any]:
        """The results of the configuration on this host, as JSON values by name. All ranks must have the same."""
        contents: dict[str, str] = {}
        for key, holding in self.data.holdings:  # some have several: tokens and a packing index, or sources and targets
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
        """The identity of a run after so many samples: a checkpoint that differs in any value belongs to another run.

        The values are flat JSON. The data's part holds only what has decided these samples.
        """
        identity = model_identity(dataclasses.asdict(self.config.model))
        identity["optim.name"] = self.config.optim.name
        precision = self.config.precision
        identity |= {"precision.master": precision.master, "precision.moments": precision.moments}
        return identity | {f"data.{name}": value for name, value in flatten(self.data.identity(samples)).items()}


def make_plan(given: Config, world_size: int, device: torch.device, choice: FormatChoice | None = None) -> Plan:
    """Resolve the configuration, open the data, plan the layout. Raises ConfigError, DataError or LaunchError.

    `choice`: what `precision.compute: auto` comes to; by default what this process measures.
    """
    choice = choice or chosen_format(given.precision.compute, device)
    config = with_format(resolve(take_rest(given, world_size)), choice)
    data = open_data(config, config.model.encoder.decoder_start_id)
    config = with_vocabularies(config, data)
    tokens = {key: value for key, (value, _) in _in_steps(given, config).items()}
    laid_out = _lay_out(given, config, world_size, device, choice)
    laid_out.notes.extend(_unused_rows(config, data))
    if config.validation.prompts:
        Prompts(config, data.tokenizer_path)  # refused now, also by --check, and not when the model has been built
    return Plan(config=config, data=data, tokens=tokens, **laid_out._asdict())


def check_without_data(given: Config, world_size: int, device: torch.device) -> None:
    """Make every check of a plan that needs no data. Raises ConfigError or LaunchError."""
    choice = chosen_format(given.precision.compute, device)
    config = _with_some_vocabulary(with_format(resolve(take_rest(given, world_size)), choice))
    _lay_out(given, config, world_size, device, choice)


def check_without_device(given: Config, world_size: int) -> None:
    """Make the checks of a plan that need neither data nor the devices of the run. Raises ConfigError or LaunchError."""
    config = _with_some_vocabulary(resolve(take_rest(given, world_size)))
    check_tensor(config.model, config.parallel.tensor)
    network = network_without_values(config)
    check_groups(network, config.optim)
    plan_layout(config, world_size, count_parameters(network), None)


def _with_some_vocabulary(config: Config) -> Config:
    """The configuration with a vocabulary of some size where the data would say it."""
    model = config.model
    own_table = model.encoder.layers and not model.encoder.share_embedding
    keys = ["vocab_size", "encoder.vocab_size"] if own_table else ["vocab_size"]
    return dataclasses.replace(config, model=with_values(model, {key: flat(model)[key] or STAND_IN_VOCABULARY for key in keys}))


class _LaidOut(NamedTuple):
    """What a plan has beside configuration and data, under the names of `Plan`."""

    layout: Layout
    parameters: int
    moments: int
    optimizers: list[str]
    notes: list[str]


def _lay_out(given: Config, config: Config, world_size: int, device: torch.device, choice: FormatChoice) -> _LaidOut:
    """Plan the layout of a resolved configuration. Raises ConfigError or LaunchError for one that cannot run so, or here."""
    _check_surroundings(config)
    _check_device(config, device)
    _check_lengths(config)
    check_tensor(config.model, config.parallel.tensor)  # the vocabulary is known only now
    network = network_without_values(config)
    check_groups(network, config.optim)
    check_compiled_blocks(network, config)
    parameters = count_parameters(network)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    layout = plan_layout(config, world_size, parameters, memory)
    check_backend(config, layout.strategy, device.type == "cuda")
    check_cuda_graph(config, layout.strategy, device)
    check_gradients(config, layout.strategy, layout.replicate)
    notes = plan_fp8(config, network, device) + _notes(given, config, layout)
    notes += notes_on_format(given.precision.compute, choice, device)
    return _LaidOut(layout, parameters, count_moments(network, config.optim), describe(network, config.optim), notes)


def _check_surroundings(config: Config) -> None:
    """Refuse now what would fail in the midst of a run, or at its end: an export, and packages that are missing."""
    if family_of(config.model.family).has_export:
        family_of(config.model.family).to_hf(config.model)
        if config.checkpoint.export_check:
            check_map(config.model)
    if config.data.pairs is not None and config.validation.translation.every_steps:
        require_sacrebleu()
    check_prompts(config)
    check_trackers(config.log)


def _check_device(config: Config, device: torch.device) -> None:
    """Raise ConfigError for what this device does not compute, and for keys without effect on it."""
    if needs_masks(config):
        attention_backend(config.model, device, training=True)
    check_attention_kernel(config, device)
    if device.type == "cpu" and config.precision.tf32:
        raise ConfigError("precision.tf32=true has no effect on a CPU; set it to false")
    if device.type != "cpu" and config.run.threads is not None:
        raise ConfigError(f"run.threads={config.run.threads} has no effect on a GPU; remove it")
    if device.type == "cpu" and config.log.memory_history:
        raise ConfigError("log.memory_history=true has no effect on a CPU; set it to false")


def _check_lengths(config: Config) -> None:
    """Raise ConfigError for samples, or rows of them, in which no token is as far ahead as the model predicts."""
    ahead, stages = config.model.predict_ahead, enumerate(config.batch.lengths)
    lengths = {f"batch.lengths.{i}.length": stage.length for i, stage in stages}
    for name, length in ({"data.sequence_length": config.data.sequence_length} | lengths).items():
        if length <= ahead:
            raise ConfigError(
                f"{name}={length} is not above model.predict_ahead={ahead}, whose last block would have nothing to learn; raise it"
            )


def _notes(given: Config, config: Config, layout: Layout) -> list[str]:
    resolved = flat(config.model, "model.") | {
        "parallel.strategy": layout.strategy,
        "precision.compute": config.precision.compute,
    }
    notes = check_effects(given, resolved, usual_values(given, config.model))
    counted = tokens_as_steps(given)
    notes += [
        f"{key}={tokens}: {steps} step{'s' if steps > 1 else ''}" for key, (tokens, steps) in _in_steps(given, counted).items()
    ]
    notes += unreached_stages(counted)
    if config.schedule != counted.schedule:
        shortened = f"{config.schedule.warmup_steps} step{'s' if config.schedule.warmup_steps != 1 else ''} of warmup"
        if config.schedule.decay_steps is not None:
            shortened += f" and {config.schedule.decay_steps} of decay"
        notes.append(
            f"schedule.warmup_steps={counted.schedule.warmup_steps} is above run.steps={counted.run.steps}: {shortened}"
        )
    return notes


def _in_steps(given: Config, counted: Config) -> dict[str, tuple[int, int]]:
    """The keys that are given in tokens, each with its value and the steps that it comes to."""
    run, schedule = given.run, given.schedule
    values = {
        "run.tokens": (run.tokens, counted.run.steps),
        "schedule.warmup_tokens": (schedule.warmup_tokens, counted.schedule.warmup_steps),
        "schedule.decay_tokens": (schedule.decay_tokens, counted.schedule.decay_steps),
        **{
            f"schedule.stages.{i}.tokens": (stage.tokens, found.steps)
            for i, (stage, found) in enumerate(zip(schedule.stages, counted.schedule.stages))
        },
    }
    return {key: value for key, value in values.items() if value[0] is not None}


def with_format(config: Config, choice: FormatChoice) -> Config:
    """The configuration with the number format that `precision.compute` comes to."""
    precision = dataclasses.replace(config.precision, compute=choice.format)
    # A note says what has no effect with the format that `auto` comes to.
    if config.precision.compute == "auto" and choice.format == "bf16":
        precision = dataclasses.replace(precision, tf32=False)
    if config.precision.compute == "auto" and choice.format == "fp32":
        usual = Precision()
        precision = dataclasses.replace(
            precision, fp8=usual.fp8, fp8_modules=usual.fp8_modules, master=usual.master, keep_casts=usual.keep_casts
        )
    return dataclasses.replace(config, precision=precision)


def with_vocabularies(config: Config, data: TrainingData) -> Config:
    """The configuration with the vocabularies of its data. Raises ConfigError for a network whose vocabulary is too small."""
    model, vocabularies = config.model, data.vocabularies
    for key, vocabulary in vocabularies.items():
        size = flat(model)[key]
        if size is not None and size < vocabulary.size:
            raise ConfigError(
                f"model.{key}={size} is below the {vocabulary.size} tokens of the tokenizer of {vocabulary.place}; remove the key to "
                "take the data's, or raise it"
            )
    source, target = vocabularies.get("encoder.vocab_size"), vocabularies["vocab_size"]
    if model.encoder.share_embedding and source is not None and source.tokenizer != target.tokenizer:
        raise ConfigError(
            f"model.encoder.share_embedding=true, but {source.place} and {target.place} were prepared with different tokenizers; prepare "
            "the pairs with one, or set it to false"
        )
    if model.vocab_size is None:
        model = dataclasses.replace(model, vocab_size=target.size)
    encoder = model.encoder
    if encoder.layers and encoder.vocab_size is None and not encoder.share_embedding and source is not None:
        model = with_values(model, {"encoder.vocab_size": source.size})
    if encoder.layers:
        check_encoder(model)  # the checks that depend on the vocabulary
    return dataclasses.replace(config, model=model)


def _unused_rows(config: Config, data: TrainingData) -> list[str]:
    """What a start says of tables with many more rows than tokens, as presets have them for tokenizers of other data."""
    if config.run.init_from is not None:  # the sizes are those of the weights
        return []
    rows = {key: flat(config.model)[key] or 0 for key in data.vocabularies}
    return [
        f"model.{key}={count}: {count - vocabulary.size:,} of these rows belong to no token of {vocabulary.place}; model.{key}=null takes as many as it has"
        for key, vocabulary in data.vocabularies.items()
        if (count := rows[key]) > max(1.05 * vocabulary.size, vocabulary.size + 128)
    ]
