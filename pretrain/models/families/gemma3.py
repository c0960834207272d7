"""Gemma 3, its text model (arXiv 2503.19786): Gemma 2 with a norm of queries and keys instead of soft-caps. Five layers of six
have a sliding window and another rotary base."""

from pretrain.config.model_schema import Model
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
from pretrain.models.families.declare.other_readers import WINDOWS, gemma_scores, scalings, switches
from pretrain.models.families.declare.windows import number, windows
from pretrain.models.layer_specs import has_windows


def _sliding_window_pattern(model: Model) -> int | None:
    """The period of the layers without a window, for older readers, which know only a period; None if the pattern has no period."""
    flags = has_windows(model)
    return next((n for n in (6, *range(1, model.layers + 2)) if flags == [(i + 1) % n != 0 for i in range(model.layers)]), None)


GEMMA3 = Family(
    name="gemma3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=(
        *sizes(kv_heads=4, head_dim=256, length=131072),
        eps(1e-6),
        tied(True),
        attention_bias(),
        query_scalar(256),
        capped("logit_soft_cap", "final_logit_softcapping", None),
        *windows(4096, lambda layer, config: (layer + 1) % number(config, "sliding_window_pattern", 6) != 0, needed=True),
    ),
    weights=WEIGHTS_SANDWICH,
    fixed={**GEMMA, "norm.qk": "head"},
    defaults={
        "tie_embeddings": True,
        "norm_eps": 1e-6,
        "rope.theta": 1_000_000.0,
        "rope.local_theta": 10_000.0,
        "rope.scale_local": False,
        "attention.window": 1024,
        "attention.window_pattern": [True] * 5 + [False],
    },
    constants={**GEMMA_CONSTANTS, "attn_logit_softcapping": None},  # a soft-cap is read by transformers, but not applied
    derived={"sliding_window_pattern": _sliding_window_pattern, "_sliding_window_pattern": lambda model: None},
    rope="by_layer_type",
    theta=1_000_000.0,
    local_theta=10_000.0,
    refuse=gemma_refuses,
    llama_cpp=WINDOWS
    | gemma_scores(62)
    | scalings("linear", "yarn")
    | switches("tie_embeddings", "logit_soft_cap", "rope.local_theta"),
)
