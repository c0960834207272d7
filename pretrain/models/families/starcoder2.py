"""StarCoder2 (arXiv 2402.19173): Llama's attention with LayerNorm, a plain MLP, biases everywhere and a sliding window."""

from pretrain.models.families.declare.common import (
    ATTENTION,
    ENDS,
    LAYER,
    THEIRS,
    activation,
    biases,
    eps,
    head_width,
    sizes,
    tied,
)
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import scalings, switches
from pretrain.models.families.declare.weights import entry
from pretrain.models.families.declare.windows import width_of

_MODULES = {
    "norm": "model.norm",
    f"{LAYER}.attention_norm": f"{THEIRS}.input_layernorm",
    f"{LAYER}.mlp_norm": f"{THEIRS}.post_attention_layernorm",
    f"{LAYER}.mlp.up": f"{THEIRS}.mlp.c_fc",
    f"{LAYER}.mlp.down": f"{THEIRS}.mlp.c_proj",
}
_ALL = ["query", "key", "value", "output"]

STARCODER2 = Family(
    name="starcoder2",
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fields=(
        *sizes(kv_heads=2, length=4096, init_std=0.018042),
        activation("hidden_act", "gelu_pytorch_tanh"),
        eps(1e-5, "norm_epsilon"),
        tied(True),
        *biases("use_bias", True),
        Field("attention.window", "sliding_window", None, lambda n, model: n or None, width_of),
    ),
    weights=(
        *(line for line in ENDS if line.ours != ("norm.weight",)),
        *ATTENTION,
        *(entry(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in _MODULES.items() for kind in ("weight", "bias")),
    ),
    fixed={"norm.kind": "layer", "mlp.gated": False},
    defaults={
        "tie_embeddings": True,
        "rope.theta": 1_000_000.0,
        "attention.bias": _ALL,
        "attention.window": 4096,
        "mlp.activation": "gelu_tanh",
        "mlp.bias": True,
    },
    # Of the files of the hub: what other architectures in the same code would have, and older names that transformers does not read.
    accepted={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
    inert=frozenset({
        "residual_dropout", "embedding_dropout", "rms_norm_eps", "layer_norm_epsilon", "activation_function",
        "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
    }),
    refuse=head_width,
    llama_cpp={
        **switches("tie_embeddings", "attention.window_pattern"),
        "attention.window": lambda length, model: not 0 < length < model.max_sequence_length,  # it has none
        **scalings("linear", "yarn"),
    },
)  # fmt: skip
