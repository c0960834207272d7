"""Gemma 2 (arXiv 2408.00118): norms around the sublayers, soft-caps, a sliding window in every other layer, scaled embeddings."""

from pretrain.models.families.declare.common import (
    GEMMA,
    GEMMA_CONSTANTS,
    WEIGHTS_SANDWICH,
    attention_bias,
    capped,
    eps,
    gemma_refuses,
    query_scalar,
    sizes,
    tied,
)
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.other_readers import WINDOWS, gemma_scores
from pretrain.models.families.declare.windows import windows

GEMMA2 = Family(
    name="gemma2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=(
        *sizes(kv_heads=4, head_dim=256, length=8192),
        eps(1e-6),
        tied(True),
        attention_bias(),
        query_scalar(256),
        capped("attention.soft_cap", "attn_logit_softcapping", 50.0),
        capped("logit_soft_cap", "final_logit_softcapping", 30.0),
        *windows(4096, lambda layer, config: layer % 2 == 0, needed=True),
    ),
    weights=WEIGHTS_SANDWICH,
    fixed=GEMMA,
    defaults={
        "tie_embeddings": True,
        "norm_eps": 1e-6,
        "attention.soft_cap": 50.0,
        "logit_soft_cap": 30.0,
        "attention.window": 4096,
        "attention.window_pattern": [True, False],
    },
    constants=GEMMA_CONSTANTS,
    refuse=gemma_refuses,
    llama_cpp=WINDOWS | gemma_scores(46) | dict.fromkeys(("attention.soft_cap", "logit_soft_cap"), lambda cap, model: cap > 0),
)
