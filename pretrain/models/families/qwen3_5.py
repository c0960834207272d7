"""Qwen3.5, the text model: Gated DeltaNet (arXiv 2412.06464) in three layers of four, and attention with an output gate in the fourth."""

from pretrain.models.families.declare.common import MLP
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.hybrid import (
    CONSTANTS_HYBRID,
    DEFAULTS_HYBRID,
    FIXED_HYBRID,
    INERT_HYBRID,
    INERT_ROPE_HYBRID,
    WEIGHTS_HYBRID,
    fields,
    full_attention_interval,
    of_images,
    refuse_no_linear_attention,
)

QWEN3_5 = Family(
    name="qwen3_5",
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields=fields(kv_heads=4),
    weights=WEIGHTS_HYBRID + MLP,
    fixed=FIXED_HYBRID,
    defaults=DEFAULTS_HYBRID,
    constants=CONSTANTS_HYBRID,
    accepted={"output_gate_type": "swish"},
    derived={"full_attention_interval": full_attention_interval},
    inert=INERT_HYBRID,
    inert_rope=INERT_ROPE_HYBRID,
    dropped=of_images,
    partial=True,
    nested="model.language_model.",
    refuse=refuse_no_linear_attention,
)
