"""SmolLM3 (Hugging Face, 2025): Llama without rotation in every fourth layer (arXiv 2501.18795)."""

from typing import Any

from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import WEIGHTS, attention_bias, eps, head_width, sizes, tied
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import scalings, switches
from pretrain.models.families.declare.windows import number, windows
from pretrain.models.layer_specs import cycled


def _rotated(flags: Any, config: dict[str, Any]) -> list[bool]:
    """Which layers rotate: `no_rope_layers` has 1 for those, 0 for the others."""
    layers = int(config["num_hidden_layers"])
    if flags is None:
        return [(layer + 1) % number(config, "no_rope_layer_interval", 4) != 0 for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or not all(flag in (0, 1) for flag in flags):
        raise ConfigError(
            f"config.json: no_rope_layers={shown(flags)} is not supported: expected 0 or 1 for each of {layers} layers"
        )
    return [bool(flag) for flag in flags[:layers]]


def _has_window(layer: int, config: dict[str, Any]) -> bool:
    return not _rotated(config.get("no_rope_layers"), config)[layer]


SMOLLM3 = Family(
    name="smollm3",
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=(
        *sizes(kv_heads=4, length=32768),
        eps(1e-6),
        tied(True),
        attention_bias(),
        Field("mlp.bias", "mlp_bias", False),
        Field(
            "rope.pattern", "no_rope_layers", None, lambda flags, model: [int(f) for f in cycled(flags, model.layers)], _rotated
        ),
        *windows(None, _has_window, switched=True),
    ),
    weights=WEIGHTS,
    defaults={"tie_embeddings": True, "norm_eps": 1e-6, "rope.theta": 5_000_000.0, "rope.pattern": [True, True, True, False]},
    constants={"hidden_act": "silu"},
    derived={"use_sliding_window": lambda model: model.attention.window > 0, "no_rope_layer_interval": lambda model: None},
    inert=frozenset({"max_window_layers"}),
    theta=2_000_000.0,
    refuse=head_width,
    llama_cpp=switches("tie_embeddings") | scalings("yarn"),
)
