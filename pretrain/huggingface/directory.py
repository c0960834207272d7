"""A Hugging Face model directory: what it has to hold for a model, and one that is there.

WeightPlan     the weight map of one model with the shapes of both sides, known before there is any weight
HfDirectory    configuration, index, names, shapes and number formats, checked before any weight is read
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint import files
from pretrain.config.model_schema import Model
from pretrain.errors import CheckpointError, ConfigError, clipped
from pretrain.huggingface.safetensors_file import DTYPES, INDEX, INTEGERS, WEIGHTS, Place, SafetensorsFile
from pretrain.models import build_network
from pretrain.models.families import family_of, family_of_hf
from pretrain.models.families.declare.family import INERT, Family, layers_with_experts
from pretrain.models.families.declare.weights import JOINED_BY_READERS, TRAINING_ONLY, Entry, Shape
from pretrain.models.hf.hf_config import LARGEST_CONFIG
from pretrain.models.layer_specs import cycled, has_windows
from pretrain.models.positions import rotated_width
from pretrain.models.shape import flat

log = logging.getLogger(__name__)

_LARGEST_INDEX = 32 * 2**20  # bytes; that of DeepSeek-V3, with 90,000 tensors, has 9 million


# ---- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightPlan:
    """`entries` in the order of conversion, `ours` and `theirs` the shapes of all tensors by name, but for those of TRAINING_ONLY.

    `kept`: number formats, by our names, of the tensors that get no gradient: the corrections that balance experts, which small steps
    move, and tables of integers. These tensors keep their format, whatever the format of the weights is.
    """

    model: Model
    family: Family
    entries: list[Entry]
    ours: dict[str, Shape]
    theirs: dict[str, Shape]
    kept: dict[str, torch.dtype]

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.ours.values())

    def name_of(self, stored: str) -> str:
        """The name in `theirs` of a tensor that a file may hold under this one."""
        return self.family.other_name(stored, self.model) if self.family.other_name else stored

    def misfit(self, found: Mapping[str, Shape]) -> tuple[str, str, str] | None:
        """A tensor of another shape than it has in `theirs`, if there is one: its name, and both shapes. What readers join may be cut elsewhere."""
        for line in self.entries:
            names = list(line.theirs)
            are, should = [found[name] for name in names], [self.theirs[name] for name in names]
            if line.layout is JOINED_BY_READERS:
                names, are, should = [" with ".join(names)], [_joined(are)], [_joined(should)]
            for name, own, other in zip(names, are, should):
                if own != other:
                    return name, str(list(own)), str(list(other))
        return None


def plan_weights(model: Model) -> WeightPlan:
    """Resolve the family's weight map against the network itself, and lay out every entry without values, in both directions.

    Raises CheckpointError naming a parameter that the map leaves out or whose layouts do not fit each other.
    """
    family = family_of(model.family)
    with torch.device("meta"):
        named = dict(build_network(model).named_parameters())
    ours = {name: tuple(p.shape) for name, p in named.items() if not name.startswith(TRAINING_ONLY)}
    kept = {name: named[name].dtype for name in ours if not named[name].requires_grad}
    try:
        entries = family.entries(model, list(ours))
    except ValueError as error:
        raise CheckpointError(f"model.family={family.name} cannot be exported: {error}") from error
    theirs: dict[str, Shape] = {}
    for line in entries:
        shapes = [ours[name] for name in line.ours]
        laid_out = line.layout.to_theirs(
            [torch.empty(ours[name], dtype=kept.get(name), device="meta") for name in line.ours], model
        )
        back = [tuple(t.shape) for t in line.layout.to_ours(laid_out, shapes, model)]
        if len(laid_out) != len(line.theirs) or back != shapes or any(name in theirs for name in line.theirs):
            raise CheckpointError(
                f"model.family={family.name} cannot be exported: {line.ours[0]} {list(shapes[0])} does not come back from "
                f"{line.theirs[0]} {[list(t.shape) for t in laid_out][:1]}"
            )
        theirs |= {name: tuple(t.shape) for name, t in zip(line.theirs, laid_out)}
    return WeightPlan(model, family, entries, ours, theirs, kept)


def _joined(shapes: list[Shape]) -> Shape:
    """The shape of these tensors one after the other along their first dimension; () where they cannot be joined."""
    rests = {shape[1:] for shape in shapes}
    return () if () in shapes or len(rests) > 1 else (sum(shape[0] for shape in shapes), *rests.pop())


def least_numbers(model: Model) -> int:
    """Weights that a model has at least, from its sizes alone: its table, and of each layer one projection, or its experts."""
    experts = model.experts.count or 0
    dense = (model.layers + (model.encoder.layers or 0)) * model.dim * max(1, model.heads)
    routed = layers_with_experts(model) * experts * model.dim * (model.experts.ffn_dim or 0)
    return model.vocab_size * model.dim + dense + routed


def check_sizes(model: Model, tensors: int, numbers: int, place: Path) -> None:
    """Raise CheckpointError where so many tensors, of so many numbers, cannot be the weights of the model that `place` describes."""
    layers, needed = model.layers + (model.encoder.layers or 0), least_numbers(model)
    if layers > max(64, tensors):
        raise CheckpointError(f"{place} says {layers} layers, and the weights are {tensors} tensors; it is not theirs")
    if needed > 2 * numbers + 10**6:
        raise CheckpointError(
            f"{place} describes at least {needed:,} weights, and the files hold {numbers:,}; it is not theirs"
        )


def refuse_odd_numbers(place: object, name: str, tensor: Tensor, kept: bool = False) -> None:
    """Raise CheckpointError naming a tensor that holds NaN or infinity: training, sampling and export would carry it on. `kept`: it
    gets no gradient, and may hold infinities (a mask, say).
    """
    if not tensor.is_floating_point() or torch.isfinite(tensor).all() or (kept and not tensor.isnan().any()):
        return
    what = "NaN" if tensor.isnan().any() else "infinite numbers"
    count = int((~torch.isfinite(tensor)).sum())
    raise CheckpointError(
        f"{place}: {name} holds {what} ({count:,} of {tensor.numel():,}); these are no weights of a working model"
    )


def check_round_trip(model: Model, config: dict[str, Any]) -> None:
    """Raise ConfigError if something is lost between the model and this config.json of it, in either direction. The message names the field or
    the key that is lost.
    """
    family, config = family_of(model.family), json.loads(json.dumps(config))
    again = json.loads(json.dumps(family.to_hf(family.from_hf(config))))
    for name, value in again.items():
        # Special tokens are the tokenizer's, not the model's.
        if config.get(name) != value and name not in INERT:
            raise ConfigError(f"config.json: {name}={config.get(name)!r} comes back as {value!r} for {family.name}")
    if not family.fields:  # model.family=hf, whose only key is a config.json
        return
    # What is lost on the way out is in neither config.json.
    read = family.from_hf(json.loads(json.dumps(family.to_hf(model))))
    ours, theirs = _effective(model), _effective(read)
    for item in family.fields:  # switches without a field were compared with what the family computes
        value, other = ours[item.ours], theirs[item.ours]
        if value != other and not (
            isinstance(value, float) and math.isclose(value, other, rel_tol=1e-12)
        ):  # inverses are rounded
            raise ConfigError(
                f"model.{item.ours}={flat(model)[item.ours]} comes back as {flat(read)[item.ours]} from {item.theirs} of config.json, so "
                f"{family.name} of transformers cannot say it; change it, or set model.family=custom (which has no export)"
            )


def _effective(model: Model) -> dict[str, Any]:
    """The keys of a complete model. Those that have several spellings of one meaning are said in one way."""
    windows = has_windows(model)
    return flat(model) | {
        "attention.bias": sorted(model.attention.bias),
        "attention.window": model.attention.window if any(windows) else 0,
        "attention.window_pattern": windows,
        "rope.pattern": cycled(model.rope.pattern, model.layers),
        "linear_attention.pattern": cycled(model.linear_attention.pattern, model.layers),
        "rope.fraction": rotated_width(model),
    }


# ---- the directory ----------------------------------------------------------------------------------------------------


class HfDirectory:
    """The model that a directory holds; `read` gives the tensors of one entry of its weight map, by our names, in fp32. `family`: which
    family is to read it, by default the one that knows the architecture.

    Raises CheckpointError or ConfigError for an architecture, field, tensor, shape or number format that is missing, surplus or
    unknown, and for files that are damaged.
    """

    def __init__(self, directory: Path, family: str | None = None) -> None:
        self.directory = directory
        self.config = read_config(directory)
        reader = family_of(family) if family else family_of_hf(self.config)
        self.model: Model = reader.from_hf(self.config)
        self.files = _placed(directory)
        if reader.own_head and reader.own_head(self.model, self.files.keys()):
            self.model = dataclasses.replace(self.model, tie_embeddings=False)
        self._check_sizes()
        self.plan = plan_weights(self.model)
        self._rename()
        self._drop_copies()
        self._check_names()
        self._check_tensors()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.nbytes_of(line) for line in self.plan.entries)

    def nbytes_of(self, line: Entry) -> int:
        """Bytes of the tensors of an entry."""
        places = [self._place(name) for name in line.theirs]
        return sum(place.end - place.start for place in places)

    def read(self, line: Entry) -> dict[str, Tensor]:
        """The tensors of an entry by our names: fp32, or integers. Raises CheckpointError for NaN and infinity."""
        theirs = [self._number(line, name) for name in line.theirs]
        return dict(zip(line.ours, line.layout.to_ours(theirs, [self.plan.ours[name] for name in line.ours], self.model)))

    def _number(self, line: Entry, name: str) -> Tensor:
        tensor, kept = self._tensor(name), line.ours[0] in self.plan.kept
        refuse_odd_numbers(self.files[name].path, name, tensor, kept)
        return tensor.to(self.plan.kept.get(line.ours[0], torch.float32))

    def read_all(self, cast: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
        """All tensors by our names; `cast` takes each before the next entry is read."""
        cast = cast or (lambda tensor: tensor)
        return {name: cast(tensor) for line in self.plan.entries for name, tensor in self.read(line).items()}

    def _check_sizes(self) -> None:
        """Before a network of these sizes is built, on the meta device: that takes time and memory for every layer and every name."""
        found = sum(math.prod(file.places[name].shape) for name, file in self.files.items())
        check_sizes(self.model, len(self.files), found, self.directory / "config.json")

    def _rename(self) -> None:
        """Gives tensors the names of the weight map: files of base models and older ones lack a prefix. Leaves out those without a place."""
        family, known = self.plan.family, self.plan.theirs.keys()
        self.stored: dict[str, str] = {}
        for stored, name in self._names(known | family.copies_of(self.model).keys()).items():
            if name in self.stored:
                raise CheckpointError(
                    f"{self.directory}: {clipped(self.stored[name])} and {clipped(stored)} are two tensors for one place, {clipped(name)}"
                )
            self.stored[name] = stored
        left = sorted(name for name in self.stored.keys() - known if family.dropped and family.dropped(name, self.model))
        if left:
            log.warning("%s: left out, as transformers does: %s (%d tensors)", self.directory, left[0], len(left))
        self.files = {name: self.files[stored] for name, stored in self.stored.items() if name not in left}

    def _names(self, without_prefix: Set[str]) -> dict[str, str]:
        """By name in the files, the name in the weight map. `without_prefix`: names that need none."""
        family, names = self.plan.family, dict(zip(self.files, self.files))
        if family.nested:
            for name in names:
                if name.startswith(family.nested):
                    names[name] = f"{family.prefix}{name.removeprefix(family.nested)}"
        if family.prefix and not any(name.startswith(family.prefix) for name in names.values()):
            names = {stored: name if name in without_prefix else f"{family.prefix}{name}" for stored, name in names.items()}
        return {stored: self.plan.name_of(name) for stored, name in names.items()}

    def _place(self, name: str) -> Place:
        """Where the file of a tensor has it."""
        return self.files[name].places[self.stored[name]]

    def _tensor(self, name: str) -> Tensor:
        return self.files[name].read(self.stored[name])

    def _drop_copies(self) -> None:
        """An embedding may be written several times, as a tied head above all. Where they differ, there is no telling which is meant."""
        for copy, kept in self.plan.family.copies_of(self.model).items():
            if copy not in self.files or kept not in self.files:
                continue
            self._check_format(copy)
            self._check_format(kept)
            if not torch.equal(self._tensor(copy), self._tensor(kept)):
                raise CheckpointError(
                    f"{self.files[copy].path}: {copy} differs from {kept}, and config.json says that they are tied; "
                    "set tie_word_embeddings to false if both are meant"
                )
            del self.files[copy]

    def _check_names(self) -> None:
        missing, surplus = (
            sorted(self.plan.theirs.keys() - self.files.keys()),
            sorted(self.files.keys() - self.plan.theirs.keys()),
        )
        if missing or surplus:
            which = f"{missing[0]} is missing" if missing else f"{clipped(surplus[0])} has no place in {self.plan.family.name}"
            found = f"{which} ({len(missing)} missing, {len(surplus)} surplus tensors)"
            raise CheckpointError(f"{self.directory}: {self._without_head(missing, surplus) or found}")

    def _without_head(self, missing: list[str], surplus: list[str]) -> str | None:
        """What to say of files of transformers' base model where its head is not tied, or where no family says which word it leaves out."""
        prefix, kind = self.plan.family.prefix, self.plan.family.architecture or "AutoModelForCausalLM"
        if surplus and set(surplus) <= {name.partition(".")[2] for name in missing}:
            return f"holds the base model: {surplus[0]} and all other names lack a word; save the whole model, from {kind}"
        if surplus or not prefix or any(name.startswith(prefix) for name in missing):
            return None
        can_tie = any(item.ours == "tie_embeddings" for item in self.plan.family.fields)
        advice = ", or set tie_word_embeddings to true if the embedding is its head" if can_tie else ""
        return (
            f"holds the base model without a head: {missing[0]} is missing, and config.json does not tie it to the embedding; save the model "
            f"with its head, from {kind}{advice}"
        )

    def _check_tensors(self) -> None:
        integers = {name: dtype for line in self.plan.entries if (dtype := self._integer_format(line)) for name in line.theirs}
        for name in self.plan.theirs:
            self._check_format(name, integers.get(name))
        if misfit := self.plan.misfit({name: self._place(name).shape for name in self.plan.theirs}):
            name, found, said = misfit
            raise CheckpointError(f"{self.directory}: {name} has shape {found}, config.json says {said}")

    def _integer_format(self, line: Entry) -> torch.dtype | None:
        """The number format of an entry that is no weight, but a table of integers."""
        dtype = self.plan.kept.get(line.ours[0])
        return dtype if dtype in INTEGERS else None

    def _check_format(self, name: str, integers: torch.dtype | None = None) -> None:
        code = self._place(name).code
        legal = list(DTYPES) if integers is None else [INTEGERS[integers]]
        if code not in legal:
            raise CheckpointError(
                f"{self.files[name].path}: {name} is {code}; only {', '.join(legal)} {'are' if len(legal) > 1 else 'is'} read: weights in "
                "other formats are quantised, or would lose digits in fp32"
            )


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory."""
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: no config.json; not a Hugging Face model directory")
    config = files.read_json(directory / "config.json", LARGEST_CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError(f"{directory / 'config.json'}: not a JSON object")
    return config


def _placed(directory: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> its file, of all tensors in the directory's weights. Nothing but headers is read."""
    index = _read_index(directory)
    opened = {name: SafetensorsFile(directory / name) for name in sorted(set(index.values()) or {WEIGHTS})}
    placed: dict[str, SafetensorsFile] = {}
    for file in opened.values():
        for name in file.places:
            if name in placed:
                raise CheckpointError(f"{file.path}: {name} is in {placed[name].path.name} as well")
            placed[name] = file
    for name in sorted(index.keys() | placed.keys() if index else ()):
        if name not in placed or index.get(name) != placed[name].path.name:
            said, found = index.get(name, "no file"), placed[name].path.name if name in placed else "none of them"
            raise CheckpointError(f"{directory / INDEX}: {name} is said to be in {said} and is in {found}")
    return placed


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name -> file name; empty where there is one file without index."""
    path = directory / INDEX
    if not path.is_file():
        return {}
    index = files.read_json(path, _LARGEST_INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{path}: has no weight_map of tensor names to file names")
    for name, file in places.items():
        if Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{path}: {name} is said to be in {clipped(repr(file), 300)}, which is no file of this directory"
            )
    if (directory / WEIGHTS).is_file() and WEIGHTS not in places.values():
        raise CheckpointError(f"{directory}: has both {WEIGHTS} and an index of other files; remove the one that is not meant")
    return places
