"""What families with linear attention in some layers share; and what Qwen3-Next and Qwen3.5 do, whose other layers have attention with an output gate.

`layer_types` of config.json says which layers have what. Where it is absent, in Qwen's every `full_attention_interval`-th layer has attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import ATTENTION, ENDS, LAYER, PRE_NORMS, THEIRS, eps, needs_experts, sizes, tied
from pretrain.models.families.declare.family import Field
from pretrain.models.families.declare.weights import CONCATENATED, FUSED_PER_HEAD, Entry, entry
from pretrain.models.families.declare.windows import layer_types, number, pattern_of
from pretrain.models.layer_specs import layer_specs

_KINDS = {"full_attention": False, "linear_attention": True}


def refuse_uneven_groups(config: dict[str, Any], groups: tuple[str, int], heads: tuple[str, int]) -> None:
    """Raise ConfigError where the groups of Mamba 2 do not divide its heads. Both are given as a field and what an absent one means."""
    if (count := number(config, *heads)) % number(config, *groups):
        raise ConfigError(f"config.json: {groups[0]}={number(config, *groups)} does not divide {heads[0]}={count}")


_UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def refuse_limits(config: dict[str, Any]) -> None:
    """Raise ConfigError where the steps of Mamba 2 have limits."""
    if (limit := config.get("time_step_limit", _UNLIMITED[0])) not in _UNLIMITED:
        raise ConfigError(f"config.json: time_step_limit={shown(limit)} is not supported; only from 0 to infinity is")


def full_attention_interval(model: Model) -> int | None:
    """The period of the layers with attention, for readers that know only a period; None if the pattern has none."""
    linear, layers = [spec.linear for spec in layer_specs(model)], range(1, model.layers + 1)
    return next((n for n in layers if linear == [i % n != 0 for i in layers]), None)


def refuse_no_linear_attention(model: Model) -> str | None:
    """Why a model does not belong to these families: all of its layers have attention. None if it does."""
    return None if any(model.linear_attention.pattern) else "model.linear_attention.pattern=[false] has no linear attention"


Derived = Callable[[dict[str, Any]], Any]
"""What an absent field of config.json means, by the others."""


def _every_nth(config: dict[str, Any]) -> list[bool]:
    interval = number(config, "full_attention_interval", 4)
    return [(layer + 1) % interval != 0 for layer in range(config["num_hidden_layers"])]


def linear_fields(absent_pattern: Derived, **absent: int | Derived) -> tuple[Field, ...]:
    """The fields of linear attention. `absent`: by size, what its field means where config.json lacks it."""

    def pattern(types: Any, config: dict[str, Any]) -> list[bool]:
        return absent_pattern(config) if types is None else pattern_of(types, config, _KINDS)

    return (
        Field("linear_attention.pattern", "layer_types", None, lambda pattern, model: layer_types(model), pattern),
        *(_size(ours, theirs, absent[ours]) for ours, theirs in _SIZES.items()),
        Field("linear_attention.kernel", "linear_conv_kernel_dim", 4),
    )


_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
}


def _size(ours: str, theirs: str, absent: int | Derived) -> Field:
    def back(value: Any, config: dict[str, Any]) -> Any:
        return absent(config) if value is None and callable(absent) else value

    return Field(f"linear_attention.{ours}", theirs, None if callable(absent) else absent, back=back)


def fields(kv_heads: int) -> tuple[Field, ...]:
    """The fields of config.json that all of them have. `kv_heads`: what an absent one means."""
    return (
        *sizes(kv_heads=kv_heads, head_dim=256, length=32768),
        eps(1e-6),
        tied(False),
        *linear_fields(_every_nth, key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    )


LINEAR, THEIR_LINEAR = f"{LAYER}.linear_attention", f"{THEIRS}.linear_attn"
NAMES = {
    "decay_bias": "dt_bias",
    "log_decay_scale": "A_log",
    "output_norm.weight": "norm.weight",
    "output.weight": "out_proj.weight",
}
"""Tensors of linear attention that most families call the same, ours and theirs."""


def mamba_weights(theirs: str) -> tuple[Entry, ...]:
    """The tensors of Mamba 2, in the module of this name."""
    return (
        entry(
            [f"{LINEAR}.{n}.weight" for n in ("gate", "value", "key", "query", "decay")],
            f"{theirs}.in_proj.weight",
            CONCATENATED,
        ),
        *(
            entry([f"{LINEAR}.{n}_filter{ours}" for n in ("value", "key", "query")], f"{theirs}.conv1d.{kind}", CONCATENATED)
            for ours, kind in (("", "weight"), ("_bias", "bias"))
        ),
        *(entry(f"{LINEAR}.{ours}", f"{theirs}.{their}") for ours, their in {**NAMES, "skip": "D"}.items()),
    )


_QUERY = f"{LAYER}.attention.query.weight"
WEIGHTS_HYBRID = (
    *ENDS,
    *PRE_NORMS,
    *(line for line in ATTENTION if line.ours != (_QUERY,)),
    entry([_QUERY, f"{LAYER}.attention.gate.weight"], f"{THEIRS}.self_attn.q_proj.weight", FUSED_PER_HEAD),
    entry([f"{LINEAR}.{n}_filter" for n in ("query", "key", "value")], f"{THEIR_LINEAR}.conv1d.weight", CONCATENATED),
    *(entry(f"{LINEAR}.{ours}", f"{THEIR_LINEAR}.{theirs}") for ours, theirs in NAMES.items()),
)
"""All tensors but the projections of linear attention, and those of MLPs or experts."""

PROJECTIONS = (
    entry([f"{LINEAR}.{n}.weight" for n in ("query", "key", "value")], f"{THEIR_LINEAR}.in_proj_qkv.weight", CONCATENATED),
    *(
        entry(f"{LINEAR}.{ours}.weight", f"{THEIR_LINEAR}.in_proj_{theirs}.weight")
        for ours, theirs in (("gate", "z"), ("rate", "b"), ("decay", "a"))
    ),
)
"""The projections of Qwen3.5's linear attention."""

HYBRID: dict[str, Any] = {
    "fixed": {"norm.kind": "rms_offset", "norm.qk": "head", "attention.output_gate": True},
    "defaults": {
        "norm_eps": 1e-6,
        "rope.theta": 10_000_000.0,
        "rope.fraction": 0.25,
        # A small model keeps one layer with attention, its last.
        "linear_attention.pattern": lambda model: [True] * min(3, model.layers - 1) + [False],
    },
    "constants": {"hidden_act": "silu", "attention_bias": False},
    "derived": {"full_attention_interval": full_attention_interval},
    "partial": True,
}
"""What Qwen3-Next and Qwen3.5 say alike, as arguments of `Family`."""

OF_QWEN3_5: dict[str, Any] = HYBRID | {
    "constants": HYBRID["constants"] | {"attn_output_gate": True},
    "accepted": {"output_gate_type": "swish"},
    # The first two describe layers that predict further ahead. transformers computes the state in fp32 whatever the third says.
    "inert": frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"}),
    # These tell positions of images apart. A position of text has three equal numbers.
    "inert_rope": frozenset({"mrope_section", "mrope_interleaved"}),
    # What predicts further ahead, or looks at images.
    "dropped": lambda name, model: name.startswith(("mtp.", "model.visual.")),
    "nested": "model.language_model.",
}
"""What the two families of Qwen3.5 say alike."""


def shared_width(theirs: str, default: int, own: tuple[str, int]) -> Field:
    """Shared experts are together one MLP, whose width is a multiple of an expert's, which is the field `own` or its default."""

    def back(width: Any, config: dict[str, Any]) -> int:
        of_one = number(config, *own)
        if type(width) is not int or width < 1 or width % of_one:
            raise ConfigError(f"config.json: {theirs}={shown(width)} is no multiple of {own[0]}={of_one}")
        return width // of_one

    return Field("experts.shared", theirs, default, lambda n, model: n * model.experts.ffn_dim, back)


SHARED_WIDTH = shared_width("shared_expert_intermediate_size", 512, ("moe_intermediate_size", 512))
SHARED_WEIGHTS = (
    *(
        entry(f"{LAYER}.mlp.shared.{name}.weight", f"{THEIRS}.mlp.shared_expert.{name}_proj.weight")
        for name in ("gate", "up", "down")
    ),
    entry(f"{LAYER}.mlp.shared_gate.weight", f"{THEIRS}.mlp.shared_expert_gate.weight"),
)
"""A shared expert, behind a gate."""


def refuse_no_experts(model: Model) -> str | None:
    """Why a model does not belong to the families with experts: it lacks routed or shared ones, or linear attention. None if it does."""
    missing = None if model.experts.shared else "model.experts.shared=0 has no shared expert"
    return needs_experts(model) or missing or refuse_no_linear_attention(model)
