"""OLMo Hybrid (2026): Gated DeltaNet (arXiv 2412.06464) in three layers of four, normed before its sublayers, and OLMo 2's attention in the
fourth, normed after them. Published models rotate nothing."""

import re
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.models.families.declare.common import (
    LAYER,
    PRE_NORMS,
    THEIRS,
    WEIGHTS_REORDERED,
    attention_bias,
    eps,
    head_width,
    sizes,
    tied,
)
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.hybrid import linear_fields, refuse_no_linear_attention
from pretrain.models.families.declare.weights import JOINED_BY_READERS, entry

_NAMES = {
    "query.weight": "q_proj.weight",
    "key.weight": "k_proj.weight",
    "value.weight": "v_proj.weight",
    "gate.weight": "g_proj.weight",
    "decay.weight": "a_proj.weight",
    "rate.weight": "b_proj.weight",
    "decay_bias": "dt_bias",
    "log_decay_scale": "A_log",
    "output_norm.weight": "o_norm.weight",
    "output.weight": "o_proj.weight",
}


def _usual(config: dict[str, Any]) -> list[bool]:
    """Layers with linear attention where config.json does not name them."""
    layers = config["num_hidden_layers"]
    return [layer % 4 != 3 and (layers > 3 or layer != layers - 1) for layer in range(layers)]


def _key_dim(config: dict[str, Any]) -> int:
    heads = config.get("linear_num_key_heads") or config["num_attention_heads"]
    return max(1, int(0.75 * config["hidden_size"] / heads))


def _width(model: Model) -> int:
    """How wide a key of linear attention is in a new model, unless the configuration says it."""
    return _key_dim({"hidden_size": model.dim, "num_attention_heads": model.linear_attention.key_heads or model.heads})


def _refuse(model: Model) -> str | None:
    return head_width(model) or refuse_no_linear_attention(model)


def _as_saved(name: str, model: Model) -> str:
    """`other_name`: transformers 5.23 reads both names of these norms, and saves the other ones, which vLLM does not read."""
    name = re.sub(r"\.attention_layer_norm\.weight$", ".input_layernorm.weight", name)
    return re.sub(r"\.feedforward_layer_norm\.weight$", ".post_attention_layernorm.weight", name)


OLMO_HYBRID = Family(
    name="olmo_hybrid",
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    fields=(
        *sizes(length=65536),
        eps(1e-6),
        tied(False),
        attention_bias(),
        *linear_fields(
            _usual,
            key_heads=lambda config: config["num_attention_heads"],
            value_heads=lambda config: config["num_attention_heads"],
            key_dim=_key_dim,
            value_dim=lambda config: 2 * (config.get("linear_key_head_dim") or _key_dim(config)),
        ),
        Field("linear_attention.negative_eigenvalues", "linear_allow_neg_eigval", True),
    ),
    weights=(
        *WEIGHTS_REORDERED,
        *PRE_NORMS,
        # When transformers saves, it cuts the three into equal parts, whatever their widths.
        entry(
            [f"{LAYER}.linear_attention.{name}_filter" for name in ("query", "key", "value")],
            [f"{THEIRS}.linear_attn.{name}_conv1d.weight" for name in "qkv"],
            JOINED_BY_READERS,
        ),
        *(entry(f"{LAYER}.linear_attention.{ours}", f"{THEIRS}.linear_attn.{theirs}") for ours, theirs in _NAMES.items()),
    ),
    fixed={
        "norm.placement": "reordered",
        "norm.qk": "full",
        "linear_attention.norm_placement": "pre",
        "linear_attention.norm_eps": 1e-5,
    },
    defaults={
        "norm_eps": 1e-6,
        "positions": "none",
        "rope.theta": 500_000.0,
        "linear_attention.negative_eigenvalues": True,
        # A small model keeps one layer with attention, its last.
        "linear_attention.pattern": lambda model: [True] * min(3, model.layers - 1) + [False],
        "linear_attention.key_dim": _width,
        "linear_attention.value_dim": lambda model: 2 * (model.linear_attention.key_dim or _width(model)),
    },
    constants={"hidden_act": "silu"},
    # How new models begin.
    inert=frozenset({"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"}),
    rope="optional",
    refuse=_refuse,
    other_name=_as_saved,
)
