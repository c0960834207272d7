"""A user's model made small enough for a laptop, with its structure kept: what `tools/check_equivalence.py --shrink` overrides.

    kept       family, switches, ratios (query to key heads, width of the MLP and of experts to `dim`, window to length), experts in groups,
               latent attention, ties, what each kind of layer is, and which numbers of ranks can share heads, widths and experts
    smaller    layers, heads, widths, experts, the vocabulary where the data allow it, length, samples, steps

Nothing is guessed: the result is a list of overrides, which is checked like any configuration.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.models.layer_specs import LayerSpec, cycled, layer_specs
from pretrain.models.positions import rotated_width
from pretrain.models.shape import PATTERNS, flat, with_values

LENGTH, SEQUENCES, STEPS = 64, 16, 3
HEAD_DIM, KEY_HEADS, EXPERTS, GROUPS = 8, 2, 8, 4


def shrunk(given: Config, complete: Config, vocabulary: int, ranks: int) -> list[str]:
    """The overrides that shrink a configuration. `complete`: the same, complete; `vocabulary`: tokens of its data; `ranks`: the most that share it.

    Raises ConfigError where the structure cannot be kept.
    """
    _refuse(given)
    model = complete.model
    length = min(LENGTH, complete.data.sequence_length)
    values = _layers(model, ranks) | _heads(model, ranks)
    small = with_values(model, values)
    values |= _widths(model, small, ranks) | _lengths(model, complete.data.sequence_length, length)
    values |= {
        "vocab_size": min(model.vocab_size, -(-vocabulary // _unit(model.vocab_size, ranks)) * _unit(model.vocab_size, ranks))
    }
    before = flat(model)
    overrides = {f"model.{name}": value for name, value in values.items() if value != before[name]}
    if given.model.head_dim is None and not model.latent.kv_rank and small.dim == small.heads * small.head_dim:
        overrides.pop("model.head_dim", None)
    return [f"{key}={json.dumps(value)}" for key, value in (overrides | _run(given, complete, length)).items()]


def _refuse(given: Config) -> None:
    if given.model.hf_config is not None:
        raise ConfigError("--shrink: the sizes of model.hf_config are known to transformers alone; give a smaller one")
    if given.run.init_from:
        raise ConfigError(
            f"--shrink: run.init_from={given.run.init_from} has weights of the whole model; leave out one of the two"
        )


def _run(given: Config, complete: Config, length: int) -> dict[str, Any]:
    """The overrides outside the model. Lengths in tokens become steps, which they are in the complete configuration."""
    sequences, schedule, steps = min(SEQUENCES, given.batch.sequences), given.schedule, complete.schedule
    warmup, a_step = min(1, steps.warmup_steps), {"steps": 1, "tokens": None, "by_tokens": None}
    values: dict[str, tuple[Any, Any]] = {
        "data.sequence_length": (given.data.sequence_length, length),
        "batch.sequences": (given.batch.sequences, sequences),
        "batch.micro_sequences": (given.batch.micro_sequences, sequences),
        "batch.ramp": (given.batch.ramp, []),
        "batch.lengths": (given.batch.lengths, []),
        "run.tokens": (given.run.tokens, None),
        "run.steps": (given.run.steps, STEPS),
        "schedule.warmup_tokens": (schedule.warmup_tokens, None),
        "schedule.warmup_steps": (schedule.warmup_steps, warmup),
        "schedule.decay_tokens": (schedule.decay_tokens, None),
        "schedule.decay_steps": (schedule.decay_steps, steps.decay_steps and 1),
        "schedule.warmup_by_tokens": (schedule.warmup_by_tokens, None),
        "schedule.decay_by_tokens": (schedule.decay_by_tokens, None),
        "schedule.stages": (
            [dataclasses.asdict(stage) for stage in schedule.stages],
            [dataclasses.asdict(stage) | a_step for stage in steps.stages[: STEPS - warmup]],
        ),
        "validation.every_steps": (given.validation.every_steps, 0),
        "log.gradients_at": (given.log.gradients_at, []),
        "log.profile": (given.log.profile, []),
    }
    return {key: small for key, (before, small) in values.items() if small != before}


def _unit(value: int, ranks: int) -> int:
    """The smallest number that divides as evenly over up to `ranks` ranks as `value` does."""
    return math.lcm(*(n for n in range(1, ranks + 1) if value % n == 0))


def _scaled(value: int, share: float, ranks: int) -> int:
    """A share of a width, and no more than it, that as many ranks can split."""
    unit = math.lcm(_unit(value, ranks), 4 if value % 4 == 0 else 1)
    return min(value, max(1, round(value * share / unit)) * unit)


# ---- layers -----------------------------------------------------------------------------------------------------------


def _layers(model: Model, ranks: int) -> dict[str, Any]:
    """As few layers as have every kind of layer, and a stage for each rank."""
    kinds = layer_specs(model)
    wanted, least = set(kinds), max(2, ranks)
    count = next(n for n in range(1, model.layers + 1) if n >= min(least, model.layers) and _shows(kinds[:n], wanted, model))
    values: dict[str, Any] = {"layers": count}
    for name in PATTERNS:
        pattern = flat(model)[name]
        if len(pattern) > count:
            values[name] = cycled(pattern, count)
    if model.experts.dense_layers:
        values["experts.dense_layers"] = _dense(model, count)
    if model.encoder.layers:
        values["encoder.layers"] = min(model.encoder.layers, max(1, least // 2))
    return values


def _shows(kinds: list[LayerSpec], wanted: set[LayerSpec], model: Model) -> bool:
    """Whether all mixers, windows and rotations are among these layers, with and without MLPs. Which layers are dense is chosen anew."""
    if model.experts.count and len({kind.experts for kind in wanted}) > len(kinds):
        return False
    shown, all_of_them = ({(k.mixer, k.window, k.rope, k.mlp == "none") for k in some} for some in (kinds, wanted))
    return shown == all_of_them


def _dense(model: Model, count: int) -> list[int]:
    """The layers with an MLP in place of experts: those of the first ones that had it, and at least one with experts."""
    dense = [layer for layer in model.experts.dense_layers if layer < count]
    with_mlp = [layer for layer, spec in enumerate(layer_specs(model)[:count]) if spec.mlp != "none"]
    if not any(spec.experts for spec in layer_specs(model)):
        return dense
    return dense[: max(1, len(with_mlp) // 2)] if len(dense) == len(with_mlp) else dense or with_mlp[-1:]


# ---- heads and widths ---------------------------------------------------------------------------------------------------


def _heads(model: Model, ranks: int) -> dict[str, Any]:
    """Few heads in the same ratio, which the same numbers of ranks can share."""
    group, fewest = model.heads // model.kv_heads, min(KEY_HEADS, model.kv_heads)

    def shared(keys: int) -> list[bool]:
        whole = model.latent.kv_rank > 0
        return [(keys * group) % n == 0 and (whole or keys % n == 0 or n % keys == 0) for n in range(1, ranks + 1)]

    keys = next(n for n in range(fewest, model.kv_heads + 1) if shared(n) == shared(model.kv_heads))
    head_dim = _smallest(HEAD_DIM, model.head_dim, lambda width: _rotates(model, width))
    values = {"heads": keys * group, "kv_heads": keys, "head_dim": head_dim}
    if model.latent.kv_rank:
        latent = {name: min(HEAD_DIM, getattr(model.latent, name)) for name in ("rope_dim", "plain_dim", "value_dim")}
        values |= {f"latent.{name}": width for name, width in latent.items()}
        values["head_dim"] = latent["rope_dim"] + latent["plain_dim"]
    share, width = model.dim / (model.heads * model.head_dim), values["heads"] * values["head_dim"]
    values["dim"] = width if share == 1 else min(model.dim, max(2 * HEAD_DIM, round(share * width / 8) * 8))
    return values | (_linear_heads(model, values["dim"], ranks) if any(model.linear_attention.pattern) else {})


def _linear_heads(model: Model, dim: int, ranks: int) -> dict[str, Any]:
    """Few heads of linear attention, narrow ones, which the same numbers of ranks can share. All values of Mamba 2 together stay a multiple of the model's
    width, `dim` now, if they are one.
    """
    sizes = model.linear_attention

    def few(heads: int) -> int:
        fewest = range(min(KEY_HEADS, heads), heads + 1)
        return next(n for n in fewest if all((n % r == 0) == (heads % r == 0) for r in range(1, ranks + 1)))

    keys, key_dim = few(sizes.key_heads), min(HEAD_DIM, sizes.key_dim)
    heads = few(sizes.value_heads) if keys == 1 else keys * min(2, sizes.value_heads // sizes.key_heads)
    values = {
        "key_heads": keys,
        "value_heads": heads,
        "key_dim": key_dim,
        "value_dim": max(1, key_dim * sizes.value_dim // sizes.key_dim),
    }
    if sizes.kind == "mamba2" and sizes.value_heads * sizes.value_dim % model.dim == 0:
        values["value_dim"] = dim // math.gcd(dim, heads)
    return {f"linear_attention.{name}": value for name, value in values.items()}


def _smallest(first: int, last: int, fits: Callable[[int], bool]) -> int:
    return next((width for width in range(min(first, last), last, 2) if fits(width)), last)


def _rotates(model: Model, head_dim: int) -> bool:
    """Whether heads of this width can have rotary positions, where the model has them."""
    if model.positions != "rope" or model.latent.kv_rank:
        return True
    width = rotated_width(with_values(model, {"head_dim": head_dim}))
    return width % 2 == 0 and width >= 4


def _widths(model: Model, small: Model, ranks: int) -> dict[str, Any]:
    share = small.dim / model.dim
    values: dict[str, Any] = {"ffn_dim": _scaled(model.ffn_dim, share, ranks)}
    for name in ("kv_rank", "query_rank"):
        if rank := getattr(model.latent, name):
            values[f"latent.{name}"] = min(rank, max(HEAD_DIM, round(rank * share)))
    return values | (_experts(model, share, ranks) if model.experts.count else {})


def _experts(model: Model, share: float, ranks: int) -> dict[str, Any]:
    """Fewer experts. A token still chooses several, and groups stay groups."""
    experts = model.experts
    groups = next(n for n in range(min(GROUPS, experts.groups), experts.groups + 1) if experts.count % n == 0)
    unit = math.lcm(_unit(experts.count, ranks), groups)
    least = max(min(EXPERTS, experts.count), 2 * groups if groups > 1 else 1)
    count = min(experts.count, -(-least // unit) * unit)
    active_groups = max(1, round(groups * experts.active_groups / experts.groups))
    most = active_groups * count // groups
    active = count if experts.active == experts.count else min(experts.active, most, max(2, count // 4))
    values = {"count": count, "active": active, "ffn_dim": _scaled(experts.ffn_dim, share, ranks)}
    if experts.groups > 1:
        values |= {"groups": groups, "active_groups": active_groups}
    return {f"experts.{name}": value for name, value in values.items()}


def _lengths(model: Model, before: int, length: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    window = model.attention.window
    if window and window < before:
        values["attention.window"] = max(2, round(window * length / before))
    if model.positions == "learned":
        values["max_sequence_length"] = length
    return values
