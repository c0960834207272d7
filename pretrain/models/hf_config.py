"""`model.hf_config`: what describes a model of transformers'. The file is read once, and its contents, every default spelled out,
take its place in the configuration: a run and its checkpoints do not depend on the file, nor on defaults of another version.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError
from pretrain.models.families.family import INERT
from pretrain.models.families.rope import ROPE_FIELDS
from pretrain.models.shape import flat

# Predicts tokens in any order, so its logits are not those of the next token; those that mask tokens are known by their class.
_NOT_CAUSAL = {"xlnet"}
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def import_transformers() -> ModuleType:
    """transformers, without what accelerate's launcher would tell it: with these it leaves weights empty on all ranks but one."""
    for variable in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(variable, None)
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"model.family=hf needs the package transformers: {error}") from error
    return transformers


def complete_hf(model: Model, sequence_length: int | None) -> Model:
    """A section of `family: hf` with the contents of its file, and the sizes these say. Raises ConfigError by key."""
    if model.hf_config is None:
        raise ConfigError(
            "model.family=hf needs model.hf_config: a config.json of transformers', or the directory that has one"
        )
    text = read_config(model.hf_config)
    config = config_of(text).get_text_config()
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise ConfigError(
                f"model.hf_config: model_type={config.model_type} has no {name}; such a configuration is not supported"
            )
    dim, heads = config.hidden_size, getattr(config, "num_attention_heads", None) or 1
    limit = next((n for name in _LONGEST if isinstance(n := getattr(config, name, None), int)), None)
    longest = model.max_sequence_length or limit or sequence_length or 2048  # positions that nothing limits (Bloom)
    if limit and max(longest, sequence_length or 0) > limit:
        key = "model.max_sequence_length" if longest > limit else "data.sequence_length"
        raise ConfigError(
            f"{key}={max(longest, sequence_length or 0)}: the model of model.hf_config has {limit} positions; lower it"
        )
    sizes = {
        "dim": dim,
        "layers": config.num_hidden_layers,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or dim // heads,
        "vocab_size": config.vocab_size,
        "tie_embeddings": bool(config.tie_word_embeddings),
        "max_sequence_length": longest,
    }
    plain = flat(Model())
    for name, value in flat(model).items():
        if name not in ("family", "hf_config", "max_sequence_length") and value not in (plain[name], sizes.get(name)):
            raise ConfigError(
                f"model.{name}={value} has no meaning beside model.family=hf: model.hf_config says it all; remove it"
            )
    return dataclasses.replace(model, hf_config=text, **sizes)


def config_of(text: str) -> Any:
    """The configuration object of transformers' for the contents that `read_config` gives."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = json.loads(text)
    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


def read_config(given: str) -> str:
    """The contents of a config.json, a directory's or given as they are, as one line of JSON in which no default is left open.

    What this function gave before is given again as it is: defaults that another version of transformers adds do not get in.
    Raises ConfigError for what transformers does not build as a causal language model by itself; no code of a model's
    repository is ever run.
    """
    fields, place = _read(given)
    import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING or kind not in CLASSES:
        code = "; its auto_map names code in the model's repository, which is never run" if "auto_map" in fields else ""
        raise ConfigError(f"{place}: transformers builds no causal language model of model_type={kind!r}{code}")
    architectures = [CLASSES[kind]] if isinstance(CLASSES[kind], str) else list(CLASSES[kind])
    try:
        _check_fields(fields, CONFIG_MAPPING[kind], place)
        config = CONFIG_MAPPING[kind].from_dict({name: value for name, value in fields.items() if name != "auto_map"})
        written = {name: value for name, value in config.to_dict().items() if name not in _DROPPED}
        text = json.dumps(written | {"model_type": kind, "architectures": architectures}, sort_keys=True)
    except ConfigError:
        raise
    except Exception as error:  # whatever checks of a configuration's own raise, which is of many kinds
        raise ConfigError(f"{place}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    _check_causal(config, kind, place)
    return given if _is_contents(given) and fields.get("architectures") == architectures else text


def _is_contents(given: str) -> bool:
    return given.lstrip().startswith("{")


def _read(given: str) -> tuple[dict[str, Any], str]:
    """The JSON object, and what to call the place it is from."""
    place, text = "model.hf_config", given
    try:
        if not _is_contents(given):
            path = Path(given) / "config.json" if Path(given).is_dir() else Path(given)
            place, text = str(path), path.read_text(encoding="utf-8")
        fields = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.hf_config={given}: cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"model.hf_config={given}: not a JSON object")
    return fields, place


_DROPPED = INERT - {"bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "pretraining_tp", "is_encoder_decoder"}


def _check_fields(fields: dict[str, Any], kind: Any, place: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = set(kind().to_dict()) | set(kind.attribute_map) | INERT | ROPE_FIELDS
    if unknown := sorted(set(fields) - known):
        raise ConfigError(f"{place}: {unknown[0]}={fields[unknown[0]]!r} is no field of {kind.__name__}; remove it")
    for name in kind.sub_configs:  # of text and vision, where one model has both
        part = fields.get(name)
        if isinstance(part, dict) and (own := getattr(kind(), name, None)) is not None:
            said = part.get("model_type")
            known_kind = CONFIG_MAPPING[said] if isinstance(said, str) and said in CONFIG_MAPPING else type(own)
            _check_fields(part, known_kind, f"{place}: {name}")
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(name), dict):
            _check_rope(fields[name], f"{place}: {name}")


_ROPE_PARAMETERS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "truncate",
    "mrope_section", "mrope_interleaved",
}  # fmt: skip


def _check_rope(parameters: dict[str, Any], place: str) -> None:
    for name, value in parameters.items():
        if isinstance(value, dict):  # of one type of layers
            _check_rope(value, f"{place}: {name}")
        elif name not in _ROPE_PARAMETERS and value is not None:
            raise ConfigError(f"{place}: {name}={value!r} is no parameter of rotary positions; remove it")


def _check_causal(config: Any, kind: str, place: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    masked = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if masked and not getattr(config, "causal", False):
        raise ConfigError(f"{place}: model_type={kind} sees later tokens too; set is_decoder: true in it, if it has that")
    if kind in _NOT_CAUSAL or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{place}: model_type={kind} is no causal language model")
