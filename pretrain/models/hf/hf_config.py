"""`model.hf_config`: what describes a model of transformers'. The file is read once. Its contents, with every default spelled out,
take its place in the configuration. So a run and its checkpoints depend neither on the file nor on the defaults of a version.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, clipped, shown
from pretrain.models.families.declare.family import INERT
from pretrain.models.families.declare.rope import ROPE_FIELDS
from pretrain.models.shape import flat
from pretrain.storage import unrepeated

# Predicts tokens in any order, so its logits are not those of the next token; those that mask tokens are known by their class.
_NOT_CAUSAL = {"xlnet"}
# Their positions are counted from the row after the padding token's id, so the first rows of the table are never used.
_BEGIN_AFTER_PADDING = {
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")


LARGEST_CONFIG = 4 * 2**20
"""Bytes of a config.json. Real ones have some kilobytes, and some hundreds where they list what a quantisation leaves out."""


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
    found = {name: _size(config, name) for name in (*_SIZES, *_LONGEST)}
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if found[name] is None:
            raise ConfigError(
                f"model.hf_config: model_type={config.model_type} has no {name}; such a configuration is not supported"
            )
    dim, heads = found["hidden_size"], found["num_attention_heads"] or 1
    limit = next((found[name] for name in _LONGEST if found[name]), None)
    if limit and config.model_type in _BEGIN_AFTER_PADDING:
        limit = max(1, limit - 1 - (_size(config, "pad_token_id") or 0))
    longest = model.max_sequence_length or limit or sequence_length or 2048  # positions that nothing limits (Bloom)
    if limit and max(longest, sequence_length or 0) > limit:
        key = "model.max_sequence_length" if longest > limit else "data.sequence_length"
        raise ConfigError(
            f"{key}={max(longest, sequence_length or 0)}: the model of model.hf_config has {limit} positions; lower it"
        )
    sizes = {
        "dim": dim,
        "layers": found["num_hidden_layers"],
        "heads": heads,
        "kv_heads": found["num_key_value_heads"] or heads,
        "head_dim": found["head_dim"] or dim // heads,
        "vocab_size": found["vocab_size"],
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


def _size(config: Any, name: str) -> int | None:
    """A size that a configuration says, of all layers or, where these differ, of those it does not name one by one."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # Gemma 4's heads: one width in layers with a window and another in the others
        value = config.to_dict().get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def hf_window(model: Model) -> int:
    """The sliding window of a complete model of `family: hf`; 0 where its configuration names none."""
    config = config_of(model.hf_config).get_text_config()
    if getattr(config, "use_sliding_window", True) is False:
        return 0
    return max((_size(config, name) or 0 for name in ("sliding_window", "attention_window_size", "window_size")), default=0)


def config_of(text: str) -> Any:
    """The configuration object of transformers' for the contents that `read_config` gives."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = decoded(json.loads(text))
    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def decoded(value: Any) -> Any:
    """A value of config.json with the numbers that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and isinstance(value["__float__"], str) and value["__float__"] in _FLOATS:
            return _FLOATS[value["__float__"]]
        return {name: decoded(item) for name, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


def _encoded(value: Any) -> Any:
    """The inverse of `decoded`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {name: _encoded(item) for name, item in value.items()}
    return [_encoded(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_config(given: str) -> str:
    """The contents of a config.json, a directory's or given as they are, as one line of JSON in which no default is left open.

    What this function gave before is given again as it is: defaults that another version of transformers adds do not get in.
    Raises ConfigError for what transformers does not build as a causal language model by itself; no code of a model's
    repository is ever run.
    """
    fields, place = _read(given)
    _refuse_absurd(fields, place)  # as it is written: `decoded` makes infinities that are meant
    fields = decoded(fields)
    _refuse_out_of_range(fields, place)
    import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING or kind not in CLASSES:
        code = "; its auto_map names code in the model's repository, which is never run" if "auto_map" in fields else ""
        raise ConfigError(f"{place}: transformers builds no causal language model of model_type={shown(kind)}{code}")
    architectures = [CLASSES[kind]] if isinstance(CLASSES[kind], str) else list(CLASSES[kind])
    _refuse_other_architectures(fields, kind, CLASSES, place)
    try:
        _check_fields(fields, CONFIG_MAPPING[kind], place)
        config = CONFIG_MAPPING[kind].from_dict({name: value for name, value in fields.items() if name != "auto_map"})
        written = {name: value for name, value in config.to_dict().items() if name not in _DROPPED}
        text = json.dumps(_encoded(written | {"model_type": kind, "architectures": architectures}), sort_keys=True)
    except ConfigError:
        raise
    except Exception as error:  # whatever checks of a configuration's own raise, which is of many kinds
        raise ConfigError(f"{place}: {type(error).__name__}: {clipped(' '.join(str(error).split()), 300)}") from error
    _check_causal(config, kind, place)
    return given if _is_contents(given) and fields.get("architectures") == architectures else text


def _refuse_other_architectures(fields: dict[str, Any], kind: str, classes: dict[str, Any], place: str) -> None:
    """Raise ConfigError for architectures of another model_type only. What is of none (a head for another task) is no contradiction."""
    said = fields.get("architectures")
    for architecture in said if isinstance(said, list) else []:
        kinds = [name for name, known in classes.items() if architecture in ([known] if isinstance(known, str) else known)]
        if kinds and kind not in kinds:
            raise ConfigError(
                f"{place}: model_type={shown(kind)} contradicts architectures=[{shown(architecture)}], which is of "
                f"model_type={shown(kinds[0])}; correct the one that is wrong"
            )


def _is_contents(given: str) -> bool:
    return given.lstrip().startswith("{")


def _read(given: str) -> tuple[dict[str, Any], str]:
    """The JSON object, and what to call the place it is from."""
    place, text = "model.hf_config", given
    try:
        if not _is_contents(given):
            path = Path(given) / "config.json" if Path(given).is_dir() else Path(given)
            place = str(path)
            if path.stat().st_size > LARGEST_CONFIG:
                raise ConfigError(f"{place}: {path.stat().st_size:,} bytes; a config.json has {LARGEST_CONFIG:,} at most")
            text = path.read_text(encoding="utf-8")
        fields = json.loads(text, object_pairs_hook=unrepeated)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.hf_config={clipped(given, 300)}: cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"model.hf_config={clipped(given, 300)}: not a JSON object")
    return fields, place


_DROPPED = INERT - {"bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "pretraining_tp", "is_encoder_decoder"}


def _check_fields(fields: dict[str, Any], kind: Any, place: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = set(kind().to_dict()) | set(kind.attribute_map) | INERT | ROPE_FIELDS
    for name in sorted(set(fields) - known):
        if name == "quantization_config" or not _is_read(kind, name):
            raise ConfigError(
                f"{place}: {clipped(name)}={shown(fields[name])} is no field of {kind.__name__}; transformers would ignore it: "
                "remove it if it is to change nothing"
            )
    for name in kind.sub_configs:  # of text and vision, where one model has both
        part = fields.get(name)
        if isinstance(part, dict) and (own := getattr(kind(), name, None)) is not None:
            said = part.get("model_type")
            known_kind = CONFIG_MAPPING[said] if isinstance(said, str) and said in CONFIG_MAPPING else type(own)
            _check_fields(part, known_kind, f"{place}: {name}")
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(name), dict):
            _check_rope(fields[name], kind, f"{place}: {name}")


@functools.cache
def _source_of(kind: Any) -> str:
    """The code of a model of transformers', which is installed here."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(inspect.getfile(kind)).parent.glob("*.py")))


def _is_read(kind: Any, name: str) -> bool:
    """Whether code of the model asks for a field that its configuration does not declare: head_dim, most of all."""
    return re.search(rf"([\"']){re.escape(name)}\1|\bconfig\.{re.escape(name)}\b", _source_of(kind)) is not None


_ROPE_PARAMETERS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "truncate",
    "mrope_section", "mrope_interleaved",
}  # fmt: skip


_SAME_KINDS = [("su", "longrope"), ("mrope", "default")]  # transformers' own older names beside those it has now


def _check_rope(parameters: dict[str, Any], kind: Any, place: str) -> None:
    older, newer = parameters.get("type"), parameters.get("rope_type")
    if None not in (older, newer) and older != newer and (older, newer) not in _SAME_KINDS:
        raise ConfigError(f"{place}: type={shown(older)} contradicts rope_type={shown(newer)}")
    for name, value in parameters.items():
        if isinstance(value, dict):  # of one type of layers
            _check_rope(value, kind, f"{place}: {name}")
        elif name not in _ROPE_PARAMETERS and value is not None and not _is_read(kind, name):
            raise ConfigError(
                f"{place}: {clipped(name)}={shown(value)} is no parameter of rotary positions that {kind.__name__}'s model reads; "
                "transformers would ignore it: remove it if it is to change nothing"
            )


# The most that some numbers may be, by the ends of their names: code counts up to them, or makes lists and tables of their size. These limits are
# beyond any network, and what is made of them takes less than a second.
_MOST = {
    ("layers", "n_layer"): 10_000,
    ("blocks", "experts", "heads", "n_head"): 100_000,
    ("positions", "position_embeddings"): 2**24,
}


def _refuse_absurd(fields: Any, place: str, name: str = "") -> None:
    """Raise ConfigError naming a number that no network has, before transformers makes lists and tables of its size.

    JSON has no NaN and no infinity. Files of Mamba 2 say all the same that the limit of a time step is `Infinity`.
    """
    if isinstance(fields, dict):
        for key, value in fields.items():
            _refuse_absurd(value, place, str(key))
    elif isinstance(fields, list):
        for value in fields:
            _refuse_absurd(value, place, name)
    elif isinstance(fields, int):
        most = next((most for ends, most in _MOST.items() if name.endswith(ends)), 2**31)
        if abs(fields) > most:
            raise ConfigError(f"{place}: {clipped(name)}={shown(fields)} is beyond {most:,}, the most that is taken of it")
    elif isinstance(fields, float) and not math.isfinite(fields) and (fields != fields or not name.endswith("limit")):
        raise ConfigError(f"{place}: {clipped(name)}={fields} is not supported: expected a finite number")


# Ranges of numbers, by a pattern of their names: the lower limit, whether it is included, and the upper limit. They are those of the same keys of
# our families, unless transformers itself needs more.
_RANGES = {
    r"(.*_)?(eps|epsilon)": (0.0, True, 1.0),
    r"(.*_)?theta|rotary_emb_base|rope_local_base_freq": (0.0, False, 1e12),
    "|".join(("hidden_size", "num_hidden_layers", "vocab_size", *_LONGEST)): (1, True, 2**31),
}
_FACTOR = (0.0, False, 1e6)  # of rotary positions


def _refuse_out_of_range(fields: dict[str, Any], place: str, rotary: bool = False) -> None:
    """Raise ConfigError naming a number with which nothing can be computed, and of which transformers says nothing."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _refuse_out_of_range(value, place, rotary or name in ("rope_parameters", "rope_scaling"))
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        limits = next((limits for pattern, limits in _RANGES.items() if re.fullmatch(pattern, name)), None)
        limits = _FACTOR if rotary and name == "factor" else limits
        if limits is None:
            continue
        low, included, high = limits
        if not (value >= low if included else value > low) or not value <= high:
            raise ConfigError(
                f"{place}: {clipped(name)}={shown(value)} is not supported: expected a number {'of at least' if included else 'above'} "
                f"{low:g}, and of {high:g} at most"
            )


def _check_causal(config: Any, kind: str, place: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    masked = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if masked and not getattr(config, "causal", False):
        raise ConfigError(f"{place}: model_type={kind} sees later tokens too; set is_decoder: true in it, if it has that")
    if kind in _NOT_CAUSAL or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{place}: model_type={kind} is no causal language model")
