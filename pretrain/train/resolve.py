"""From a configuration as written to a resolved one whose values fit together. No data is opened, and nothing is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from pretrain.checkpoint.store_url import check_store
from pretrain.config.data_schema import Text
from pretrain.config.keys import MOST_STEPS, check_effects
from pretrain.config.model_schema import Model
from pretrain.config.optim_schema import FALLING_AT_ONCE, RateStage, Schedule
from pretrain.config.schema import Config
from pretrain.data.sources import batch_schedule, check_data, consumed_after
from pretrain.data.stream import micro_steps_of
from pretrain.data.tasks import Spans
from pretrain.errors import ConfigError
from pretrain.models.families import complete, family_of
from pretrain.models.masks import check_flex_with_dropout
from pretrain.models.shape import flat
from pretrain.optim.schedule import check_schedule, fit, wanted_decay
from pretrain.parallel.legality import check_context, check_expert, check_options, check_pipeline, check_tensor
from pretrain.train.identity import check_accepted
from pretrain.train.number_format import check_formats


def resolve(config: Config) -> Config:
    """The configuration with the values that follow from it alone: those of the model, the seed of the data, and steps for tokens.

    Vocabularies come from the data, and axes of -1 and the strategy from the processes and their memory (`plan.py`).
    Raises ConfigError for values that cannot go together. `--print-config`, `--check` and every run begin here.
    """
    check_accepted(config.run.accept_changes)
    check_effects(config, usual=usual_values(config))
    spans = Spans.of_data(config.data)
    longest = max(spans.source_length, spans.target_length) if spans else config.data.sequence_length
    model = complete(config.model, longest)
    _check_task(config, model)
    check_effects(config, flat(model, "model."), usual_values(config, model))
    family_of(model.family).check_training(model)
    written, config = config.schedule, tokens_as_steps(config)
    seed = config.run.seed if config.data.seed is None else config.data.seed
    data, schedule = dataclasses.replace(config.data, seed=seed), fit(config.schedule, config.run.steps)
    config = dataclasses.replace(config, model=model, data=data, schedule=schedule)
    check_data(config)
    _check_masks(config)
    _check_loss_weights(config)
    if config.parallel.context > 1 and model.attention_backend == "auto" and needs_masks(config):
        # Ranks take rows of a mask, which FlexAttention's masks of blocks do not have.
        config = dataclasses.replace(config, model=dataclasses.replace(model, attention_backend="sdpa"))
    _check_recomputation(config)
    _check_sharing(config)
    check_options(config)
    check_formats(config)
    if config.checkpoint.upload is not None:
        check_store(config)
    _check_width(config)
    if config.optim.name == "schedule_free_adamw" and config.schedule.name != "constant":
        raise ConfigError(
            f"optim.name=schedule_free_adamw takes the place of schedule.name={config.schedule.name}; set schedule.name=constant, which may have a warmup"
        )
    check_schedule(config.schedule, config.run.steps, written, consumed_after(config))
    micro_steps_of(config, 1)  # if one rank cannot split it, no number of ranks can
    return config


def tokens_as_steps(config: Config) -> Config:
    """The configuration with numbers of tokens as numbers of steps. A step takes as many samples as the batch schedule says.

    Under a ramp, the parts of the schedule that were given in tokens are marked, because their rate goes by tokens.
    """
    _check_warmup(config.schedule)
    run, schedule, length = config.run, _marked(config), config.data.sequence_length
    batches = batch_schedule(config)

    def steps_of(tokens: int) -> int:
        """Steps until so many tokens are reached."""
        return batches.step_of(-(-tokens // length) - 1)

    if run.tokens is not None:
        _check_number("run.tokens", run.tokens, steps_of(run.tokens))
        run = dataclasses.replace(run, steps=steps_of(run.tokens), tokens=None)
    if schedule.warmup_tokens is not None:
        schedule = dataclasses.replace(schedule, warmup_steps=steps_of(schedule.warmup_tokens), warmup_tokens=None)
    if schedule.decay_tokens is not None:
        whole = batches.after(0, run.steps) * length
        if schedule.decay_tokens > whole:
            raise ConfigError(
                f"schedule.decay_tokens={schedule.decay_tokens} do not fit in the run, which has {whole} tokens (run.steps={run.steps}); lower it"
            )
        decay = run.steps - (steps_of(whole - schedule.decay_tokens) if schedule.decay_tokens < whole else 0)
        schedule = dataclasses.replace(schedule, decay_steps=max(1, decay), decay_tokens=None)
    stages, end = [], schedule.warmup_steps
    for i, stage in enumerate(schedule.stages):
        _check_stage(config, i, stage)
        if stage.tokens is not None:
            steps = max(1, steps_of(batches.after(0, end) * length + stage.tokens) - end)
            _check_number(f"schedule.stages.{i}.tokens", stage.tokens, steps)
            stage = dataclasses.replace(stage, steps=steps, tokens=None)
        stages.append(stage)
        end += stage.steps
    return dataclasses.replace(config, run=run, schedule=dataclasses.replace(schedule, stages=stages))


def _marked(config: Config) -> Schedule:
    """The schedule with `by_tokens` where nothing was said and a length is in tokens. Without a ramp, steps and tokens are the same."""
    schedule = config.schedule
    if not config.batch.ramp:
        return schedule
    until_the_end = schedule.name in FALLING_AT_ONCE or (schedule.name == "wsd" and schedule.decay_steps is None)
    in_tokens = {
        "warmup_by_tokens": schedule.warmup_tokens is not None,
        "decay_by_tokens": schedule.decay_tokens is not None or (until_the_end and config.run.tokens is not None),
    }
    marks = {name: True for name, is_given in in_tokens.items() if is_given and getattr(schedule, name) is None}
    stages = [
        dataclasses.replace(stage, by_tokens=True)
        if stage.tokens is not None and stage.by_tokens is None and stage.shape != "constant"
        else stage
        for stage in schedule.stages
    ]
    return dataclasses.replace(schedule, stages=stages, **marks)


def _check_warmup(schedule: Schedule) -> None:
    has_warmup = schedule.warmup_steps or schedule.warmup_tokens is not None or schedule.name == "inverse_sqrt"
    if schedule.warmup_by_tokens is not None and not has_warmup:
        said = str(schedule.warmup_by_tokens).lower()
        raise ConfigError(
            f"schedule.warmup_by_tokens={said} has no effect without a warmup; set schedule.warmup_steps, or remove it"
        )


def _check_stage(config: Config, number: int, stage: RateStage) -> None:
    key = f"schedule.stages.{number}"
    if (stage.steps is None) == (stage.tokens is None):
        raise ConfigError(f"{key} needs one of steps and tokens, and not both")
    if stage.tokens is not None and config.data.pairs:
        raise ConfigError(f"{key}.tokens: batches of data.pairs differ in tokens; use steps")
    if stage.by_tokens is not None and not config.batch.ramp:
        raise ConfigError(f"{key}.by_tokens has no effect without batch.ramp; remove it")
    if stage.by_tokens is not None and stage.shape == "constant":
        raise ConfigError(f"{key}.by_tokens has no effect with {key}.shape=constant; remove it")


def _check_number(key: str, tokens: int, steps: int) -> None:
    if steps > MOST_STEPS:  # the run's own record of its configuration could not be read back
        raise ConfigError(
            f"{key}={tokens} would take {steps} steps, and {MOST_STEPS} is the most; lower it, or raise batch.sequences"
        )


def unreached_stages(config: Config) -> Iterator[str]:
    """Lines on stages of the batch, of the length and of the learning rate that the run does not come to, or not to their end."""
    yield from _unreached_sizes(config)
    yield from _unreached_rates(config.schedule, config.run.steps, consumed_after(config))


def _unreached_sizes(config: Config) -> Iterator[str]:
    batch, length, batches = config.batch, config.data.sequence_length, batch_schedule(config)
    last = batches.after(0, config.run.steps - 1)  # samples before the last step, which decide its size
    for key, stages, sizes, what in (
        ("batch.ramp", batch.ramp, [*(stage.sequences for stage in batch.ramp), batch.sequences], "sequences"),
        ("batch.lengths", batch.lengths, [*(stage.length for stage in batch.lengths), length], "tokens per sequence"),
    ):
        ends = [-(-stage.until_tokens // length) for stage in stages]
        begins = [0, *(batches.after(0, batches.step_of(end - 1)) for end in ends)]  # of the first step after the stage before
        reached = [begin <= last for begin in begins]
        empty = [i for i, end in enumerate(ends) if reached[i] and begins[i] >= end]
        for i in empty:
            yield f"{key}.{i} has no step, because none begins between {stages[i - 1].until_tokens} and {stages[i].until_tokens} tokens"
        missed = [str(size) for size, is_reached in zip(sizes, reached) if not is_reached]
        if missed:
            i = max(i for i, is_reached in enumerate(reached) if is_reached and i not in empty)
            yield (
                f"{key}.{i} lasts until {stages[i].until_tokens} tokens, and the last step begins after {last * length}: the run never comes to "
                f"{' or '.join(missed)} {what}"
            )


def _unreached_rates(schedule: Schedule, steps: int, consumed: Callable[[int], int]) -> Iterator[str]:
    end = schedule.warmup_steps
    for i, rate in enumerate(schedule.stages if schedule.name == "piecewise" else ()):
        begin, end = end, end + rate.steps
        if end > steps and (rate.shape != "constant" or begin >= steps):
            yield f"schedule.stages.{i} lasts until step {end}, and the run until {steps}: it never comes to {rate.ratio:g} of the rate"
    left, usual = steps - schedule.warmup_steps, wanted_decay(schedule, steps, consumed)
    if schedule.name in FALLING_AT_ONCE and left == 0:
        yield f"schedule.name={schedule.name}: the warmup takes all {steps} steps, so that the rate never falls to schedule.min_ratio={schedule.min_ratio:g}"
    if schedule.name == "wsd" and schedule.decay_steps is None and 0 <= left < usual:
        yield f"schedule.name=wsd: the warmup leaves {left} of {steps} steps for the decay, which would take {usual}"


def usual_values(given: Config, model: Model | None = None) -> dict[str, list[Any]]:
    """Values without effect that `check_effects` tolerates: a resolved configuration names them all and may be read again.

    `model`: the model's section, complete.
    """
    return {"data.seed": [given.run.seed]} | (family_of(given.model.family).usual_switches(given.model, model) if model else {})


def needs_masks(config: Config) -> bool:
    """Whether attention is more than causal: with document masks, a window that is shorter than a sample, sinks or a soft-cap."""
    switches = config.model.attention
    is_cut = 0 < (switches.window or 0) < config.data.sequence_length
    return family_of(config.model.family).is_ours and bool(
        config.data.document_mask or is_cut or switches.soft_cap or switches.sinks
    )


def _check_masks(config: Config) -> None:
    model = config.model
    if not family_of(model.family).is_ours:
        if config.data.document_mask:
            raise ConfigError(
                f"data.document_mask=true: models of model.family={model.family} take no document masks; set it to false"
            )
    elif model.attention_backend != "auto" and not needs_masks(config) and not model.attention.window:
        raise ConfigError(  # a recipe with a window may be tried with shorter samples
            f"model.attention_backend={model.attention_backend} has no effect without data.document_mask or a sliding window; remove it"
        )
    check_flex_with_dropout(model)


def _check_loss_weights(config: Config) -> None:
    for number, source in enumerate(config.data.sources):
        if source.loss_weight != 1 and (config.model.encoder.layers or not family_of(config.model.family).is_ours):
            raise ConfigError(
                f"data.sources.{number}.loss_weight={source.loss_weight:g}: only our decoders weigh the losses of sequences, not encoder-decoders "
                "and models that are code of transformers; remove it"
            )


def _check_sharing(config: Config) -> None:
    """Raise ConfigError for ranks that cannot share the network or its sequences."""
    for axis in ("tensor", "context", "pipeline", "expert"):
        size = getattr(config.parallel, axis)
        if size > 1 and not family_of(config.model.family).is_ours:
            raise ConfigError(
                f"parallel.{axis}={size}: models of model.family={config.model.family} are code of transformers, which ranks cannot share; "
                f"set parallel.{axis}=1"
            )
    check_tensor(config.model, config.parallel.tensor)
    check_context(config)
    check_pipeline(config)
    check_expert(config.model, config.parallel.expert)


def _check_recomputation(config: Config) -> None:
    family = config.model.family
    if config.parallel.activation_checkpointing == "selective" and not family_of(family).is_ours:
        raise ConfigError(
            f"parallel.activation_checkpointing=selective: blocks of model.family={family} may change the results of projections in place, "
            "which gives wrong gradients; set it to full"
        )


def _check_width(config: Config) -> None:
    """Raise ConfigError for a network whose widths `optim.base_width` does not scale."""
    base, model = config.optim.base_width, config.model
    if base is None:
        return
    reasons = {
        f"model.family={model.family} is code of transformers, which draws its weights itself": not family_of(
            model.family
        ).is_ours,
        "model.tie_embeddings=true makes one table of two that are scaled differently": model.tie_embeddings,
        f"model.init={model.init} has a scale of its own": model.init == "fan_in",
        f"model.embedding_multiplier={model.embedding_multiplier} makes updates of embeddings grow with the width": model.embedding_multiplier
        not in (None, 1.0),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"optim.base_width={base}: {reason}; remove it, or change the other key")


def _check_task(config: Config, model: Model) -> None:
    """Raise ConfigError unless the task fits the network: an encoder needs pairs or spans, and these need an encoder."""
    data, family = config.data, model.family
    has_data = data.pairs is None and (data.sources or data.text != Text())
    if model.encoder.layers and has_data and data.objective != "span_corruption":
        raise ConfigError(
            f"model.encoder.layers={model.encoder.layers} is trained on sentence pairs or on spans; set data.pairs, or "
            "data.objective=span_corruption"
        )
    if not model.encoder.layers and data.pairs is not None:
        raise ConfigError(
            f"data.pairs needs an encoder-decoder, but model.family={family} is decoder-only; set model.family to transformer or t5"
        )
    if not model.encoder.layers and data.objective == "span_corruption":
        raise ConfigError(
            f"data.objective=span_corruption needs an encoder-decoder, but model.family={family} is decoder-only; set model.family to t5"
        )
    if data.objective == "span_corruption" and not model.encoder.share_embedding:
        raise ConfigError(
            "data.objective=span_corruption has one vocabulary for sources and targets; set model.encoder.share_embedding=true"
        )
