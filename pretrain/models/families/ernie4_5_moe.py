"""ERNIE 4.5 with experts (https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT): scores by softmax, corrected as DeepSeek-V3's are."""

from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import LAYER, SHARED, THEIRS, TRAINING, WEIGHTS, eps, sizes, stacked, tied
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.weights import ONE_ROW, entry


def _stretch(model: Model) -> tuple[int, int, int]:
    """The first and the last layer with experts, and the interval at which layers between them have experts."""
    layers = [layer for layer in range(model.layers) if layer not in model.experts.dense_layers]
    return layers[0], layers[-1], layers[1] - layers[0] if len(layers) > 1 else 1


def _outside(layers: int, first: int, last: int, interval: int) -> list[int]:
    return [layer for layer in range(layers) if not first <= layer <= last or (layer + 1) % interval]


def _refuse(model: Model) -> str | None:
    dense = model.experts.dense_layers
    if not model.experts.count or len(dense) == model.layers:
        return "no layer has experts"
    if dense != _outside(model.layers, *_stretch(model)):
        return f"model.experts.dense_layers={dense} leaves experts in other layers than every n-th one of a stretch"
    return None


def _dense_layers(value: Any, config: dict[str, Any]) -> list[int]:
    """Three fields say together which layers have an MLP."""
    layers, names = config["num_hidden_layers"], ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    first, last, step = given = [config.get(name, default) for name, default in zip(names, (1, -1, 1))]
    if any(type(number) is not int for number in given) or first < 0 or last < -1 or step < 1:
        raise ConfigError(
            f"config.json: {', '.join(f'{n}={shown(v)}' for n, v in zip(names, given))} are not supported: expected layers"
        )
    return _outside(layers, first, layers - 1 if last == -1 else last, step)


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    fields=(
        *sizes(kv_heads=4, length=131072),
        eps(1e-5),
        tied(True),
        Field("experts.count", "moe_num_experts", 64),
        Field("experts.active", "moe_k", 6),
        Field("experts.ffn_dim", "moe_intermediate_size", 1536),
        Field("experts.shared", "moe_num_shared_experts", 2),
        Field("experts.dense_layers", "moe_layer_start_index", 1, lambda layers, model: _stretch(model)[0], _dense_layers),
        Field("experts.dense_layers", "moe_layer_end_index", -1, lambda layers, model: _stretch(model)[1], _dense_layers),
        Field("experts.dense_layers", "moe_layer_interval", 1, lambda layers, model: _stretch(model)[2], _dense_layers),
    ),
    weights=(
        *WEIGHTS, *stacked(), *SHARED,
        entry(f"{LAYER}.mlp.router.correction", f"{THEIRS}.mlp.moe_statics.e_score_correction_bias", ONE_ROW),
    ),
    fixed={"rope.layout": "interleaved", "experts.correction": True},
    defaults={"tie_embeddings": True, "rope.theta": 500_000.0, "experts.shared": 2, "experts.correction_rate": 0.001},
    # transformers divides a token's weights by no less than moe_norm_min, a sum that softmax does not come near.
    constants={"hidden_act": "silu", "use_bias": False, "moe_norm_min": 1e-12, "moe_use_aux_free": True},
    accepted={"use_rmsnorm": True, "moe_gate": "topk", "moe_gate_act": "softmax"},
    inert=TRAINING | {"moe_capacity", "num_nextn_predict_layers"},
    theta=500_000.0,
    balance=0.001,
    dropped=lambda name, model: name.startswith("model.mtp_"),
    refuse=_refuse,
)  # fmt: skip
