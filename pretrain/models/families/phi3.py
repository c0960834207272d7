"""Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): Llama whose query, key and value, and gate and up, are one matrix each.

The versions for 128k tokens scale each frequency by a factor of its own (LongRoPE), which is not built: they are refused.
"""

from pretrain.config.model_schema import Model
from pretrain.models.families.declare.common import FUSED, WEIGHTS, eps, head_width, sizes, tied
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.other_readers import switches
from pretrain.models.families.declare.windows import windows


def _refuse(model: Model) -> str | None:
    if model.rope.scaling != "none":  # transformers takes `yarn` of a Phi-3 for LongRoPE
        return f"model.rope.scaling={model.rope.scaling} is not one that phi3 of transformers has"
    return head_width(model)


SEPARATE = {name for line in FUSED for name in line.ours}

PHI3 = Family(
    name="phi3",
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=(*sizes(length=4096), eps(1e-5), tied(False), windows(None)[0]),
    weights=(*FUSED, *(line for line in WEIGHTS if not SEPARATE & set(line.ours))),
    constants={"hidden_act": "silu", "attention_bias": False},
    accepted={"lm_head_bias": False, "mlp_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
    # llama.cpp's converter insists on the length before scaling, even where nothing is scaled.
    derived={"original_max_position_embeddings": lambda model: model.max_sequence_length},
    inert=frozenset({"resid_pdrop", "embd_pdrop"}),
    partial=True,
    refuse=_refuse,
    llama_cpp=switches("tie_embeddings", "rope.fraction"),
)
