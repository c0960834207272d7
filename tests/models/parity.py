"""Our network and transformers' of one configuration with the same weights, for the tests of every family."""

from __future__ import annotations

import functools
import importlib

import torch
from family_cases import FAMILIES

from pretrain.config.model_schema import Model
from pretrain.models import build_network
from pretrain.models.families import complete, family_of
from pretrain.models.families.declare.weights import resolve
from pretrain.models.shape import with_values

LONGEST = 64


@functools.cache
def cases(family: str) -> dict[str, Model]:
    """The complete models of a family's case file, by name."""
    module = importlib.import_module(f"family_cases.{family}")
    models = {name: with_values(model, {"family": family}) for name, model in module.CASES.items()}
    return {name: complete(model, model.max_sequence_length or LONGEST) for name, model in models.items()}


ALL = [(family, name) for family in FAMILIES for name in cases(family)]


def translate(family: str, model: Model, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their tensors (as in a checkpoint on disk) by our names and layout. Every one of theirs must be used, tied heads apart."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in build_network(model).named_parameters()}
    ours, used = {}, set()
    for line in resolve(family_of(family).weights, model, list(shapes)):
        tensors = line.layout.to_ours([theirs[name] for name in line.theirs], [shapes[name] for name in line.ours], model)
        ours |= dict(zip(line.ours, tensors, strict=True))
        used |= set(line.theirs)
    unused = set(theirs) - used - ({"lm_head.weight", "embed_out.weight"} if model.tie_embeddings else set())
    assert not unused, f"tensors of transformers that our map does not name: {sorted(unused)[:3]}"
    return {name: tensor.clone() for name, tensor in ours.items()}


def on_disk(family: str, model: Model, theirs, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a transformers model as published files hold them. In memory, experts for instance have other names."""
    from transformers.core_model_loading import revert_weight_conversion

    return as_published(family, model, revert_weight_conversion(theirs, dict(state)))


def as_published(family: str, model: Model, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that transformers has saved, as published files hold them: for few families, it is not the same."""
    name_in_map = family_of(family).other_name or (lambda name, model: name)
    tensors = {name_in_map(name, model): tensor for name, tensor in saved.items()}
    of_family = getattr(importlib.import_module(f"family_cases.{family}"), "as_published", None)
    return of_family(tensors, model) if of_family else tensors


@functools.cache
def pair(family: str, name: str):
    """Our network and transformers' model with the same weights, drawn wide enough that every part matters."""
    import transformers

    model, entry = cases(family)[name], family_of(family)
    fields = {k: v for k, v in entry.to_hf(model).items() if k != "architectures"}
    config = transformers.AutoConfig.for_model(**fields, attn_implementation="eager")
    theirs = getattr(transformers, entry.architecture)(config).eval()
    generator = torch.Generator().manual_seed(3)
    gain = 0.0 if model.norm.kind == "rms_offset" else 1.0  # vectors are drawn so that norms have gains around one
    for parameter in theirs.parameters():
        spread, centre = (0.2, gain) if parameter.dim() == 1 else (0.15, 0.0)
        parameter.data = centre + spread * torch.randn(parameter.shape, generator=generator)
    kept = theirs.state_dict()
    for buffer in (b for n, b in theirs.named_buffers() if n in kept):  # the balancing biases of DeepSeek's routers
        buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    ours = build_network(model)
    ours.load_state_dict(translate(family, model, on_disk(family, model, theirs, theirs.state_dict())), strict=True)
    return ours, theirs


def tokens(model: Model, sequences: int, length: int) -> torch.Tensor:
    return torch.randint(model.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(length))
