"""OLMo 2 (arXiv 2501.00656): norms after the sublayers instead of before, RMSNorm over all queries and all keys."""

from pretrain.models.families.common import SIZES, WEIGHTS_REORDERED, attention_bias, eps, head_width, tied
from pretrain.models.families.family import Family

OLMO2 = Family(
    name="olmo2",
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=(*SIZES, eps(1e-5), tied(False), attention_bias()),
    weights=WEIGHTS_REORDERED,
    fixed={"norm.placement": "reordered", "norm.qk": "full"},
    defaults={"norm_eps": 1e-6, "rope.theta": 500_000.0},
    constants={"hidden_act": "silu"},
    refuse=head_width,
)
