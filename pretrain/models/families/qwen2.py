"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): biases of queries, keys and values."""

from pretrain.models.families.declare.common import WEIGHTS, eps, head_width, sizes, tied
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.other_readers import scalings, switches
from pretrain.models.families.declare.windows import SUFFIX_WINDOWS, mixed_windows, suffix_windows

QWEN2 = Family(
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=(*sizes(kv_heads=32, length=32768), eps(1e-6), tied(False), *suffix_windows(4096)),
    weights=WEIGHTS,
    fixed={"attention.bias": ["query", "key", "value"]},
    defaults={"norm_eps": 1e-6, "rope.theta": 1_000_000.0},
    constants={"hidden_act": "silu"},
    accepted={"use_mrope": False},
    derived=SUFFIX_WINDOWS,
    refuse=head_width,
    llama_cpp=switches("tie_embeddings") | scalings("linear", "yarn"),
    elsewhere=mixed_windows,
)
