"""Qwen3 (arXiv 2505.09388): RMSNorm of queries and keys per head, heads of 128 whatever the width, no biases."""

from pretrain.models.families.declare.common import WEIGHTS, attention_bias, eps, sizes, tied
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.other_readers import scalings, switches
from pretrain.models.families.declare.windows import SUFFIX_WINDOWS, mixed_windows, suffix_windows

QWEN3 = Family(
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=(
        *sizes(kv_heads=32, head_dim=128, length=32768),
        eps(1e-6),
        tied(False),
        attention_bias(),
        *suffix_windows(4096),
    ),
    weights=WEIGHTS,
    fixed={"norm.qk": "head"},
    defaults={"norm_eps": 1e-6, "rope.theta": 1_000_000.0},
    constants={"hidden_act": "silu"},
    derived=SUFFIX_WINDOWS,
    llama_cpp=switches("tie_embeddings") | scalings("linear", "yarn"),
    elsewhere=mixed_windows,
)
