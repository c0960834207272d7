"""Qwen3.5, the text model: Gated DeltaNet (arXiv 2412.06464) in three layers of four, and attention with an output gate in the fourth."""

from pretrain.models.families.declare.common import MLP
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.hybrid import OF_QWEN3_5, PROJECTIONS, WEIGHTS_HYBRID, fields, refuse_no_linear_attention

QWEN3_5 = Family(
    name="qwen3_5",
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields=fields(kv_heads=4),
    weights=WEIGHTS_HYBRID + PROJECTIONS + MLP,
    refuse=refuse_no_linear_attention,
    **OF_QWEN3_5,
)
