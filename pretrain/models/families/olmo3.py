"""OLMo 3 (2025): OLMo 2 with a sliding window in three layers of four; frequencies are scaled in the others only."""

from pretrain.config.model_schema import Model
from pretrain.models.families.declare.common import SIZES, WEIGHTS_REORDERED, attention_bias, eps, head_width, tied
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.other_readers import WINDOWS, scalings
from pretrain.models.families.declare.windows import windows


def _elsewhere(model: Model) -> list[str]:
    rope, problem = model.rope, None
    if rope.local_theta != rope.theta:
        problem = f"model.rope.local_theta={rope.local_theta}"
    elif rope.scaling != "none" and rope.scale_local:
        problem = "model.rope.scale_local=true"
    return [f"{problem} is ignored by transformers 4, which then computes another model; use transformers 5"] if problem else []


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
    llama_cpp=WINDOWS | scalings("yarn") | {"attention.window": lambda width, model: width > 0},
    elsewhere=_elsewhere,
)
