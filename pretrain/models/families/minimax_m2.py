"""MiniMax-M2 (https://huggingface.co/MiniMaxAI/MiniMax-M2): fine-grained experts, RMSNorm over all queries and all keys."""

from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import (
    ATTENTION,
    CORRECTED,
    ENDS,
    LAYER,
    PRE_NORMS,
    THEIRS,
    TRAINING,
    eps,
    needs_experts,
    sizes,
    stacked,
    tied,
)
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import scalings, switches
from pretrain.models.families.declare.weights import entry


def _fraction(width: Any, config: dict[str, Any]) -> Any:
    """The files of the hub say how many components of a head are rotated, transformers which share of it."""
    inner, head_dim = config.get("rope_parameters"), config.get("head_dim", 128)
    share = inner.get("partial_rotary_factor") if isinstance(inner, dict) else None
    share = config.get("partial_rotary_factor") if share is None else share
    if width is None:
        return 1.0  # unless there is a share, which is read with the other rotary parameters
    if type(width) is not int or type(head_dim) is not int or not 0 < width <= head_dim:
        raise ConfigError(f"config.json: rotary_dim={shown(width)} is not supported: expected 1 to head_dim={shown(head_dim)}")
    is_share = type(share) in (int, float) and 0 < share <= 1
    if share is not None and not (is_share and int(head_dim * share) == width):
        raise ConfigError(f"config.json: rotary_dim={width} of {head_dim} contradicts partial_rotary_factor={shown(share)}")
    return width / head_dim


def _no_window(kinds: Any, config: dict[str, Any]) -> Any:
    layers = config["num_hidden_layers"]
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers and all(kind == 1 for kind in kinds)):
        raise ConfigError(
            f"config.json: attn_type_list is not supported unless it has 1, full attention, for each of {layers} layers"
        )
    return 0


def _refuse(model: Model) -> str | None:
    if model.attention.window:
        return f"model.attention.window={model.attention.window}: MiniMax-M2 has full attention in every layer"
    return needs_experts(model)


MINIMAX_M2 = Family(
    name="minimax_m2",
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fields=(
        *sizes(kv_heads=8, head_dim=128, length=196608),
        eps(1e-6),
        tied(False),
        Field("rope.fraction", "rotary_dim", None, lambda share, model: int(share * model.head_dim), _fraction),
        Field("attention.window", "attn_type_list", None, lambda window, model: [1] * model.layers, _no_window),
        Field("experts.count", "num_local_experts", 256),
        Field("experts.active", "num_experts_per_tok", 8),
    ),
    weights=(
        *ENDS, *ATTENTION, *PRE_NORMS, *stacked("block_sparse_moe", "w1", "w3", "w2"),
        entry(f"{LAYER}.mlp.router.correction", f"{THEIRS}.block_sparse_moe.e_score_correction_bias"),
    ),
    fixed=CORRECTED | {"norm.qk": "full", "experts.ffn_dim": lambda model: model.ffn_dim},
    defaults={"norm_eps": 1e-6, "rope.theta": 5_000_000.0, "rope.fraction": 0.5, "experts.correction_rate": 0.001},
    constants={
        "hidden_act": "silu", "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0, "router_jitter_noise": 0.0,
    },
    accepted={"sliding_window": None},
    # Layers that predict further ahead, which no file has; the width of an MLP that no layer has.
    inert=TRAINING | {"use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size"},
    theta=5_000_000.0,
    balance=0.001,
    partial=True,
    refuse=_refuse,
    llama_cpp=switches("rope.fraction", "experts.count", "experts.active") | scalings("linear", "yarn"),
)  # fmt: skip
