"""Rotary positions in config.json: transformers 5 writes `rope_parameters`, what came before it `rope_theta` and `rope_scaling`.

Exports carry both, because vLLM and llama.cpp's converter read the older fields; imports read either and refuse a contradiction.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, clipped, shown

# Not rotary_pct and rotary_emb_base, which transformers reads for GPT-NeoX alone: that family declares them.
ROPE_FIELDS = {"rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor",
               "original_max_position_embeddings"}  # fmt: skip

# Our key -> their field, of the parameters of each kind of scaling.
SCALING: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},  # from max_position_embeddings on
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_frequency": "low_freq_factor",
        "high_frequency": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}
# Of these, what transformers does without neither; an absent length is max_position_embeddings.
_NEEDED = {"none": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
           "llama3": ("factor", "low_frequency", "high_frequency")}  # fmt: skip
# Fields beside rope_parameters that say what it says too.
_BESIDE = {"rope_theta": "theta", "rotary_emb_base": "theta", "rope_local_base_freq": "local_theta", "partial_rotary_factor": "fraction",
           "rotary_pct": "fraction"}  # fmt: skip
_OFF_WHEN_ZERO = ("attention_factor", "mscale", "mscale_all_dim")


def name_in_hf(key: str) -> str:
    """Their name of a key `rope.*`, for messages."""
    names = {"theta": "rope_theta", "local_theta": "rope_local_base_freq", "fraction": "partial_rotary_factor"}
    name = key.removeprefix("rope.")
    return {ours: theirs for fields in [names, *SCALING.values()] for ours, theirs in fields.items()}.get(name, name)


def rope_to_hf(model: Model, kind: str, partial: bool, scaled: bool) -> dict[str, Any]:
    """The fields of config.json; `kind`: `uniform`; `optional`, the same or none; or `by_layer_type` where layers with a window have
    rotations of their own.

    `partial`: whether transformers rotates a share of a head. It is then written even when it is 1, since the field's absence may mean
    another share. `scaled`: whether absent fields mean a scaling. Then a model without one is written as scaled by 1: transformers 4 and
    vLLM's gpt-oss know no other way to say so.
    """
    rope = model.rope
    if kind == "optional" and model.positions == "none":
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": None}
    if scaled and rope.scaling == "none":
        rope = dataclasses.replace(rope, scaling="yarn", factor=1.0, original_length=model.max_sequence_length)
    if rope.scaling == "dynamic" and rope.original_length != model.max_sequence_length:
        raise ConfigError(
            f"model.rope.original_length={rope.original_length}: dynamic scaling of transformers begins at "
            f"model.max_sequence_length={model.max_sequence_length}; make them equal, or set model.family=custom"
        )
    scaling = {theirs: getattr(rope, ours) for ours, theirs in SCALING[rope.scaling].items()}
    scaling = {n: v for n, v in scaling.items() if not (n in _OFF_WHEN_ZERO and v == 0)}
    name = "default" if rope.scaling == "none" else rope.scaling
    parameters = {"rope_type": name, "rope_theta": rope.theta, **scaling}
    fields: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.scaling != "none":
        fields["rope_scaling"] = {"rope_type": name, **scaling}
    if partial:
        parameters["partial_rotary_factor"] = fields["partial_rotary_factor"] = rope.fraction
    if kind != "by_layer_type":
        if rope.local_theta != rope.theta:
            raise ConfigError(f"model.rope.local_theta={rope.local_theta}: model.family={model.family} has one base; remove it")
        if rope.scaling != "none" and not rope.scale_local:
            raise ConfigError(f"model.rope.scale_local=false: model.family={model.family} scales every layer; remove it")
        return {"rope_parameters": parameters, **fields}
    if rope.scaling == "yarn" and not rope.truncate:
        raise ConfigError(
            f"model.rope.truncate=false: transformers does not read it for model.family={model.family}; remove it"
        )
    local = parameters if rope.scale_local else {"rope_type": "default"}
    local = {**local, "rope_theta": rope.local_theta}
    fields["rope_local_base_freq"] = rope.local_theta
    return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}, **fields}


def rope_from_hf(
    config: dict[str, Any],
    kind: str,
    family: str,
    theta: float,
    local_theta: float | None = None,
    absent: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Our `rope.*` keys; `theta` and `local_theta` are the bases where the file names none, `absent` the scaling. With the kind `optional`
    also `positions`. Raises ConfigError for a kind of scaling or a parameter that is not known or is missing, and for contradictions.
    """
    parameters, scaling = ({} if value is None else value for value in map(config.get, ("rope_parameters", "rope_scaling")))
    if not parameters and not scaling and absent:
        scaling = absent
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise ConfigError(f"config.json: {name}={shown(value)} is not supported for {family}")
    if kind == "optional" and _is_unrotated(config, parameters, scaling):
        return {"positions": "none"}
    parameters, local = _groups(parameters, kind, family)
    written, config = config, {"rope_theta": config.get("rotary_emb_base", theta), **config}
    ours = _read(parameters, config, family)
    older = _read(scaling, config, family) if scaling else ours
    if scaling and parameters and older != ours:
        _check_beside(written, ours, {"rope_parameters": set(parameters)})  # a field beside both has a message of its own
        _refuse_groups(scaling, parameters, [name for name in {**ours, **older} if ours.get(name) != older.get(name)])
    ours = older if scaling else ours
    ours = _unscaled(ours) if absent else ours
    if kind == "by_layer_type":
        _check_by_layer_type((parameters, scaling, local), ours, family, theta if local_theta is None else None)
        # Where the older files of a family name one base, transformers reads no other beside rope_parameters.
        local_base = None if local_theta is None else config.get("rope_local_base_freq", local_theta)
        ours |= _local(local, ours, {**config, "rope_local_base_freq": local_base}, family)
    groups = {"rope_parameters": {*parameters, *(["rope_local_base_freq"] if local else [])}, "rope_scaling": set(scaling)}
    _check_beside(written, ours, groups)
    return {f"rope.{name}": value for name, value in ours.items()} | ({"positions": "rope"} if kind == "optional" else {})


def _groups(parameters: dict[str, Any], kind: str, family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """rope_parameters of layers without a window, and of layers with one; the latter are empty where the file does not tell them apart."""
    local: dict[str, Any] = {}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        if kind != "by_layer_type":
            raise ConfigError(f"config.json: rope_parameters={shown(parameters)} is not supported for {family}")
        given = parameters
        local, parameters = given.get("sliding_attention") or {}, given.get("full_attention") or {}
        if not isinstance(local, dict) or not isinstance(parameters, dict) or not parameters or len(given) > 2:
            raise ConfigError(f"config.json: rope_parameters={shown(given)} is not supported for {family}")
    elif kind == "by_layer_type" and parameters:
        raise ConfigError(
            f"config.json: rope_parameters={shown(parameters)} is not supported for {family}, which has them by layer type"
        )
    return parameters, local


def refuse_null_share(config: dict[str, Any], family: str) -> None:
    """Raise ConfigError for a share of rotated components that is null: transformers takes it for all of them, or for none that it can use."""
    for group in (config, config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(group, dict) and group.get("partial_rotary_factor", 1) is None:
            raise ConfigError(
                f"config.json: partial_rotary_factor is null, which is no share of a head for {family}; remove it"
            )


def _is_unrotated(config: dict[str, Any], parameters: dict[str, Any], scaling: dict[str, Any]) -> bool:
    """Whether the base of all rotations is null: nothing is rotated. Raises ConfigError for parameters beside it, which would say nothing."""
    group = scaling or parameters
    said = group if "rope_theta" in group else config
    if said.get("rope_theta", 0) is not None:
        return False
    rest = {name: value for name, value in {**parameters, **scaling}.items() if name != "rope_theta"}
    if beside := [name for name, value in rest.items() if name not in ("rope_type", "type") or value != "default"]:
        raise ConfigError(
            f"config.json: {clipped(beside[0])}={shown(rest[beside[0]])} says nothing with rope_theta=null; remove it"
        )
    return True


def _refuse_groups(scaling: dict[str, Any], parameters: dict[str, Any], lost: list[str]) -> NoReturn:
    """Raise ConfigError for rope_scaling and rope_parameters that say different things of the keys `lost`."""
    if any(name not in ("theta", "fraction") or name_in_hf(name) in scaling for name in lost):
        raise ConfigError(f"config.json: rope_scaling={shown(scaling)} contradicts rope_parameters={shown(parameters)}")
    name = name_in_hf(lost[0])
    raise ConfigError(
        f"config.json: {name}={shown(parameters.get(name))} of rope_parameters is not read by transformers beside rope_scaling; "
        f"write {name} beside both as well"
    )


def _check_by_layer_type(
    groups: tuple[dict[str, Any], dict[str, Any], dict[str, Any]], ours: dict[str, Any], family: str, only: float | None
) -> None:
    """Raise ConfigError for what transformers 5 reads otherwise than it says where layers with a window have a rotation of their own.

    `groups`: rope_parameters, rope_scaling and the parameters of layers with a window. `only`: the base of all layers in a family whose
    older files name one; transformers 5 takes this number for layers with a window, whatever the file says of the others.
    """
    for group in groups:
        if "type" in group and "rope_type" not in group:
            raise ConfigError(
                f"config.json: type={shown(group['type'])} is not read by transformers 5 for {family}; write rope_type"
            )
    if ours.get("truncate") is False:
        raise ConfigError(f"config.json: truncate=false is not read by transformers for {family}; remove it")
    if only is not None and ours["theta"] != only and "rope_theta" not in groups[2]:
        raise ConfigError(
            f"config.json: rope_theta={ours['theta']:g} is for layers without a window in transformers 5, and for all layers in 4; "
            "write rope_parameters with the rope_theta of both kinds"
        )


def _check_beside(config: dict[str, Any], ours: dict[str, Any], groups: dict[str, set[str]]) -> None:
    """Raise ConfigError for a field that says something else than `ours`, naming the group or the field that `ours` was read from.

    `groups`: the names of what each group of the file says.
    """
    for field, name in _BESIDE.items():
        value = config.get(field)
        if value is None or name not in ours or _number(field, value) == ours[name]:
            continue
        inside = [f"that of {group}" for group, said in groups.items() if name_in_hf(name) in said]
        beside = [other for other, same in _BESIDE.items() if same == name and other != field and config.get(other) is not None]
        other = [*inside, *beside, "what transformers takes, which does not read it here"][0]
        raise ConfigError(f"config.json: {field}={shown(value)} contradicts {other}, {ours[name]}")


def _unscaled(ours: dict[str, Any]) -> dict[str, Any]:
    """`ours`, without a scaling by 1, which `rope_to_hf` writes for unscaled positions."""
    by_one = ours["scaling"] == "yarn" and ours["factor"] == 1 and not any(ours.get(name) for name in _OFF_WHEN_ZERO)
    kept = {name: ours[name] for name in ("theta", "fraction") if name in ours}
    return {"scaling": "none", **kept} if by_one else ours


def _local(local: dict[str, Any], ours: dict[str, Any], config: dict[str, Any], family: str) -> dict[str, Any]:
    theta = local.get("rope_theta", config.get("rope_local_base_freq"))
    theta = ours["theta"] if theta is None else _number("rope_local_base_freq or rope_theta", theta)
    if not local:
        return {"local_theta": theta, "scale_local": False}
    read = _read({**local, "rope_theta": ours["theta"]}, config, family)
    scaled = read["scaling"] != "none"
    if scaled and {**read, "theta": ours["theta"]} != ours:
        raise ConfigError(f"config.json: rope_parameters scales layers with a window otherwise than the others: {shown(local)}")
    return {"local_theta": theta, "scale_local": scaled}


def _read(parameters: dict[str, Any], config: dict[str, Any], family: str) -> dict[str, Any]:
    """Our keys of one group of rotary parameters."""
    rest = dict(parameters)
    older = rest.pop("type", None)
    kind = rest.pop("rope_type", "default" if older is None else older)
    if older not in (None, kind):  # a file written for two versions of transformers has both
        raise ConfigError(
            f"config.json: rope_scaling or rope_parameters: type={shown(older)} contradicts rope_type={shown(kind)}"
        )
    kind = "none" if kind == "default" else kind
    if not isinstance(kind, str) or kind not in SCALING:
        raise ConfigError(
            f"config.json: rope_scaling or rope_parameters={shown(parameters)} is not supported for {family}; only "
            f"{', '.join(['default', *list(SCALING)[1:]])} are"
        )
    theta = rest.pop("rope_theta", config["rope_theta"])
    fraction = rest.pop("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    ours: dict[str, Any] = {"scaling": kind, "theta": _number("rope_theta", theta)}
    if fraction is not None:  # else it is what the family has
        ours["fraction"] = _number("partial_rotary_factor", fraction)
    for name, field in SCALING[kind].items():
        outer = config.get("original_max_position_embeddings") if name == "original_length" else None
        value = rest.pop(field, outer)
        if outer is not None and value != outer:
            raise ConfigError(f"config.json: {field}={shown(outer)} contradicts that of the rotary parameters, {shown(value)}")
        if value is None and name in _NEEDED[kind]:
            raise ConfigError(f"config.json: rope_scaling or rope_parameters: {field} is missing, which {kind} needs")
        if value is not None:
            ours[name] = _of_scaling(name, field, value)
    if kind == "yarn" and "factor" in ours and rest.get("finetuned") is not None:
        rest.pop("finetuned")  # a remark about how the model was made
    rest.pop("original_max_position_embeddings", None) if kind in ("none", "linear", "dynamic") else None
    if rest:
        name = sorted(rest)[0]
        raise ConfigError(
            f"config.json: rope_scaling or rope_parameters: {clipped(name)}={shown(rest[name])} is not supported for {family} with {kind}"
        )
    return ours


def _of_scaling(name: str, field: str, value: Any) -> Any:
    """The value of one of our keys in SCALING."""
    if name in ("original_length", "truncate"):
        return value
    number = _number(field, value)
    if name == "attention_factor" and number == 0:  # to our key, 0 means something else
        raise ConfigError(
            "config.json: rope_scaling or rope_parameters: attention_factor=0 makes every rotated query and key 0 in transformers; "
            "remove it to derive it from factor"
        )
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e300:
        raise ConfigError(f"config.json: {name}={shown(value)} is not supported: expected a number")
    return float(value)
