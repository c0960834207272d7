"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano (arXiv 2504.03624, 2508.14444, 2512.20848): layers of one sublayer each, which is Mamba 2, attention
without positions, an MLP or experts.
"""

from collections.abc import Callable
from typing import Any

from pretrain.config.model_schema import MOST_LAYERS, Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import LAYER, TRAINING, activation, corrected, sizes
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.hybrid import mamba_weights, refuse_limits, refuse_uneven_groups, shared_width
from pretrain.models.families.declare.weights import STACKED, entry
from pretrain.models.layer_specs import LayerSpec, cycled, layer_specs
from pretrain.models.shape import PLAIN

THEIRS = "backbone.layers.{layer}"

_LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _kind(spec: LayerSpec) -> str:
    if spec.mixer != "none":
        return _LETTERS["M" if spec.linear else "*"]
    return _LETTERS["E" if spec.experts else "-"]


def _kinds(config: dict[str, Any]) -> list[str]:
    """What the layers are, by two fields that may say it: as names in transformers 5, as letters in published files."""
    said: dict[str, list[str]] = {}
    if (names := config.get("layers_block_type")) is not None:
        listed = names if isinstance(names, list) else [names]
        said["layers_block_type"] = [_OLDER.get(name, name) if isinstance(name, str) else "" for name in listed]
    if (letters := config.get("hybrid_override_pattern")) is not None:
        spelled = letters if isinstance(letters, str) else "?"
        said["hybrid_override_pattern"] = [_LETTERS.get(letter, "") for letter in spelled]
    if not said:
        raise ConfigError(
            "config.json: hybrid_override_pattern is missing, and layers_block_type: nothing says what the layers are"
        )
    for name, kinds in said.items():
        what = f"config.json: {name}={shown(config[name])}"
        if not 1 <= len(kinds) <= MOST_LAYERS or not set(kinds) <= set(_LETTERS.values()):
            legal = f"{', '.join(_LETTERS.values())}, or as letters {' '.join(_LETTERS)}"
            raise ConfigError(f"{what} is not supported: expected 1 to {MOST_LAYERS} layers, each one of {legal}")
        if "full_attention" not in kinds or not {"moe", "mlp"} & set(kinds):
            raise ConfigError(f"{what} has no layer with attention, or none with an MLP, which is not built")
    if len(said) > 1 and said["layers_block_type"] != said["hybrid_override_pattern"]:
        raise ConfigError(
            f"config.json: layers_block_type={shown(names)} and hybrid_override_pattern={shown(letters)} contradict each other"
        )
    return kinds


def _of_layers(ours: str, back: Callable[[list[str]], Any]) -> Field:
    """One of our keys that `layers_block_type` tells."""
    return Field(
        ours,
        "layers_block_type",
        None,
        lambda value, model: [_kind(spec) for spec in layer_specs(model)],
        lambda value, config: back(_kinds(config)),
    )


def _dense(kinds: list[str]) -> list[int]:
    return [layer for layer, kind in enumerate(kinds) if kind == "mlp"] if "moe" in kinds else []


def _layers(count: Any, config: dict[str, Any]) -> int:
    """Files of transformers 5 leave the number out."""
    layers = len(_kinds(config))
    if count not in (None, layers):
        raise ConfigError(f"config.json: num_hidden_layers={shown(count)}, and {layers} layers have a kind")
    return layers


def _of_mamba(ours: str, theirs: str, default: int) -> Field:
    """A size of Mamba 2. Where no layer has it, exports say the default."""

    def back(value: Any, config: dict[str, Any]) -> Any:
        if "linear_attention" not in _kinds(config):
            return PLAIN[f"linear_attention.{ours}"]
        if ours == "key_heads":
            refuse_limits(config)
            refuse_uneven_groups(config, (theirs, default), ("mamba_num_heads", 128))
        return value

    return Field(f"linear_attention.{ours}", theirs, default, lambda value, model: value or default, back)


def _of_experts(field: Field) -> Field:
    """A field that says nothing where no layer has experts."""

    def back(value: Any, config: dict[str, Any]) -> Any:
        return field.back(value, config) if "moe" in _kinds(config) else PLAIN[field.ours]

    return Field(field.ours, field.theirs, field.default, field.to, back)


def _said_twice(ours: str, theirs: str, default: Any, other: str) -> Field:
    """A field with another name beside it, which may only say the same."""

    def back(value: Any, config: dict[str, Any]) -> Any:
        if (said := config.get(other, value)) != value:
            raise ConfigError(f"config.json: {other}={shown(said)} contradicts {theirs}={shown(value)} (absent: {default})")
        return value

    return Field(ours, theirs, default, back=back)


def _refuse(model: Model) -> str | None:
    if both := [layer for layer, spec in enumerate(layer_specs(model)) if spec.mixer != "none" and spec.mlp != "none"]:
        return f"model.sublayers={model.sublayers} gives layer {both[0]} two sublayers"
    if model.experts.count and not model.experts.shared:
        return "model.experts.shared=0 has no shared expert"
    return None


def _usual_linear(model: Model) -> list[bool]:
    """Every fourth layer without an MLP has attention, and the others have Mamba 2. A small model has attention in the last of them."""
    mixes = [sublayers != "mlp" for sublayers in cycled(model.sublayers or _USUAL, model.layers)]
    mixers = [layer for layer, has_mixer in enumerate(mixes) if has_mixer]
    with_attention = mixers[3::4] or mixers[-1:]
    return [has_mixer and layer not in with_attention for layer, has_mixer in enumerate(mixes)]


_USUAL = ["mixer", "mlp"]
_NO_STEP = 1e-20
"""`time_step_min`, which transformers 5.23 takes for the shortest step in a prompt, though not when it goes on from a cache. The model has no such limit."""

NEMOTRON_H = Family(
    name="nemotron_h",
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    fields=(
        *(field for field in sizes(kv_heads=8, length=4096) if field.ours not in ("layers", "head_dim")),
        Field("layers", "num_hidden_layers", None, back=_layers),
        _said_twice("head_dim", "head_dim", 128, "attention_head_dim"),
        _said_twice("norm_eps", "layer_norm_epsilon", 1e-5, "norm_eps"),
        activation("mlp_hidden_act", "relu2"),
        _of_layers("sublayers", lambda kinds: ["mlp" if kind in ("moe", "mlp") else "mixer" for kind in kinds]),
        _of_layers("linear_attention.pattern", lambda kinds: [kind == "linear_attention" for kind in kinds]),
        _of_layers("experts.dense_layers", _dense),
        _of_mamba("key_heads", "n_groups", 8),
        _of_mamba("value_heads", "mamba_num_heads", 128),
        _of_mamba("key_dim", "ssm_state_size", 128),
        _of_mamba("value_dim", "mamba_head_dim", 64),
        _of_mamba("kernel", "conv_kernel", 4),
        *(
            _of_experts(field)
            for field in corrected(count=8, ffn_dim=7688, dense=0, scale=1.0, groups=1, active_groups=1)
            if field.ours not in ("experts.active", "experts.shared", "experts.dense_layers")
        ),
        _of_experts(Field("experts.active", "num_experts_per_tok", 2)),
        _of_experts(shared_width("moe_shared_expert_intermediate_size", 7688, ("moe_intermediate_size", 7688))),
    ),
    weights=(
        entry("embedding.weight", "backbone.embeddings.weight"),
        entry("norm.weight", "backbone.norm_f.weight"),
        entry("output.weight", "lm_head.weight"),
        *(entry(f"{LAYER}.{norm}.weight", f"{THEIRS}.norm.weight") for norm in ("attention_norm", "mlp_norm")),
        *(
            entry(f"{LAYER}.attention.{ours}.weight", f"{THEIRS}.mixer.{theirs}_proj.weight")
            for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
        ),
        *mamba_weights(f"{THEIRS}.mixer"),
        *(
            line
            for name in ("up", "down")
            for line in (
                entry(f"{LAYER}.mlp.{name}.weight", f"{THEIRS}.mixer.{name}_proj.weight"),
                entry(f"{LAYER}.mlp.shared.{name}.weight", f"{THEIRS}.mixer.shared_experts.{name}_proj.weight"),
                entry(f"{LAYER}.mlp.experts.{name}", f"{THEIRS}.mixer.experts.{{expert}}.{name}_proj.weight", STACKED),
            )
        ),
        entry(f"{LAYER}.mlp.router.weight", f"{THEIRS}.mixer.gate.weight"),
        entry(f"{LAYER}.mlp.router.correction", f"{THEIRS}.mixer.gate.e_score_correction_bias"),
    ),
    fixed={
        "positions": "none",
        "tie_embeddings": False,
        "linear_attention.kind": "mamba2",
        "mlp.gated": False,
        "experts.scoring": lambda model: "sigmoid" if model.experts.count else "softmax",
        "experts.correction": lambda model: bool(model.experts.count),
    },
    defaults={
        "mlp.activation": "relu2",
        "sublayers": _USUAL,
        "linear_attention.pattern": _usual_linear,
        "experts.shared": lambda model: 1 if model.experts.count else 0,
        "experts.correction_rate": lambda model: 0.001 if model.experts.count else 0.0,
    },
    constants={
        "attention_bias": False,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "n_shared_experts": 1,  # of its own width
        "tie_word_embeddings": False,  # transformers 5.23 ties nothing here, whatever it says
        "use_bias": False,
        "use_conv_bias": True,
    },
    accepted={"moe_latent_size": None, "residual_in_fp32": False, "sliding_window": None},
    derived={
        "hybrid_override_pattern": lambda model: "".join(
            letter for spec in layer_specs(model) for letter, kind in _LETTERS.items() if kind == _kind(spec)
        ),
        "expand": lambda model: 2,  # as published files say, whatever the widths are; transformers does not obey it
        "time_step_min": lambda model: _NO_STEP,
        "time_step_limit": lambda model: None,
    },
    inert=TRAINING
    | {
        "chunk_size",
        "hidden_dropout",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
        "norm_eps",  # this one and the next are read by `_said_twice`
        "attention_head_dim",
        "num_logits_to_keep",
        "num_nextn_predict_layers",
        "partial_rotary_factor",
        "rescale_prenorm_residual",
        "rope_theta",
        "time_step_floor",
        "time_step_max",
        "use_mamba_kernels",
    },
    rope=None,
    not_obeyed={"time_step_min": _NO_STEP},
    prefix="backbone.",
    nested="model.",
    dropped=lambda name, model: name.startswith("mtp."),
    refuse=_refuse,
)
