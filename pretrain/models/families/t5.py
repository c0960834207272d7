"""T5 (Raffel et al., arXiv 1910.10683) and its version 1.1 (gated MLPs, a head of its own; Flan-T5 is one): an encoder and a decoder."""

from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import activation
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.weights import Entry, entry

_ACTIVATION = activation("feed_forward_proj", "gelu_new")


def _projection(ours: Any, model: Model) -> str:
    # transformers takes "gated-gelu" for the approximation by tanh, and what follows any other "gated-" for an activation's name.
    name = _ACTIVATION.to(model.mlp.activation, model)
    if not model.mlp.gated:
        return name
    return "gated-gelu" if name == "gelu_new" else f"gated-{name}"


def _activation(theirs: Any, config: dict[str, Any]) -> Any:
    name = "gelu_new" if theirs == "gated-gelu" else str(theirs).removeprefix("gated-")
    gated = str(theirs).startswith("gated-")
    # Older readers' fields, which transformers lets win.
    if config.get("dense_act_fn", name) != name or config.get("is_gated_act", gated) is not gated:
        said = {field: config[field] for field in ("dense_act_fn", "is_gated_act") if field in config}
        raise ConfigError(f"config.json: feed_forward_proj={shown(theirs)} and {shown(said)} contradict each other")
    return _ACTIVATION.back(name, config)


def _tied(theirs: Any, config: dict[str, Any]) -> bool:
    """transformers 5 always calls the head tied. Whether the file has a head of its own then decides (`own_head`)."""
    if theirs is False and config.get("scale_decoder_outputs", False) is not False:
        raise ConfigError(
            "config.json: tie_word_embeddings=False and scale_decoder_outputs=True are not supported together for t5"
        )
    return theirs is not False


def _scaled(model: Model) -> float:
    """The factor of logits that goes with a head: a tied one divides them by the root of the width."""
    return 1.0 if model.tie_embeddings is False else model.dim**-0.5


def _multiplier(scaled: Any, config: dict[str, Any]) -> Any:
    """transformers 5 says apart whether logits are scaled: T5Config(tie_word_embeddings=False) makes a tied head that is not."""
    if not isinstance(scaled, (bool, type(None))):
        raise ConfigError(f"config.json: scale_decoder_outputs={shown(scaled)} is not supported: expected true or false")
    return 1.0 if scaled is False else None  # None: what goes with the head


def _refuse(model: Model) -> str | None:
    if model.mlp.gated and model.mlp.activation == "gelu":
        return "model.mlp.activation=gelu with model.mlp.gated=true: transformers has no exact one that is gated; use gelu_tanh"
    if model.logit_multiplier not in (1.0, _scaled(model)):
        only = "only 1.0" if model.tie_embeddings is False else f"1.0 or {_scaled(model)}, which is model.dim ** -0.5,"
        return f"model.logit_multiplier={model.logit_multiplier}: transformers has {only} with such a head"
    return None


def _elsewhere(model: Model) -> list[str]:
    if not model.tie_embeddings or model.logit_multiplier == _scaled(model):
        return []
    return ["transformers 4 scales the logits of every tied head; transformers 5 reads scale_decoder_outputs=false"]


def _gated(model: Model) -> bool:
    return model.mlp.gated


def _stack(name: str, cross: bool) -> tuple[Entry, ...]:
    """The tensors of a stack. Sublayers are numbered, and norms belong to them; the bias of positions is in the first layer's."""
    ours, theirs = f"{name}.{{layer}}", f"{name}.block.{{layer}}.layer"
    last = f"{theirs}.{2 if cross else 1}"
    attentions = [("attention", "0.SelfAttention")] + ([("cross", "1.EncDecAttention")] if cross else [])
    norms = ["attention", "cross", "mlp"] if cross else ["attention", "mlp"]
    return (
        entry(f"{name}_bias.table.weight", f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        *(
            entry(f"{ours}.{sublayer}.{projection}.weight", f"{theirs}.{module}.{projection[0]}.weight")
            for sublayer, module in attentions
            for projection in ("query", "key", "value", "output")
        ),
        *(entry(f"{ours}.{norm}_norm.weight", f"{theirs}.{place}.layer_norm.weight") for place, norm in enumerate(norms)),
        entry(f"{ours}.mlp.gate.weight", f"{last}.DenseReluDense.wi_0.weight"),
        entry(f"{ours}.mlp.up.weight", f"{last}.DenseReluDense.wi_1.weight", when=_gated),
        entry(f"{ours}.mlp.up.weight", f"{last}.DenseReluDense.wi.weight", when=lambda model: not _gated(model)),
        entry(f"{ours}.mlp.down.weight", f"{last}.DenseReluDense.wo.weight"),
    )


T5 = Family(
    name="t5",
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("dim", "d_model"),
        Field("encoder.layers", "num_layers"),
        Field("layers", "num_decoder_layers", None, back=lambda n, config: config.get("num_layers") if n is None else n),
        Field("heads", "num_heads"),
        Field("head_dim", "d_kv"),
        Field("ffn_dim", "d_ff"),
        Field("norm_eps", "layer_norm_epsilon", 1e-6),
        Field("relative.buckets", "relative_attention_num_buckets", 32),
        Field("relative.max_distance", "relative_attention_max_distance", 128),
        Field("max_sequence_length", "n_positions", 512),
        Field("init_std", "initializer_factor", 1.0),
        Field("dropout", "dropout_rate", 0.1),
        Field("mlp.activation", "feed_forward_proj", "relu", _projection, _activation),
        Field("mlp.gated", "feed_forward_proj", "relu", _projection,
              lambda _, config: str(config.get("feed_forward_proj")).startswith("gated-")),
        Field("tie_embeddings", "tie_word_embeddings", True, back=_tied),
        Field("logit_multiplier", "scale_decoder_outputs", None, lambda factor, model: factor != 1.0, _multiplier),
        Field("encoder.decoder_start_id", "decoder_start_token_id", None,
              back=lambda n, config: config.get("pad_token_id", 0) if n is None else n),
    ),
    weights=(
        entry("embedding.weight", "shared.weight"),
        *_stack("encoder", cross=False),
        entry("encoder_norm.weight", "encoder.final_layer_norm.weight"),
        *_stack("decoder", cross=True),
        entry("norm.weight", "decoder.final_layer_norm.weight"),
        entry("output.weight", "lm_head.weight"),
    ),
    defaults={
        "encoder.layers": lambda model: model.layers,
        "tie_embeddings": True,
        "logit_multiplier": _scaled,
        "norm_eps": 1e-6,
        "init": "fan_in",
        "init_std": 1.0,
        "mlp.activation": "relu",
        "mlp.gated": False,
    },
    fixed={
        "kv_heads": lambda model: model.heads,
        "encoder.share_embedding": True,
        "positions": "relative",
        "attention.query_scalar": 1.0,
    },
    constants={"is_encoder_decoder": True},
    derived={
        "dense_act_fn": lambda model: _ACTIVATION.to(model.mlp.activation, model),
        "is_gated_act": _gated,
    },
    inert=frozenset({"classifier_dropout"}),
    rope=None,
    prefix="",
    refuse=_refuse,
    elsewhere=_elsewhere,
    own_head=lambda model, names: model.logit_multiplier == 1.0 and "lm_head.weight" in names,
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    # A table that T5's first checkpoints have and nothing reads.
    dropped=lambda name, model: name == "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)  # fmt: skip
