"""ERNIE 4.5, the dense models (https://huggingface.co/baidu/ERNIE-4.5-0.3B-PT): Llama that rotates neighbouring components."""

from pretrain.models.families.declare.common import WEIGHTS, biases, eps, sizes, tied
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.other_readers import scalings, switches

ERNIE4_5 = Family(
    name="ernie4_5",
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    fields=(*sizes(kv_heads=2, head_dim=128, length=131072), eps(1e-5), tied(True), *biases("use_bias", False)),
    weights=WEIGHTS,
    fixed={"rope.layout": "interleaved"},
    defaults={"tie_embeddings": True, "rope.theta": 500_000.0},
    constants={"hidden_act": "silu"},
    theta=500_000.0,
    llama_cpp=switches("tie_embeddings") | scalings("linear", "yarn"),
)
