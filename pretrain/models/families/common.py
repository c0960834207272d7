"""What the families that follow Llama have in common: the names of config.json and of the tensors."""

from __future__ import annotations

from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError
from pretrain.models.families.family import Field
from pretrain.models.families.weights import Entry, entry
from pretrain.models.shape import shortest_period

LAYER, THEIRS = "layers.{layer}", "model.layers.{layer}"

# Width, depth and the like, by the names that nearly every configuration of transformers has.
SIZES = (
    Field("vocab_size", "vocab_size"),
    Field("dim", "hidden_size"),
    Field("layers", "num_hidden_layers"),
    Field("heads", "num_attention_heads"),
    Field("kv_heads", "num_key_value_heads", None),
    Field("head_dim", "head_dim", None),
    Field("ffn_dim", "intermediate_size"),
    Field("max_sequence_length", "max_position_embeddings", 2048),
    Field("init_std", "initializer_range", 0.02),
)

# Of families where all heads together are as wide as the residual stream, and each has keys and values of its own.
WHOLE_HEADS = {"head_dim": lambda model: model.dim // model.heads, "kv_heads": lambda model: model.heads}


def tied(default: bool) -> Field:
    return Field("tie_embeddings", "tie_word_embeddings", default)


def eps(default: float, name: str = "rms_norm_eps") -> Field:
    return Field("norm_eps", name, default)


# Our activations, and the names transformers has for each; the first is written unless a family has its own.
_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "relu": ("relu",),
    "relu2": ("relu2",),
}


def activation(name: str, default: str) -> Field:
    """The field that names the activation. `default`: what an absent one means, and the spelling of ours that it is one of."""

    def to(ours: str, model: Model) -> str:
        if ours not in _ACTIVATIONS:
            raise ConfigError(
                f"model.mlp.activation={ours} is none of model.family={model.family}; those are {', '.join(_ACTIVATIONS)}"
            )
        return default if default in _ACTIVATIONS[ours] else _ACTIVATIONS[ours][0]

    def back(theirs: str, config: dict[str, Any]) -> str:
        return next(
            (ours for ours, names in _ACTIVATIONS.items() if theirs in names), theirs
        )  # others are refused by their type

    return Field("mlp.activation", name, default, to, back)


def refuse_uneven_heads(model: Model) -> str | None:
    """Why transformers would refuse a width that the heads do not divide, which the head's own width makes possible here."""
    if model.dim % model.heads:
        return (
            f"model.dim={model.dim} is not divisible by model.heads={model.heads}: transformers refuses such a {model.family}"
        )
    return None


def projections(*names: str) -> tuple[Any, Any]:
    """`to` and `back` of a field that is true where these projections have a bias."""

    def back(flag: Any, config: dict[str, Any]) -> Any:
        if flag is True:
            return list(names)
        return [] if flag is False or flag is None else f"{flag!r} is no truth value"  # which is no list, and refused as such

    return lambda bias, model: bool(bias), back


ATTENTION = tuple(
    entry(f"{LAYER}.attention.{ours}.{kind}", f"{THEIRS}.self_attn.{theirs}.{kind}")
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj"))
    for kind in ("weight", "bias")
) + tuple(
    entry(f"{LAYER}.attention.{ours}.weight", f"{THEIRS}.self_attn.{theirs}.weight")
    for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm"))
)
MLP = tuple(
    entry(f"{LAYER}.mlp.{name}.{kind}", f"{THEIRS}.mlp.{name}_proj.{kind}")
    for name in ("gate", "up", "down")
    for kind in ("weight", "bias")
)
ENDS = (
    entry("embedding.weight", "model.embed_tokens.weight"),
    entry("norm.weight", "model.norm.weight"),
    entry("output.weight", "lm_head.weight"),
)


def norms(**names: str) -> tuple[Entry, ...]:
    """Norms of a block: our name and theirs."""
    return tuple(entry(f"{LAYER}.{ours}.weight", f"{THEIRS}.{theirs}.weight") for ours, theirs in names.items())


PRE_NORMS = norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
WEIGHTS = ENDS + ATTENTION + MLP + PRE_NORMS


def layer_types(model: Model) -> list[str]:
    """`layer_types` of config.json: which layers have the sliding window."""
    from pretrain.models.shape import has_window

    return ["sliding_attention" if has_window(model, i) else "full_attention" for i in range(model.layers)]


def window_pattern(types: list[str] | None) -> list[bool] | None:
    """Our pattern of a `layer_types` list; None where there is none."""
    return None if types is None else shortest_period([kind == "sliding_attention" for kind in types])
