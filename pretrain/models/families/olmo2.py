"""OLMo 2 (arXiv 2501.00656): norms after the sublayers instead of before, RMSNorm over all queries and all keys."""

from typing import Any

from pretrain.config.model_schema import Model
from pretrain.models.families.declare.common import SIZES, WEIGHTS_REORDERED, attention_bias, eps, head_width, tied
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.other_readers import scalings


def _scaling(model: Model) -> dict[str, Any] | None:
    """`rope_scaling` for transformers 4, which here wants two fields and the older name of the first."""
    rope = model.rope
    return {"type": rope.scaling, "factor": rope.factor} if rope.scaling in ("linear", "dynamic") else None


def _elsewhere(model: Model) -> list[str]:
    scaling = model.rope.scaling
    return [f"transformers 4 does not load model.rope.scaling={scaling} of OLMo 2"] if scaling in ("yarn", "llama3") else []


OLMO2 = Family(
    name="olmo2",
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=(*SIZES, eps(1e-5), tied(False), attention_bias()),
    weights=WEIGHTS_REORDERED,
    fixed={"norm.placement": "reordered", "norm.qk": "full"},
    defaults={"norm_eps": 1e-6, "rope.theta": 500_000.0},
    constants={"hidden_act": "silu"},
    derived={"rope_scaling": _scaling},
    refuse=head_width,
    llama_cpp=scalings("linear", "yarn"),
    elsewhere=_elsewhere,
)
