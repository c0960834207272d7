"""OLMo 3 (2025): OLMo 2 with a sliding window in three layers of four; frequencies are scaled in the others only."""

from pretrain.models.families.common import SIZES, WEIGHTS_REORDERED, attention_bias, eps, head_width, tied
from pretrain.models.families.family import Family
from pretrain.models.families.windows import windows

OLMO3 = Family(
    name="olmo3",
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    fields=(
        *SIZES,
        eps(1e-5),
        tied(False),
        attention_bias(),
        *windows(4096, lambda layer, config: (layer + 1) % 4 != 0, needed=True),
    ),
    weights=WEIGHTS_REORDERED,
    fixed={"norm.placement": "reordered", "norm.qk": "full"},
    defaults={
        "norm_eps": 1e-6,
        "rope.theta": 500_000.0,
        "rope.scale_local": False,
        "attention.window": 4096,
        "attention.window_pattern": [True, True, True, False],
    },
    constants={"hidden_act": "silu"},
    rope="by_layer_type",
    theta=500_000.0,
    refuse=head_width,
)
