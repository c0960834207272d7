"""gpt-oss 20b and 120b (arXiv 2508.10925): attention sinks, windows in every other layer, experts with biases."""

from pretrain.config.model_schema import Model
from pretrain.models.families.declare.common import (
    ATTENTION,
    ENDS,
    LAYER,
    PRE_NORMS,
    THEIRS,
    TRAINING,
    attention_bias,
    eps,
    needs_experts,
    sizes,
    tied,
)
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import WINDOWS, scalings, switches
from pretrain.models.families.declare.weights import INTERLEAVED, INTERLEAVED_TRANSPOSED, TRANSPOSED, entry
from pretrain.models.families.declare.windows import windows
from pretrain.models.layer_specs import has_windows

EXPERTS = f"{LAYER}.mlp.experts"


def _elsewhere(model: Model) -> list[str]:
    flags = has_windows(model)
    if flags == [layer % 2 == 0 for layer in range(model.layers)]:
        return []
    return [
        "vLLM 0.33 gives a window to every other layer from the first, whatever model.attention.window_pattern says: another model"
    ]


GPT_OSS = Family(
    name="gpt_oss",
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=(
        *(field for field in sizes(kv_heads=8, length=131072) if field.ours != "head_dim"),
        Field("head_dim", "head_dim", 64),
        eps(1e-5),
        tied(False),
        attention_bias(True),
        *windows(128, lambda layer, config: layer % 2 == 0, needed=True),
        Field("experts.count", "num_local_experts", 128),
        Field("experts.active", "num_experts_per_tok", 4),
    ),
    weights=(
        *ENDS,
        *ATTENTION,
        *PRE_NORMS,
        entry(f"{LAYER}.attention.sinks", f"{THEIRS}.self_attn.sinks"),
        entry(f"{LAYER}.mlp.router.weight", f"{THEIRS}.mlp.router.weight"),
        entry(f"{LAYER}.mlp.router.bias", f"{THEIRS}.mlp.router.bias"),
        entry((f"{EXPERTS}.gate", f"{EXPERTS}.up"), f"{THEIRS}.mlp.experts.gate_up_proj", INTERLEAVED_TRANSPOSED),
        entry((f"{EXPERTS}.gate_bias", f"{EXPERTS}.up_bias"), f"{THEIRS}.mlp.experts.gate_up_proj_bias", INTERLEAVED),
        entry(f"{EXPERTS}.down", f"{THEIRS}.mlp.experts.down_proj", TRANSPOSED),
        entry(f"{EXPERTS}.down_bias", f"{THEIRS}.mlp.experts.down_proj_bias"),
    ),
    defaults={
        "rope.theta": 150000.0,
        "attention.bias": ["query", "key", "value", "output"],
        "attention.window": 128,
        "attention.window_pattern": [True, False],
    },
    fixed={
        "attention.sinks": True,
        "rope.scale_local": True,
        "mlp.activation": "silu_clamped",
        "mlp.bias": True,
        "experts.router_bias": True,
        "experts.ffn_dim": lambda model: model.ffn_dim,
    },  # fmt: skip
    constants={"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    inert=TRAINING | {"experts_per_token", "initial_context_length"},  # older names of fields that are there as well
    refuse=needs_experts,
    balance=0.001,
    theta=150000.0,
    scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    llama_cpp=WINDOWS | scalings("yarn") | switches("experts.count", "experts.active", "experts.ffn_dim"),
    elsewhere=_elsewhere,
)
