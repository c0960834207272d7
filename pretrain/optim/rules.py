"""Which optimizer updates a parameter, at which rate, and with which weight decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn

from pretrain.config.optim_schema import Optim, ParameterGroup
from pretrain.distributed.shards import local
from pretrain.errors import ConfigError
from pretrain.models.experts import Experts
from pretrain.models.layers import Embedding, Linear
from pretrain.models.width import kind_of, update_scale

T = TypeVar("T")
NAMES_SHOWN = 6
MOMENTS: dict[str, Callable[[torch.Size], int]] = {
    "adamw": lambda shape: 2 * shape.numel(),
    "lion": torch.Size.numel,
    "muon": torch.Size.numel,
    "schedule_free_adamw": lambda shape: 2 * shape.numel(),
    "adafactor": lambda shape: shape.numel() if len(shape) < 2 else shape.numel() // shape[-1] + shape.numel() // shape[-2],
}
"""Numbers that an optimizer keeps beside a parameter of a shape."""


@dataclass(frozen=True)
class Rule:
    """How a parameter is updated."""

    optimizer: str
    rate_scale: float
    """The factor from the schedule's learning rate to this rule's."""
    weight_decay: float
    """Decay per unit of this rule's own rate: the configured decay divided by muP's factor of the rate."""
    fused_rows: tuple[int, ...] = ()
    """For Muon: the rows of each projection that a matrix fuses (`Linear.fused_rows`)."""


def registered(table: dict[str, Callable[..., T]], name: str, where: str) -> Callable[..., T]:
    """What a table says of an optimizer. Raises ConfigError for one that was added to `optim.name` alone."""
    if name not in table:
        raise ConfigError(f"optim.name={name} has no line in {where}; AGENTS.md says what an optimizer takes")
    return table[name]


def decayed(model: nn.Module) -> dict[str, bool]:
    """Whether weight decay applies, by name of a trained parameter. It applies to matrices, not to embeddings or vectors (norms, biases)."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, (Embedding, nn.Embedding))}
    return {
        # The biases of all experts together are a matrix.
        name: p.dim() > 1 and id(p) not in tables and not name.endswith("bias")
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def orthogonalized(model: nn.Module) -> set[str]:
    """The names of what Muon updates: the matrices between the embedding and the output head, and those of every expert."""
    outer = [module for unit in getattr(model, "units", list)() if unit.role != "block" for module in unit.modules]
    apart = {id(p) for module in outer for p in module.parameters()}
    stacked = {id(p) for module in model.modules() if isinstance(module, Experts) for p in module.parameters(recurse=False)}
    parameters = dict(model.named_parameters())
    return {
        name
        for name, decays in decayed(model).items()
        if decays
        and id(parameters[name]) not in apart
        and parameters[name].dim() == (3 if id(parameters[name]) in stacked else 2)
    }


def _members(names: Iterable[str], config: Optim) -> list[list[str]]:
    """The names that each of `optim.groups` holds for: those that it matches and no earlier one does."""
    left, members = list(names), []
    for group in config.groups:
        members.append([name for name in left if fnmatchcase(name, group.pattern)])
        left = [name for name in left if not fnmatchcase(name, group.pattern)]
    return members


def rules(model: nn.Module, config: Optim) -> dict[str, Rule]:
    """The rule of each parameter that is trained, by name. Of `optim.groups`, the first whose pattern matches a name holds for it."""
    matrices = orthogonalized(model) if config.name == "muon" else set()
    share = 1.0 if config.base_width is None else config.base_width / model.config.dim
    parameters = dict(model.named_parameters())
    fused = {id(module.weight): module.fused_rows for module in model.modules() if isinstance(module, Linear)}
    trained, found = decayed(model), {}
    group_of = {name: group for group, own in zip(config.groups, _members(trained, config)) for name in own}
    for name, decays in trained.items():
        group = group_of.get(name)
        optimizer = "adamw" if config.name == "muon" and name not in matrices else config.name
        if group is not None and group.optimizer is not None:
            optimizer = group.optimizer
        decay = config.weight_decay if decays else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        own = update_scale(kind_of(name, parameters[name].dim()), optimizer, share)
        rows = fused.get(id(parameters[name]), ()) if group is None or not group.fused_rows else tuple(group.fused_rows)
        rows = rows if optimizer == "muon" else ()
        found[name] = Rule(optimizer, own * (1.0 if group is None else group.lr_scale), decay / own, rows)
    return found


def model_is_mean(config: Optim) -> bool:
    """Whether the model is not what is trained but the mean that the optimizer keeps of it. Evaluations and checkpoints are of the model."""
    return config.name == "schedule_free_adamw"


def count_moments(model: nn.Module, config: Optim) -> int:
    """Numbers that the optimizers keep beside the parameters that are trained; of sharded ones, beside this rank's part."""
    found, means = rules(model, config), config.ema_decay is not None
    return sum(
        registered(MOMENTS, found[name].optimizer, "MOMENTS of pretrain/optim/rules.py")(p.shape) + means * p.numel()
        for name, p in ((name, local(whole)) for name, whole in model.named_parameters())
        if name in found
    )


def describe(model: nn.Module, config: Optim) -> list[str]:
    """Lines on who updates what; none where AdamW updates everything at one rate."""
    found, parameters = rules(model, config), dict(model.named_parameters())

    def sized(names: list[str]) -> str:
        numbers = sum(parameters[name].numel() for name in names)
        return f"{len(names)} tensor{'s' if len(names) > 1 else ''} of {numbers:,} parameters"

    lines = []
    if config.base_width is not None and config.base_width != model.config.dim:
        lines.append(f"width    {model.config.dim / config.base_width:g} times optim.base_width={config.base_width}")
    if config.name != "adamw":
        optimizers = sorted({rule.optimizer for rule in found.values()}, key=lambda name: name != config.name)
        shares = [f"{name} for {sized([n for n, rule in found.items() if rule.optimizer == name])}" for name in optimizers]
        lines.append(f"optim    {', '.join(shares)}")
        stacked = [
            n for n, rule in found.items() if config.name == "muon" and rule.optimizer != "muon" and parameters[n].dim() > 2
        ]
        if stacked:
            lines.append(
                f"optim    muon leaves what has more than two dimensions to adamw: {sized(stacked)}, such as {stacked[0]}"
            )
    for group, own in zip(config.groups, _members(found, config)):
        decay = "" if group.weight_decay is None else f", weight decay {group.weight_decay:g}"
        by = "" if group.optimizer is None else f", by {group.optimizer}"
        apart = f", rows {' + '.join(map(str, group.fused_rows))} apart" if group.fused_rows else ""
        lines.append(f"group    {group.pattern}: {sized(own)}, {group.lr_scale:g} x the learning rate{decay}{by}{apart}")
    return lines


def check_groups(model: nn.Module, config: Optim) -> None:
    """Raise ConfigError for a group of `optim.groups` that gets none of the trained parameters, for one without effect, for one that Muon cannot
    update as it says, and for groups that leave nothing to train.
    """
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    every, usual = list(shapes), rules(model, dataclasses.replace(config, groups=[]))
    members = _members(every, config)
    for i, (group, own) in enumerate(zip(config.groups, members)):
        if not own:
            taken = any(fnmatchcase(name, group.pattern) for name in every)
            why = "only parameters that an earlier group has" if taken else "no parameter that is trained"
            shown = ", ".join(sorted(set(every).difference(*members[:i]), key=every.index)[:NAMES_SHOWN])
            raise ConfigError(
                f"optim.groups.{i}.pattern={group.pattern} matches {why}; "
                + (f"names are {shown}, ..." if shown else "remove it")
            )
        keeps = any(fnmatchcase(name, later.pattern) for later in config.groups[i + 1 :] for name in own)
        if not keeps and not any(_changes(group, usual[name]) for name in own):
            raise ConfigError(
                f"optim.groups.{i} has no effect, its parameters are updated so anyway: give it another lr_scale or weight_decay, or remove it"
            )
        if group.lr_scale == 0 and group.weight_decay is not None:
            raise ConfigError(
                f"optim.groups.{i}.weight_decay={group.weight_decay:g} has no effect with lr_scale=0, because decay is times the rate; remove one of them"
            )
    frozen = [name for group, own in zip(config.groups, members) for name in own if group.lr_scale == 0]
    if every and len(frozen) == len(every):
        raise ConfigError("optim.groups give every parameter lr_scale=0, so that nothing is trained; leave some out")
    for i, (group, own) in enumerate(zip(config.groups, members)):
        _check_muon(
            i, group, {name: shapes[name] for name in own}, {n for n, rule in usual.items() if rule.optimizer == "muon"}, config
        )


def _changes(group: ParameterGroup, usual: Rule) -> bool:
    """Whether a group has a parameter updated in another way than without it. What Muon cannot do at all, `_check_muon` refuses."""
    decays = group.weight_decay is not None and group.weight_decay / usual.rate_scale != usual.weight_decay
    return group.lr_scale != 1 or decays or bool(group.fused_rows) or group.optimizer not in (None, usual.optimizer)


def _check_muon(place: int, group: ParameterGroup, shapes: dict[str, torch.Size], usual: set[str], config: Optim) -> None:
    """Raise ConfigError for a group whose `optimizer` or `fused_rows` do not fit these parameters of it. `usual`: what Muon has without groups."""
    where, rows = f"optim.groups.{place}", list(group.fused_rows or ())
    if config.name != "muon" and (group.optimizer is not None or rows):
        raise ConfigError(
            f"{where}.{'fused_rows' if rows else 'optimizer'} has no effect with optim.name={config.name}; remove it"
        )
    if len(rows) == 1:
        raise ConfigError(f"{where}.fused_rows={rows} names one projection, so nothing is taken apart; name the rows of each")
    for name, shape in shapes.items():
        if group.optimizer == "muon" and len(shape) not in (2, 3):
            raise ConfigError(
                f"{where}.optimizer=muon: {name} is no matrix: its shape is {tuple(shape)}; choose another pattern"
            )
        if rows and (group.optimizer or ("muon" if name in usual else "adamw")) == "adamw":
            raise ConfigError(
                f"{where}.fused_rows={rows} has no effect on {name}, which is AdamW's; add optimizer: muon, or choose another pattern"
            )
        if rows and shape[-2] % sum(rows):
            raise ConfigError(
                f"{where}.fused_rows={rows} are {sum(rows)} rows, which do not divide the {shape[-2]} of {name}; correct them, or choose another pattern"
            )
        if group.optimizer == "muon" and config.base_width is not None and name not in usual:
            raise ConfigError(
                f"{where}.optimizer=muon: optim.base_width has no rule for {name} under Muon; leave it to AdamW, or remove optim.base_width"
            )
