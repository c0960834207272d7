"""Completion of a model section: defaults and derived keys are filled in, and what cannot go together is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, nearest_multiples
from pretrain.models.layer_specs import cycled, layer_specs, shortest_period

# Switches of a plain pre-norm decoder, where neither the configuration nor the family says anything.
PLAIN: dict[str, Any] = {
    "sublayers": ["both"], "encoder.layers": 0, "encoder.share_embedding": False, "tie_embeddings": False, "norm_eps": 1e-5, "init": "fixed", "init_std": 0.02, "positions": "rope", "parallel_residual": False, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0, "logit_multiplier": 1.0, "logit_soft_cap": 0.0,
    "norm.kind": "rms", "norm.placement": "pre", "norm.qk": "none",
    "rope.theta": 10000.0, "rope.fraction": 1.0, "rope.layout": "half", "rope.pattern": [True], "rope.scaling": "none",
    "rope.factor": 1.0, "rope.low_frequency": 1.0, "rope.high_frequency": 4.0, "rope.beta_fast": 32.0, "rope.beta_slow": 1.0,
    "rope.attention_factor": 0.0, "rope.mscale": 0.0, "rope.mscale_all_dim": 0.0, "rope.truncate": True, "rope.scale_local": True,
    "relative.buckets": 32, "relative.max_distance": 128,
    "attention.bias": [], "attention.soft_cap": 0.0, "attention.window": 0, "attention.window_pattern": [True],
    "attention.sinks": False, "attention.output_gate": False,
    "linear_attention.pattern": [False], "linear_attention.kind": "gated_delta", "linear_attention.key_heads": 0, "linear_attention.value_heads": 0, "linear_attention.key_dim": 0,
    "linear_attention.value_dim": 0, "linear_attention.kernel": 4, "linear_attention.negative_eigenvalues": False,
    "linear_attention.norm_placement": "same", "linear_attention.norm_eps": 0.0,
    "latent.kv_rank": 0, "latent.query_rank": 0, "latent.rope_dim": 0, "latent.plain_dim": 0, "latent.value_dim": 0, "latent.norm_eps": 1e-6,
    "mlp.activation": "silu", "mlp.gated": True, "mlp.bias": False,
    "experts.count": 0, "experts.active": 0, "experts.ffn_dim": 0, "experts.shared": 0, "experts.shared_gate": False, "experts.dense_layers": [],
    "experts.scoring": "softmax", "experts.normalise": True, "experts.scale": 1.0, "experts.groups": 1, "experts.active_groups": 1,
    "experts.router_bias": False, "experts.correction": False, "experts.correction_rate": 0.0, "experts.balance_loss": 0.0,
    "experts.balance_scope": "sequence", "experts.router_z_loss": 0.0,
}  # fmt: skip


PATTERNS = ("sublayers", "rope.pattern", "attention.window_pattern", "linear_attention.pattern")  # repeated over the layers


def flat(model: Any, prefix: str = "") -> dict[str, Any]:
    """The keys of a section and of those in it, with dots."""
    values = {}
    for own, value in vars(model).items():  # the fields, in their order
        name = f"{prefix}{own}"
        values |= flat(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return values


def with_values(model: Any, values: dict[str, Any]) -> Any:
    """A copy of a section in which these dotted keys are replaced."""
    own, nested = {}, {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            own[name] = value
    sections = {name: with_values(getattr(model, name), inner) for name, inner in nested.items()}
    return dataclasses.replace(model, **own, **sections)


def completed(model: Model, switches: Callable[[Model], dict[str, Any]], sequence_length: int | None = None) -> Model:
    """The section with every derivable key filled in (`vocab_size` stays as it is). `switches`: what its family says of open ones.

    Raises ConfigError naming both keys.
    """
    if model.hf_config is not None:
        raise ConfigError(f"model.hf_config describes the model of model.family=hf, and this is {model.family}; remove it")
    model = _sizes(model, sequence_length)
    said = {name for name, value in flat(model).items() if value is not None}
    defaults = {name: value for name, value in {**PLAIN, **switches(model)}.items() if name not in said}
    # A family's pattern may be longer than a small model.
    defaults |= {name: defaults[name][: model.layers] for name in PATTERNS if name in defaults}
    model = with_values(model, defaults)
    patterns = {name: attrgetter(name)(model) for name in PATTERNS}
    for name, values in patterns.items():
        if not 1 <= len(values) <= model.layers:
            raise ConfigError(
                f"model.{name} has {len(values)} entries for model.layers={model.layers}; give 1 to {model.layers}"
            )
    patterns = {name: shortest_period(cycled(values, model.layers)) for name, values in patterns.items()}
    model = with_values(model, patterns | {"linear_attention.pattern": _linear_pattern(model)})
    last = {
        "rope.local_theta": model.rope.local_theta or model.rope.theta,
        "attention.query_scalar": model.attention.query_scalar or query_scalar(model),
        "ffn_dim": model.ffn_dim or (-(-8 * model.dim // (3 * 64)) * 64 if model.mlp.gated else 4 * model.dim),
    }
    last["experts.ffn_dim"] = model.experts.ffn_dim or (last["ffn_dim"] if model.experts.count else 0)
    last |= _linear_sizes(model, said)
    if not (model.attention.window and any(patterns["attention.window_pattern"])):
        # There is one way to say that no layer has a window.
        last |= {"attention.window": 0, "attention.window_pattern": [True], "rope.local_theta": model.rope.theta}
    if model.rope.scaling != "none":
        last["rope.original_length"] = model.rope.original_length or model.max_sequence_length
    model = with_values(model, last)
    _check(model)
    return model


def _linear_pattern(model: Model) -> list[bool]:
    """The pattern of linear attention, where layers without attention of any kind have none."""
    layers = zip(cycled(model.linear_attention.pattern, model.layers), cycled(model.sublayers, model.layers))
    return shortest_period([linear and sublayers != "mlp" for linear, sublayers in layers])


def _linear_sizes(model: Model, said: set[str]) -> dict[str, int]:
    """The sizes of linear attention that follow from others, where a layer has it. `said`: keys that were given a value."""
    sizes = model.linear_attention
    if not any(sizes.pattern):
        return {}
    for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
        if f"linear_attention.{name}" in said and not getattr(sizes, name):
            raise ConfigError(
                f"model.linear_attention.{name}=0 leaves nothing of linear attention; set it to 1 or more, or leave it out"
            )
    if sizes.kind == "mamba2":
        key_heads, key_dim = sizes.key_heads or 1, sizes.key_dim or 128
        value_dim = sizes.value_dim or next(n for n in range(64, 0, -1) if 2 * model.dim % n == 0)
        value_heads = sizes.value_heads or max(1, 2 * model.dim // value_dim)
    else:
        key_heads, key_dim = sizes.key_heads or model.heads, sizes.key_dim or model.head_dim
        value_dim, value_heads = sizes.value_dim or key_dim, sizes.value_heads or key_heads
    found = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
    return {f"linear_attention.{name}": value for name, value in found.items()}


def _sizes(model: Model, sequence_length: int | None) -> Model:
    if model.latent.kv_rank and model.head_dim is None:
        model = dataclasses.replace(model, head_dim=(model.latent.plain_dim or 0) + (model.latent.rope_dim or 0) or None)
    if model.head_dim is None and model.dim % model.heads:
        raise ConfigError(
            f"model.dim={model.dim} is not divisible by model.heads={model.heads}; "
            f"nearest legal model.dim: {nearest_multiples(model.dim, model.heads)}, or set model.head_dim"
        )
    kv_heads = model.kv_heads or model.heads
    if model.heads % kv_heads:
        legal = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        raise ConfigError(f"model.heads={model.heads} is not divisible by model.kv_heads={kv_heads}; legal: {legal}")
    longest = model.max_sequence_length or sequence_length
    if sequence_length and longest < sequence_length:
        raise ConfigError(
            f"model.max_sequence_length={longest} is below data.sequence_length={sequence_length}; lower the latter, or set model.max_sequence_length="
            f"{sequence_length} (of a trained model: positions that it has never seen)"
        )
    head_dim = model.head_dim or model.dim // model.heads
    return dataclasses.replace(model, head_dim=head_dim, kv_heads=kv_heads, max_sequence_length=longest)


def _check(model: Model) -> None:
    if model.latent.kv_rank:
        _check_latent(model)
    if model.experts.count:
        _check_experts(model)
    elif odd := [name for name, value in flat(model.experts).items() if value != PLAIN[f"experts.{name}"]]:
        raise ConfigError(
            f"model.experts.{odd[0]} is set, by the configuration or by model.family={model.family}, and model.experts.count=0: there are "
            "no experts; set model.experts.count and model.experts.active, or remove it"
        )
    if model.parallel_residual and model.norm.placement == "post":
        raise ConfigError(
            "model.parallel_residual=true with model.norm.placement=post: there is no sum of one sublayer to norm; choose another placement"
        )
    if model.mlp.activation == "silu_clamped" and not model.mlp.gated:
        raise ConfigError("model.mlp.activation=silu_clamped is of a gated MLP (gpt-oss); set model.mlp.gated=true")
    if model.positions == "learned" and model.max_sequence_length is None:
        raise ConfigError(
            "model.max_sequence_length is missing: model.positions=learned has a vector for each position; set it"
        )
    _check_rotation(model)
    _check_layers(model)
    _check_linear(model)
    check_encoder(model)
    _check_relative(model)


def _check_layers(model: Model) -> None:
    """Some layer has attention, and some an MLP; what patterns name is there."""
    specs, sublayers, linear = layer_specs(model), model.sublayers, model.linear_attention.pattern
    said = [f"model.sublayers={sublayers}"] if sublayers != ["both"] else []
    said_of_mixers = [*said, *([f"model.linear_attention.pattern={linear}"] if any(linear) else [])]
    if not any(spec.has_scores for spec in specs):
        raise ConfigError(
            f"{' with '.join(said_of_mixers)} leaves none of model.layers={model.layers} with attention; leave one out"
        )
    if said and all(spec.mlp == "none" for spec in specs):
        raise ConfigError(f"{said[0]} leaves none of model.layers={model.layers} with an MLP; leave one with it")
    if said and (odd := [layer for layer in model.experts.dense_layers if specs[layer].mlp == "none"]):
        raise ConfigError(
            f"model.experts.dense_layers={model.experts.dense_layers}: layer {odd[0]} has no MLP, by {said[0]}; leave it out"
        )
    if said and model.parallel_residual:
        raise ConfigError(
            f"model.parallel_residual=true with {said[0]}: a layer with one sublayer has none beside it; choose one of the two"
        )
    if said and model.predict_ahead:
        raise ConfigError(f"model.predict_ahead={model.predict_ahead} with {said[0]} is not built; remove one of the two")
    kept = [layer for layer, spec in enumerate(specs) if spec.has_scores]
    for name, acts in (
        ("attention.window_pattern", model.attention.window > 0),
        ("rope.pattern", model.positions == "rope"),
    ):
        values = cycled(attrgetter(name)(model), model.layers)
        if acts and any(values) and not any(values[layer] for layer in kept):
            raise ConfigError(
                f"model.{name}={attrgetter(name)(model)} names only layers without attention, by {' and '.join(said_of_mixers)}; change one of them"
            )


def _check_linear(model: Model) -> None:
    sizes = model.linear_attention
    if not any(sizes.pattern):
        return
    if "post" in (placements := {spec.placement for spec in layer_specs(model)}) and len(placements) > 1:
        raise ConfigError(
            f"model.linear_attention.norm_placement={sizes.norm_placement} with model.norm.placement={model.norm.placement}: post norms the residual "
            "stream itself, in every layer or in none; choose others"
        )
    if sizes.value_heads % sizes.key_heads:
        legal = nearest_multiples(sizes.value_heads, sizes.key_heads)
        raise ConfigError(
            f"model.linear_attention.value_heads={sizes.value_heads} is not divisible by model.linear_attention.key_heads={sizes.key_heads}; nearest: "
            f"{legal}"
        )


def _check_rotation(model: Model) -> None:
    from pretrain.models.positions import rotated_width

    if model.positions != "rope":
        return
    width = rotated_width(model)
    if width % 2 or not width:
        if model.head_dim < 2 or (model.rope.fraction == 1 and not model.latent.kv_rank):
            raise ConfigError(
                f"model.head_dim={model.head_dim} must be even: rotary positions turn pairs; "
                f"nearest: {nearest_multiples(model.head_dim, 2)}"
            )
        even = max(2, width // 2 * 2)
        exact, above = round(even / model.head_dim, 4), round((even + 0.5) / model.head_dim, 4)
        fraction = exact if int(model.head_dim * exact) == even else above  # a product just below `even` is rounded down
        raise ConfigError(
            f"model.rope.fraction={model.rope.fraction} of model.head_dim={model.head_dim} is {width}: rotary positions turn pairs, "
            f"so it must be even and not 0; model.rope.fraction={fraction:g} makes {even}"
        )
    if model.rope.scaling == "dynamic" and width < 4:
        raise ConfigError(f"model.rope.scaling=dynamic needs at least 4 rotated components of a head, and there are {width}")
    rope = model.rope
    if rope.scaling == "llama3" and rope.low_frequency >= rope.high_frequency:
        raise ConfigError(
            f"model.rope.low_frequency={rope.low_frequency:g} (low_freq_factor of config.json) must be below "
            f"model.rope.high_frequency={rope.high_frequency:g} (high_freq_factor): waves between the two are blended; change one"
        )


def _check_relative(model: Model) -> None:
    relative = model.relative
    if model.positions == "relative" and relative.max_distance <= relative.buckets // 2:
        raise ConfigError(
            f"model.relative.max_distance={relative.max_distance} is within the {relative.buckets // 2} distances that "
            f"model.relative.buckets={relative.buckets} tell apart exactly; raise it"
        )


def check_encoder(model: Model) -> None:
    """Raise ConfigError where an encoder-decoder is asked for what it is not built with, or a decoder for an encoder's."""
    if not model.encoder.layers:
        _check_no_encoder(model)
        return
    plain: dict[str, Any] = {
        "norm.qk": "none", "parallel_residual": False, "attention.soft_cap": 0.0, "attention.window": 0, "attention.sinks": False,
        "attention.output_gate": False, "linear_attention.pattern": [False], "sublayers": ["both"],
        "latent.kv_rank": 0, "experts.count": 0, "residual_multiplier": 1.0, "predict_ahead": 0,
    }  # fmt: skip
    values = flat(model)
    for name, value in plain.items():
        if values[name] != value:
            raise ConfigError(f"model.{name}={values[name]} is not built for an encoder-decoder; remove it")
    for name, legal in (("norm.placement", ("pre", "post")), ("positions", ("sinusoidal", "relative", "none"))):
        if values[name] not in legal:
            raise ConfigError(f"model.{name}={values[name]} is not built for an encoder-decoder; legal: {', '.join(legal)}")
    encoder = model.encoder
    if encoder.share_embedding and encoder.vocab_size not in (None, model.vocab_size):
        raise ConfigError(
            f"model.encoder.share_embedding=true with model.encoder.vocab_size={encoder.vocab_size} and "
            f"model.vocab_size={model.vocab_size}: one table has one size; remove model.encoder.vocab_size"
        )
    start_id = encoder.decoder_start_id
    if start_id is not None and model.vocab_size is not None and start_id >= model.vocab_size:
        raise ConfigError(f"model.encoder.decoder_start_id={start_id} is no token of model.vocab_size={model.vocab_size}")
    if model.positions == "sinusoidal" and model.dim % 2:
        raise ConfigError(f"model.dim={model.dim} must be even: sinusoidal positions come in pairs")


def _check_no_encoder(model: Model) -> None:
    for name in ("init", "positions"):
        if (value := getattr(model, name)) in ("fan_in", "sinusoidal", "relative"):
            raise ConfigError(f"model.{name}={value} is of an encoder-decoder; set model.encoder.layers, or remove it")


def _check_latent(model: Model) -> None:
    latent = model.latent
    for name in ("rope_dim", "plain_dim", "value_dim"):
        if not getattr(latent, name):
            raise ConfigError(f"model.latent.{name}=0 with model.latent.kv_rank={latent.kv_rank}; set it")
    if latent.rope_dim % 2:
        raise ConfigError(f"model.latent.rope_dim={latent.rope_dim} must be even: rotary positions turn pairs")
    others = {
        "head_dim": (model.head_dim, latent.plain_dim + latent.rope_dim),
        "kv_heads": (model.kv_heads, model.heads),
        "rope.fraction": (model.rope.fraction, 1.0),
        "norm.qk": (model.norm.qk, "none"),
        "attention.bias": (model.attention.bias, []),
        "attention.sinks": (model.attention.sinks, False),
        "attention.output_gate": (model.attention.output_gate, False),
    }
    for name, (value, only) in others.items():
        if value != only:
            raise ConfigError(
                f"model.{name}={value} with latent attention (model.latent.kv_rank) can only be {only}; remove it"
            )


def _check_experts(model: Model) -> None:
    experts = model.experts
    size = experts.count // experts.groups
    if not 1 <= experts.active <= experts.count:
        raise ConfigError(
            f"model.experts.active={experts.active} of model.experts.count={experts.count}; give 1 to {experts.count}"
        )
    if experts.shared_gate and not experts.shared:
        raise ConfigError(
            f"model.experts.shared_gate=true, by the configuration or by model.family={model.family}, and model.experts.shared=0: there is nothing to "
            "gate; set model.experts.shared, or remove it"
        )
    if experts.groups > 1 and (experts.count % experts.groups or size < 2 or experts.active_groups > experts.groups):
        raise ConfigError(
            f"model.experts.groups={experts.groups}, of which {experts.active_groups} active, do not divide "
            f"model.experts.count={experts.count} into equal groups of at least 2; change one of them"
        )
    if experts.groups > 1 and experts.active > experts.active_groups * size:
        raise ConfigError(
            f"model.experts.active={experts.active} is above the {experts.active_groups * size} experts of "
            f"model.experts.active_groups={experts.active_groups}; raise active_groups"
        )
    if experts.dense_layers != sorted(set(experts.dense_layers) & set(range(model.layers))):
        raise ConfigError(
            f"model.experts.dense_layers={experts.dense_layers}: give layers from 0 to {model.layers - 1}, rising, each once"
        )
    if len(experts.dense_layers) == model.layers:
        raise ConfigError(
            f"model.experts.dense_layers names all of model.layers={model.layers}, so no layer has experts; leave one out, or remove model.experts"
        )
    if experts.correction_rate and not experts.correction:
        raise ConfigError(
            f"model.experts.correction_rate={experts.correction_rate} moves nothing without model.experts.correction=true; set it"
        )


def head_widths(model: Model) -> tuple[int, int]:
    """The widths of a head's keys, which are those of its queries, and of its values."""
    latent = model.latent
    return (latent.plain_dim + latent.rope_dim, latent.value_dim) if latent.kv_rank else (model.head_dim, model.head_dim)


def query_scalar(model: Model) -> float:
    """What scores are divided by the square root of, unless it is set: the width of a query."""
    return float(head_widths(model)[0])


def start_token(model: Model, eod_id: int) -> int:
    """What a decoder with an encoder starts from. `eod_id`: the end-of-document token of its tokenizer."""
    return eod_id if model.encoder.decoder_start_id is None else model.encoder.decoder_start_id
