"""Granite 4 (https://huggingface.co/ibm-granite, 2025): Granite's factors; Mamba 2 (arXiv 2405.21060) in nine layers of ten, or attention in all;
experts beside a shared one, or a plain MLP. The hybrids rotate nothing."""

import math
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import (
    ATTENTION,
    ENDS,
    LAYER,
    PRE_NORMS,
    THEIRS,
    TRAINING,
    refuse_uneven_heads,
)
from pretrain.models.families.declare.family import REQUIRED, Family, Field
from pretrain.models.families.declare.hybrid import (
    mamba_weights,
    refuse_limits,
    refuse_uneven_groups,
    shared_width,
)
from pretrain.models.families.declare.weights import CONCATENATED, Concatenated, entry
from pretrain.models.families.declare.windows import number, pattern_of
from pretrain.models.families.granite import GRANITE
from pretrain.models.layer_specs import layer_specs
from pretrain.models.shape import PLAIN

_KINDS = {"mamba": True, "attention": False, "linear_attention": True, "full_attention": False}
"""Whether layers of a name have Mamba 2: in published files, and in those that transformers 5 saves."""


def _has_mamba(config: dict[str, Any]) -> bool:
    return any(_pattern(config.get("layer_types"), config))


def _pattern(types: Any, config: dict[str, Any]) -> list[bool]:
    pattern = pattern_of(types, config, _KINDS)
    if all(pattern):
        raise ConfigError(f"config.json: layer_types={shown(types)} has no layer with attention, which is not built")
    return pattern


def _size(ours: str, theirs: str, default: int | str, without: Any) -> Field:
    """A size of Mamba 2. `without`: what stands there if no layer has it, since transformers checks the sizes all the same."""

    def to(value: int, model: Model) -> int:
        return value if any(model.linear_attention.pattern) else without(model)

    def back(value: Any, config: dict[str, Any]) -> Any:
        if not _has_mamba(config):
            return PLAIN[f"linear_attention.{ours}"]
        if theirs == "mamba_d_head" and value == "auto":
            value = _width(config) // number(config, "mamba_n_heads", 128)
        if theirs == "mamba_n_groups":
            refuse_uneven_groups(config, (theirs, 1), ("mamba_n_heads", 128))
        return value

    return Field(f"linear_attention.{ours}", theirs, default, to, back)


def _unused_heads(model: Model) -> int:
    """Heads of a Mamba 2 that no layer has, as transformers allows them."""
    return math.gcd(128, 2 * model.dim)


def _width(config: dict[str, Any]) -> int:
    return number(config, "mamba_expand", 2) * number(config, "hidden_size", 4096)


def _expanded(expand: Any, config: dict[str, Any]) -> list[bool]:
    """`back` of a width that follows from others; the layers, of which it says nothing."""
    pattern = _pattern(config.get("layer_types"), config)
    if any(pattern):
        refuse_limits(config)
    head = config.get("mamba_d_head", "auto")
    heads = number(config, "mamba_n_heads", 128)
    if any(pattern) and (_width(config) % heads or head not in ("auto", _width(config) // heads)):
        raise ConfigError(
            f"config.json: mamba_expand={shown(expand)} times hidden_size is not mamba_n_heads={shown(heads)} times mamba_d_head={shown(head)}"
        )
    return pattern


def _expand(pattern: list[bool], model: Model) -> int:
    return model.linear_attention.value_heads * model.linear_attention.value_dim // model.dim if any(pattern) else 2


def _ffn_dim(value: Any, config: dict[str, Any]) -> Any:
    """An expert's width, or that of the MLP, which files call shared in both cases."""
    return value if config.get("num_local_experts") else number(config, "shared_intermediate_size", 1024)


_SHARED = shared_width("shared_intermediate_size", 1024, ("intermediate_size", 11008))


def _positions(kind: str, model: Model) -> str:
    if kind not in ("rope", "none"):
        raise ConfigError(f"model.positions={kind} is not what model.family={model.family} computes, which is rope or none")
    return "rope" if kind == "rope" else "nope"


def _positions_back(kind: Any, config: dict[str, Any]) -> str:
    if kind not in ("rope", "nope", None):
        raise ConfigError(f"config.json: position_embedding_type={shown(kind)} is not supported; only rope and nope are")
    return "rope" if kind == "rope" else "none"


def _refuse(model: Model) -> str | None:
    experts, mamba = model.experts, model.linear_attention
    if experts.count and not experts.shared:
        return "model.experts.shared=0 has no shared expert"
    if experts.count and experts.ffn_dim != model.ffn_dim:
        return f"model.experts.ffn_dim={experts.ffn_dim} is not model.ffn_dim={model.ffn_dim}"
    if any(mamba.pattern) and mamba.value_heads * mamba.value_dim % model.dim:
        width = mamba.value_heads * mamba.value_dim
        heads = f"model.linear_attention.value_heads={mamba.value_heads} of value_dim={mamba.value_dim}"
        return f"{heads} are {width} components, no multiple of model.dim={model.dim}"
    return refuse_uneven_heads(model)


def _elsewhere(model: Model) -> list[str]:
    if any(model.linear_attention.pattern) and model.linear_attention.key_heads > 1:
        heads = f"model.linear_attention.key_heads={model.linear_attention.key_heads}"
        return [
            f"transformers 4 norms the heads of all groups together, whatever {heads} is: another model; use transformers 5"
        ]
    return []


def _usual(model: Model) -> list[bool]:
    """Attention in the sixth layer of ten. A small model keeps one such layer, its last."""
    return [layer != min(5, model.layers - 1) for layer in range(min(10, model.layers))]


GRANITE_HYBRID = Family(
    name="granite_hybrid",
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    fields=(
        *(field for field in GRANITE.fields if field.ours not in ("ffn_dim", "mlp.bias")),
        Field("ffn_dim", "intermediate_size", back=_ffn_dim),
        Field(
            "positions",
            "position_embedding_type",
            "nope",
            _positions,
            _positions_back,
        ),
        Field(
            "linear_attention.pattern",
            "layer_types",
            REQUIRED,  # where it is absent, transformers takes all layers for Mamba 2, which is not built
            lambda pattern, model: ["mamba" if spec.linear else "attention" for spec in layer_specs(model)],
            _pattern,
        ),
        Field("linear_attention.pattern", "mamba_expand", 2, _expand, _expanded),
        _size("key_heads", "mamba_n_groups", 1, lambda model: 1),
        _size("value_heads", "mamba_n_heads", 128, _unused_heads),
        _size("key_dim", "mamba_d_state", 256, lambda model: 256),
        _size("value_dim", "mamba_d_head", "auto", lambda model: 2 * model.dim // _unused_heads(model)),
        _size("kernel", "mamba_d_conv", 4, lambda model: 4),
        Field("experts.count", "num_local_experts"),
        Field("experts.active", "num_experts_per_tok", 2, back=lambda n, config: n if config.get("num_local_experts") else 0),
        Field(
            "experts.shared",
            "shared_intermediate_size",
            1024,
            lambda n, model: n * model.experts.ffn_dim if model.experts.count else model.ffn_dim,
            lambda width, config: _SHARED.back(width, config) if config.get("num_local_experts") else 0,
        ),
    ),
    weights=(
        *ENDS,
        *ATTENTION,
        *PRE_NORMS,
        *mamba_weights(f"{THEIRS}.mamba"),
        # One MLP, plain or beside experts.
        *(
            line
            for mlp in (f"{LAYER}.mlp", f"{LAYER}.mlp.shared")
            for line in (
                entry([f"{mlp}.gate.weight", f"{mlp}.up.weight"], f"{THEIRS}.shared_mlp.input_linear.weight", CONCATENATED),
                entry(f"{mlp}.down.weight", f"{THEIRS}.shared_mlp.output_linear.weight"),
            )
        ),
        entry(f"{LAYER}.mlp.router.weight", f"{THEIRS}.block_sparse_moe.router.layer.weight"),
        entry(
            [f"{LAYER}.mlp.experts.gate", f"{LAYER}.mlp.experts.up"],
            f"{THEIRS}.block_sparse_moe.input_linear.weight",
            Concatenated(dim=1),
        ),
        entry(f"{LAYER}.mlp.experts.down", f"{THEIRS}.block_sparse_moe.output_linear.weight"),
    ),
    fixed={
        "linear_attention.kind": "mamba2",
        "experts.ffn_dim": lambda model: model.ffn_dim if model.experts.count else 0,
    },
    defaults=GRANITE.defaults
    | {
        "positions": "none",
        "linear_attention.pattern": _usual,
        "experts.shared": lambda model: 2 if model.experts.count else 0,
    },
    constants={"hidden_act": "silu", "mamba_conv_bias": True, "mamba_proj_bias": False},
    accepted={"normalization_function": "rmsnorm"},
    derived={"time_step_limit": lambda model: None},  # read by `_expanded`
    inert=TRAINING | {"mamba_chunk_size", "init_method"},
    refuse=_refuse,
    elsewhere=_elsewhere,
    balance=0.001,
)
