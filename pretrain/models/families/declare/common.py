"""What many families have in common: the names of config.json and of tensors as in Llama, and those of mixtures of experts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.family import Field
from pretrain.models.families.declare.weights import CONCATENATED, STACKED, Entry, entry

LAYER, THEIRS = "layers.{layer}", "model.layers.{layer}"
ALL_PROJECTIONS = ("query", "key", "value", "output")


def sizes(
    kv_heads: int | None = None, head_dim: int | None = None, length: int = 2048, init_std: float = 0.02
) -> tuple[Field, ...]:
    """Width, depth and the like, by the names that nearly every configuration of transformers has.

    The arguments are what absent fields mean: None derives them.
    """
    return (
        Field("vocab_size", "vocab_size"),
        Field("dim", "hidden_size"),
        Field("layers", "num_hidden_layers"),
        Field("heads", "num_attention_heads"),
        Field("kv_heads", "num_key_value_heads", kv_heads),
        Field("head_dim", "head_dim", head_dim),
        Field("ffn_dim", "intermediate_size"),
        Field("max_sequence_length", "max_position_embeddings", length),
        Field("init_std", "initializer_range", init_std),
    )


SIZES = sizes()

# Blocks of GPT: heads that are together as wide as the residual stream, each with keys and values of its own; LayerNorm; a plain MLP.
GPT_BLOCK = {
    "head_dim": lambda model: model.dim // model.heads, "kv_heads": lambda model: model.heads, "norm.kind": "layer",
    "mlp.gated": False, "mlp.bias": True,
}  # fmt: skip


def tied(default: bool) -> Field:
    """Whether the output head shares the embedding; `default` where config.json does not say."""
    return Field("tie_embeddings", "tie_word_embeddings", default)


def eps(default: float, name: str = "rms_norm_eps") -> Field:
    """The constant of norms; `name` is its field in config.json."""
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
        # Others are refused by their type.
        return next((ours for ours, names in _ACTIVATIONS.items() if theirs in names), theirs)

    return Field("mlp.activation", name, default, to, back)


def buffers(*endings: str) -> Callable[[str, Model], bool]:
    """`dropped` of families whose older files hold masks and rotary frequencies, which follow from the configuration."""
    return lambda name, model: name.endswith(endings)


def refuse_uneven_heads(model: Model) -> str | None:
    """Why transformers would refuse a width that the heads do not divide, which the head's own width makes possible here."""
    if model.dim % model.heads:
        return (
            f"model.dim={model.dim} is not divisible by model.heads={model.heads}: transformers refuses such a {model.family}"
        )
    return None


def capped(ours: str, theirs: str, default: float | None) -> Field:
    """A soft-cap: none is null there and 0 here. transformers divides by a 0."""

    def back(cap: Any, config: dict[str, Any]) -> Any:
        if cap == 0 and not isinstance(cap, bool):
            raise ConfigError(f"config.json: {theirs}=0 leaves nothing of what it caps in transformers; write null for no cap")
        return 0.0 if cap is None else cap

    return Field(ours, theirs, default, lambda cap, model: cap or None, back)


def power(ours: str, theirs: str, default: float, exponent: float) -> Field:
    """A factor that config.json writes as ours to the power of `exponent`: its inverse (-1), or the inverse of its root (-0.5)."""

    def back(value: Any, config: dict[str, Any]) -> Any:
        # Others are refused by their type or range.
        return _base(value, exponent) if type(value) in (int, float) and value > 0 else value

    return Field(ours, theirs, default, lambda value, model: _base(value, 1 / exponent), back)


def _base(value: float, exponent: float) -> float:
    """What gives `value` when it is raised to `exponent`. If several floats do, it is the one with the fewest digits."""
    try:
        guess = value ** (1 / exponent)
        below, above = math.nextafter(guess, 0.0), math.nextafter(guess, math.inf)
        near = (guess, below, above, math.nextafter(below, 0.0), math.nextafter(above, math.inf))
        exact = [base for base in near if base**exponent == value]
    except ArithmeticError:
        return math.inf  # which no key takes
    return min(exact or [guess], key=lambda base: len(repr(base)))


def attention_bias(default: bool = False, names: Sequence[str] = ALL_PROJECTIONS) -> Field:
    """Biases of these projections of attention, which config.json states as one. `default`: what an absent field means."""
    return Field("attention.bias", "attention_bias", default, *projections(*names))


def biases(theirs: str, default: bool) -> tuple[Field, Field]:
    """One field for the biases of all projections, those of the MLP too."""
    to, back = projections(*ALL_PROJECTIONS)
    return (
        Field("attention.bias", theirs, default, to, back),
        Field("mlp.bias", theirs, default, back=lambda flag, config: False if flag is None else flag),
    )


def projections(*names: str) -> tuple[Any, Any]:
    """`to` and `back` of a field that is true where these projections have a bias."""

    def back(flag: Any, config: dict[str, Any]) -> Any:
        if flag is True:
            return list(names)
        # What is no truth value is no list here, and refused as such.
        return [] if flag is False or flag is None else f"{shown(flag)} is no truth value"

    def to(bias: list[str], model: Model) -> bool:
        if sorted(bias) not in ([], sorted(names)):
            raise ConfigError(
                f"model.attention.bias={bias}: transformers' {model.family} has biases in all of {', '.join(names)} or in none; set those, or []"
            )
        return bool(bias)

    return to, back


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


FUSED = (
    entry([f"{LAYER}.attention.{name}.weight" for name in ("query", "key", "value")],
          f"{THEIRS}.self_attn.qkv_proj.weight", CONCATENATED),
    entry([f"{LAYER}.mlp.{name}.weight" for name in ("gate", "up")], f"{THEIRS}.mlp.gate_up_proj.weight", CONCATENATED),
)  # fmt: skip
PRE_NORMS = norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
# The tensors of a whole model, by where its norms are.
WEIGHTS = ENDS + ATTENTION + MLP + PRE_NORMS
WEIGHTS_REORDERED = (
    ENDS
    + ATTENTION
    + MLP
    + norms(attention_output_norm="post_attention_layernorm", mlp_output_norm="post_feedforward_layernorm")
)
WEIGHTS_SANDWICH = (*ENDS, *ATTENTION, *MLP, *norms(
    attention_norm="input_layernorm",
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
))  # fmt: skip


def head_width(model: Model) -> str | None:
    """`refuse` of families whose heads have no width of their own in transformers."""
    if model.head_dim * model.heads != model.dim:
        return f"model.head_dim={model.head_dim} is not model.dim / model.heads, and {model.family} of transformers has no head_dim"
    return None


# What Gemma 2 and 3 share.
GEMMA: dict[str, Any] = {
    "norm.kind": "rms_offset",
    "norm.placement": "sandwich",
    "mlp.activation": "gelu_tanh",
    "embedding_multiplier": lambda model: model.dim**0.5,
}
# vLLM reads both names of the activation.
GEMMA_CONSTANTS: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}


def query_scalar(default: int) -> Field:
    """The number whose inverse square root scales scores; a whole one in config.json."""
    return Field("attention.query_scalar", "query_pre_attn_scalar", default, lambda scalar, model: int(scalar))


def gemma_refuses(model: Model) -> str | None:
    """Why transformers' Gemma models would not take the model, or None."""
    if model.attention.query_scalar % 1:
        return f"model.attention.query_scalar={model.attention.query_scalar} is no whole number, as transformers demands"
    return refuse_uneven_heads(model)


# Of config.json: about losses and logging in transformers' own training. Ours are keys of the run; `Family.balance` reads the second.
TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size"})


def needs_experts(model: Model) -> str | None:
    """The reason why a model does not belong to these families: it has no experts. None if it has."""
    return None if model.experts.count else "model.experts.count=0 has no experts"


def _dense_layers(value: Any, config: dict[str, Any]) -> Any:
    """Two fields say together which layers have an MLP."""
    step, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers")
    listed = [] if listed is None else listed
    if type(step) is not int or step < 1 or not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise ConfigError(
            f"config.json: decoder_sparse_step={shown(step)} with mlp_only_layers={shown(listed)} is not supported"
        )
    return [i for i in range(config["num_hidden_layers"]) if i in listed or (i + 1) % step]


# Which layers have an MLP in place of experts, as Qwen's families say it.
DENSE_LAYERS = (
    Field("experts.dense_layers", "mlp_only_layers", None, back=_dense_layers),
    Field("experts.dense_layers", "decoder_sparse_step", 1, lambda layers, model: 1, _dense_layers),
)


def stacked(block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Entry, ...]:
    """Router and experts, one tensor per expert on disk."""
    names = {"gate": gate, "up": up, "down": down}
    return (
        entry(f"{LAYER}.mlp.router.weight", f"{THEIRS}.{block}.gate.weight"),
        *(
            entry(f"{LAYER}.mlp.experts.{ours}", f"{THEIRS}.{block}.experts.{{expert}}.{theirs}.weight", STACKED)
            for ours, theirs in names.items()
        ),
    )


SHARED = tuple(
    entry(f"{LAYER}.mlp.shared.{name}.weight", f"{THEIRS}.mlp.shared_experts.{name}_proj.weight")
    for name in ("gate", "up", "down")
)


# What DeepSeek-V3 and GLM-4.5 share: names, dense layers first, a shared expert, a correction of scores by sigmoid.
CORRECTED: dict[str, Any] = {"experts.scoring": "sigmoid", "experts.correction": True}
CORRECTION = entry(f"{LAYER}.mlp.router.correction", f"{THEIRS}.mlp.gate.e_score_correction_bias")


# What `corrected` says of them.
ROUTING = ("count", "active", "ffn_dim", "shared", "dense_layers", "normalise", "scale", "groups", "active_groups")


def corrected(count: int, ffn_dim: int, dense: int, scale: float, groups: int, active_groups: int) -> tuple[Field, ...]:
    """The fields of such experts; the arguments are what absent ones mean."""
    return (
        Field("experts.count", "n_routed_experts", count),
        Field("experts.active", "num_experts_per_tok", 8),
        Field("experts.ffn_dim", "moe_intermediate_size", ffn_dim),
        Field("experts.shared", "n_shared_experts", 1),
        Field("experts.dense_layers", "first_k_dense_replace", dense, lambda layers, model: len(layers), _first_layers),
        Field("experts.normalise", "norm_topk_prob", True, back=lambda flag, config: False if flag is None else flag),
        Field("experts.scale", "routed_scaling_factor", scale),
        Field("experts.groups", "n_group", groups),
        Field("experts.active_groups", "topk_group", active_groups),
    )


def _first_layers(count: Any, config: dict[str, Any]) -> Any:
    layers = config["num_hidden_layers"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0 or not isinstance(layers, int):
        raise ConfigError(f"config.json: first_k_dense_replace={shown(count)} must be a number of layers")
    return list(range(min(count, layers)))


def refuse_uncorrected(model: Model) -> str | None:
    """Why transformers has no such model of these families."""
    dense, shared = model.experts.dense_layers, model.experts.shared
    if dense != list(range(len(dense))):
        return f"model.experts.dense_layers={dense} are not the first ones"
    return needs_experts(model) or (None if shared else "model.experts.shared=0 has no shared expert")


def beyond_the_last_layer(name: str, model: Model) -> bool:
    """`dropped` where layers that predict tokens further ahead follow the others, which transformers leaves out as well."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= model.layers
