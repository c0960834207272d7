"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, projections written as [in, out] with queries, keys and values fused."""

from pretrain.models.families.declare.common import GPT_BLOCK, activation, buffers, eps, refuse_uneven_heads, tied
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import anything
from pretrain.models.families.declare.weights import CONCATENATED, CONCATENATED_TRANSPOSED, SAME, TRANSPOSED, entry

_OURS, _THEIRS = "layers.{layer}", "transformer.h.{layer}"
_ALL = ("query", "key", "value", "output")
_FUSED = tuple(f"{_OURS}.attention.{name}." for name in _ALL[:3])
# Dropout is for training; the order of scaling changes roundings in half precision only; summaries belong to other heads.
_INERT = frozenset({
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "summary_type", "summary_use_proj",
    "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "n_special", "predict_special_tokens",
})  # fmt: skip


def _both(ours: str, theirs: str, layout=SAME):
    """Weight and bias of one module."""
    return entry(f"{ours}.weight", f"{theirs}.weight", layout), entry(f"{ours}.bias", f"{theirs}.bias")


GPT2 = Family(
    name="gpt2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("dim", "n_embd"),
        Field("layers", "n_layer"),
        Field("heads", "n_head"),
        # Written as null where it is what null means: so the published files have it.
        Field("ffn_dim", "n_inner", None, lambda width, model: None if width == 4 * model.dim else width),
        Field("max_sequence_length", "n_positions", 1024),
        Field("init_std", "initializer_range", 0.02),
        activation("activation_function", "gelu_new"),
        eps(1e-5, "layer_norm_epsilon"),
        tied(True),
    ),
    weights=(
        entry("embedding.weight", "transformer.wte.weight"),
        entry("position_embedding.weight", "transformer.wpe.weight"),
        *_both("norm", "transformer.ln_f"),
        entry("output.weight", "lm_head.weight"),
        *_both(f"{_OURS}.attention_norm", f"{_THEIRS}.ln_1"),
        *_both(f"{_OURS}.mlp_norm", f"{_THEIRS}.ln_2"),
        entry([f"{name}weight" for name in _FUSED], f"{_THEIRS}.attn.c_attn.weight", CONCATENATED_TRANSPOSED),
        entry([f"{name}bias" for name in _FUSED], f"{_THEIRS}.attn.c_attn.bias", CONCATENATED),
        *_both(f"{_OURS}.attention.output", f"{_THEIRS}.attn.c_proj", TRANSPOSED),
        *_both(f"{_OURS}.mlp.up", f"{_THEIRS}.mlp.c_fc", TRANSPOSED),
        *_both(f"{_OURS}.mlp.down", f"{_THEIRS}.mlp.c_proj", TRANSPOSED),
    ),
    fixed=GPT_BLOCK | {"positions": "learned", "attention.bias": list(_ALL)},
    defaults={"tie_embeddings": True, "mlp.activation": "gelu_tanh"},
    constants={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    derived={"n_ctx": lambda model: model.max_sequence_length},  # llama.cpp's converter reads this older name
    inert=_INERT,
    rope=None,
    refuse=refuse_uneven_heads,
    dropped=buffers(".attn.bias", ".attn.masked_bias"),
    prefix="transformer.",
    llama_cpp={"tie_embeddings": anything, "ffn_dim": lambda width, model: width == 4 * model.dim},
)
