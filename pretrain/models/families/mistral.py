"""Mistral 7B (arXiv 2310.06825): Llama with a sliding window in every layer, or none (from v0.2 on)."""

from pretrain.models.families.declare.common import WEIGHTS, eps, sizes, tied
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.other_readers import AS_LLAMA
from pretrain.models.families.declare.windows import windows

MISTRAL = Family(
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(*sizes(kv_heads=8, length=131072), eps(1e-6), tied(False), windows(4096)[0]),
    weights=WEIGHTS,
    constants={"hidden_act": "silu"},
    llama_cpp=AS_LLAMA,
)
