"""What programs other than transformers 5 make of an export: llama.cpp, vLLM and transformers 4 obey fewer switches than we have.

What a family says here was found by running them; docs/exports.md names the versions. A switch must have
the family's own value unless llama.cpp is said to obey it. So a new switch of the schema is refused until somebody has tried it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.models.families.declare.family import NOT_EXPORTED, Family
from pretrain.models.shape import flat, with_values

Allowed = Callable[[Any, Model], bool]
"""Whether llama.cpp computes a value of a switch, in this model."""

_SIZES = {
    "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "vocab_size", "max_sequence_length", "norm_eps", "rope.theta",
}  # fmt: skip


def anything(value: Any, model: Model) -> bool:
    """Allows every value."""
    return True


def one_of(*values: Any) -> Allowed:
    """Allows these values, and no other."""
    return lambda value, model: value in values


def switches(*names: str) -> dict[str, Allowed]:
    """Switches that are obeyed whatever their value."""
    return dict.fromkeys(names, anything)


def scalings(*kinds: str) -> dict[str, Allowed]:
    """Kinds of `rope.scaling` that are computed, with these parameters."""
    of = {"llama3": ("rope.low_frequency", "rope.high_frequency")}
    more = [name for kind in kinds for name in of.get(kind, ())]
    return {"rope.scaling": one_of("none", *kinds), **switches("rope.factor", "rope.original_length", *more)}


AS_LLAMA = {**switches("tie_embeddings", "attention.bias", "mlp.bias"), **scalings("linear", "llama3", "yarn")}
"""What llama.cpp's architecture `llama` can have. Several of our families become it. It has no sliding window."""
WINDOWS = switches("attention.window", "attention.window_pattern")
"""Where llama.cpp takes the layers with a window from the file, into which the conversion writes them."""


def whole_heads(width: int, model: Model) -> bool:
    """Heads that together are as wide as the model."""
    return width * model.heads == model.dim


def gemma_scores(layers: int) -> dict[str, Allowed]:
    """What Gemma's scores are divided by the root of, which llama.cpp tells by the number of layers: `layers` has the largest size."""

    def usual(scalar: float, model: Model) -> bool:
        return scalar == (model.dim // model.heads if model.layers == layers else model.head_dim)

    return {"attention.query_scalar": usual}


def llama_cpp_problem(family: Family, model: Model) -> str | None:
    """The switch that llama.cpp would compute otherwise, or None."""
    if family.llama_cpp is None:
        return f"whether llama.cpp computes model.family={family.name} as we do has not been tried"
    values = flat(model)
    if "attention.window" not in family.llama_cpp and model.attention.window >= model.max_sequence_length:
        # That is no window at all.
        values |= {"attention.window": 0, "attention.window_pattern": [True]}
    kept = {name: value for name, value in values.items() if name in _SIZES or name in family.llama_cpp}
    usual = flat(family.complete(with_values(Model(family=family.name), kept)))
    for name, value in values.items():
        if name in family.llama_cpp:
            if not family.llama_cpp[name](value, model):
                return f"model.{name}={value} is not what llama.cpp computes for model.family={family.name}"
        elif name not in NOT_EXPORTED | _SIZES and value != usual[name]:
            return f"model.{name}={value} is ignored by llama.cpp, which computes model.family={family.name} with {usual[name]}"
    return None


def reader_notes(family: Family, model: Model) -> list[str]:
    """What users of an export should know of programs that would compute another model from it, or refuse it."""
    notes = list(family.elsewhere(model)) if family.elsewhere else []
    if family.llama_cpp is not None and (problem := llama_cpp_problem(family, model)):
        notes.append(problem)
    return notes
