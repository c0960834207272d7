"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention, and experts that are balanced without a loss."""

from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import (
    CORRECTED,
    CORRECTION,
    ENDS,
    LAYER,
    MLP,
    PRE_NORMS,
    ROUTING,
    SHARED,
    THEIRS,
    TRAINING,
    beyond_the_last_layer,
    corrected,
    eps,
    refuse_uncorrected,
    sizes,
    stacked,
    tied,
)
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import scalings, switches
from pretrain.models.families.declare.weights import entry


def _refuse(model: Model) -> str | None:
    return refuse_uncorrected(model) if model.latent.kv_rank else "model.latent.kv_rank=0 is ordinary attention"


def _implied(**names: int) -> Any:
    """`back` of a width that follows from others, which have these defaults: nothing new, and no contradiction."""

    def back(value: Any, config: dict[str, Any]) -> None:
        widths = [config.get(name, default) for name, default in names.items()]
        if value is not None and value not in (widths if len(widths) == 1 else [_sum(widths)]):
            raise ConfigError(
                f"config.json: a head's width of {shown(value)} contradicts {' + '.join(names)} = {shown(widths)}"
            )

    return back


def _sum(widths: list[Any]) -> int | None:
    return sum(widths) if all(isinstance(width, int) for width in widths) else None


ATTENTION = (
    ("query", "q_proj"), ("query_down", "q_a_proj"), ("query_norm", "q_a_layernorm"), ("query_up", "q_b_proj"),
    ("kv_down", "kv_a_proj_with_mqa"), ("kv_norm", "kv_a_layernorm"), ("kv_up", "kv_b_proj"), ("output", "o_proj"),
)  # fmt: skip


def _one_mscale(value: float, model: Model) -> bool:
    """llama.cpp's converter reads one of the two numbers, and its arithmetic is right where both are the same."""
    return model.rope.scaling == "none" or model.rope.mscale == model.rope.mscale_all_dim > 0


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=(
        *(field for field in sizes(kv_heads=128, length=4096) if field.ours != "head_dim"),
        eps(1e-6),
        tied(False),
        Field("latent.kv_rank", "kv_lora_rank", 512),
        Field("latent.query_rank", "q_lora_rank", 1536, lambda n, model: n or None, lambda n, config: n or 0),
        Field("latent.rope_dim", "qk_rope_head_dim", 64),
        Field("latent.plain_dim", "qk_nope_head_dim", 128),
        Field("latent.value_dim", "v_head_dim", 128),
        Field("head_dim", "head_dim", None, lambda n, model: model.latent.rope_dim, _implied(qk_rope_head_dim=64)),
        Field("head_dim", "qk_head_dim", None, back=_implied(qk_nope_head_dim=128, qk_rope_head_dim=64)),
        Field(
            "rope.layout",
            "rope_interleave",
            True,
            lambda layout, model: layout == "interleaved",
            lambda flag, config: {True: "interleaved", False: "half"}[flag] if type(flag) is bool else shown(flag),
        ),
        *corrected(count=256, ffn_dim=2048, dense=3, scale=2.5, groups=8, active_groups=4),
    ),
    weights=(
        *ENDS,
        *MLP,
        *PRE_NORMS,
        *stacked(),
        *(entry(f"{LAYER}.attention.{ours}.weight", f"{THEIRS}.self_attn.{theirs}.weight") for ours, theirs in ATTENTION),
        CORRECTION,
        *SHARED,
    ),
    defaults={"rope.layout": "interleaved", "experts.shared": 1, "experts.correction_rate": 0.001},
    fixed=CORRECTED,
    constants={
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    derived={"num_nextn_predict_layers": lambda model: 0},
    # Layers that predict further ahead change no logit of the next token: they are left out, whatever their number.
    inert=TRAINING | {"num_nextn_predict_layers", "num_mtp_layers"},
    dropped=beyond_the_last_layer,
    refuse=_refuse,
    aliases=("kimi_k2",),
    llama_cpp={
        **switches("tie_embeddings", "latent.kv_rank", "latent.rope_dim", "latent.plain_dim", "latent.value_dim"),
        **switches(*(f"experts.{name}" for name in ROUTING)),
        # By the number of layers it knows the "lite" models, whose queries are whole.
        "latent.query_rank": lambda rank, model: (rank == 0) == (model.layers in (26, 27)),
        # Its norms of the narrow vectors have this eps too; up to here, logits move by 1e-4.
        "norm_eps": lambda eps, model: eps <= 1e-5,
        **scalings("yarn"),
        **dict.fromkeys(("rope.mscale", "rope.mscale_all_dim"), _one_mscale),
    },
)
