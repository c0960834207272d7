"""Qwen3.5, the text model: Gated DeltaNet (arXiv 2412.06464) in three layers of four, and attention with an output gate in the fourth."""

from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import ATTENTION, ENDS, LAYER, MLP, PRE_NORMS, THEIRS, eps, sizes, tied
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.weights import CONCATENATED, FUSED_PER_HEAD, entry
from pretrain.models.families.declare.windows import whole
from pretrain.models.shape import layer_specs

_interval = whole("full_attention_interval", 4)


def _layer_types(model: Model) -> list[str]:
    return ["linear_attention" if spec.mixer == "gated_delta" else "full_attention" for spec in layer_specs(model)]


def _pattern(types: Any, config: dict[str, Any]) -> list[bool]:
    layers = int(config["num_hidden_layers"])
    if types is None:
        return [(layer + 1) % _interval(config) != 0 for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {"linear_attention", "full_attention"}:
        raise ConfigError(
            f"config.json: layer_types={shown(types)} is not supported: expected linear_attention or full_attention for each of {layers} layers"
        )
    return [kind == "linear_attention" for kind in types]


def _full_attention_interval(model: Model) -> int | None:
    """For older readers, which know only a period; None if the pattern has none."""
    types = _layer_types(model)
    return next((n for n in range(1, model.layers + 1) if types == _layer_types_by(n, model.layers)), None)


def _layer_types_by(interval: int, layers: int) -> list[str]:
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


def _refuse(model: Model) -> str | None:
    if not any(model.linear_attention.pattern):
        return "model.linear_attention.pattern=[false] has no linear attention"
    return None


LINEAR, IN_HF = f"{LAYER}.linear_attention", f"{THEIRS}.linear_attn"
WEIGHTS = (
    *ENDS,
    *(line for line in ATTENTION if line.ours != (f"{LAYER}.attention.query.weight",)),
    entry((f"{LAYER}.attention.query.weight", f"{LAYER}.attention.gate.weight"), f"{THEIRS}.self_attn.q_proj.weight", FUSED_PER_HEAD),
    *MLP,
    *PRE_NORMS,
    entry([f"{LINEAR}.{name}.weight" for name in ("query", "key", "value")], f"{IN_HF}.in_proj_qkv.weight", CONCATENATED),
    entry([f"{LINEAR}.{name}_filter" for name in ("query", "key", "value")], f"{IN_HF}.conv1d.weight", CONCATENATED),
    *(
        entry(f"{LINEAR}.{ours}", f"{IN_HF}.{theirs}")
        for ours, theirs in (
            ("gate.weight", "in_proj_z.weight"), ("rate.weight", "in_proj_b.weight"), ("decay.weight", "in_proj_a.weight"),
            ("decay_bias", "dt_bias"), ("log_decay_scale", "A_log"), ("output_norm.weight", "norm.weight"), ("output.weight", "out_proj.weight"),
        )
    ),
)  # fmt: skip

QWEN3_5 = Family(
    name="qwen3_5",
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields=(
        *sizes(kv_heads=4, head_dim=256, length=32768),
        eps(1e-6),
        tied(False),
        Field("linear_attention.pattern", "layer_types", None, lambda pattern, model: _layer_types(model), _pattern),
        Field("linear_attention.key_heads", "linear_num_key_heads", 16),
        Field("linear_attention.value_heads", "linear_num_value_heads", 32),
        Field("linear_attention.key_dim", "linear_key_head_dim", 128),
        Field("linear_attention.value_dim", "linear_value_head_dim", 128),
        Field("linear_attention.kernel", "linear_conv_kernel_dim", 4),
    ),
    weights=WEIGHTS,
    fixed={"norm.kind": "rms_offset", "norm.qk": "head", "attention.output_gate": True},
    defaults={
        "norm_eps": 1e-6,
        "rope.theta": 10_000_000.0,
        "rope.fraction": 0.25,
        # A small model keeps one layer with attention, its last.
        "linear_attention.pattern": lambda model: [True] * min(3, model.layers - 1) + [False],
    },
    constants={"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True},
    accepted={"output_gate_type": "swish"},
    derived={"full_attention_interval": _full_attention_interval},
    # Of the layers that predict further ahead, and the format of the state, which transformers computes in fp32 anyway.
    inert=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"}),
    dropped=lambda name, model: name.startswith(("mtp.", "model.visual.")),
    # How positions of images are told apart; those of text have three equal numbers.
    inert_rope=frozenset({"mrope_section", "mrope_interleaved"}),
    partial=True,
    refuse=_refuse,
)
