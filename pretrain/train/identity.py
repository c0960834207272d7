"""Does a checkpoint, or a run directory, hold the run that a configuration describes, and what would a difference do?

Two things are compared. The *identity* (`Plan.identity`) is the model, the optimizer and everything that decided the samples so far. The
*configuration* is compared key by key, and each key says what a change at a resume means (`config/keys.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.keys import leaves
from pretrain.config.schema import Config
from pretrain.data.order import UNIT
from pretrain.data.sources import consumed_after
from pretrain.errors import CheckpointError, ConfigError
from pretrain.optim.schedule import joints, learning_rate

log = logging.getLogger(__name__)

# The keys of an identity that can be accepted, with all keys below them, and the consequence of a change.
_CONSEQUENCES = {
    "data.kind": "the run would read other data, from its beginning",
    "data.seed": "the next samples would come in another order: in this epoch, some would be repeated and some skipped",
    "data.shuffle_shards": "the next samples would come in another order: in this epoch, some would be repeated and some skipped",
    "data.sequence_length": "samples would be cut at other places: in this epoch, some text would be repeated and some skipped",
    "data.packing": "samples would be cut at other places: in this epoch, some text would be repeated and some skipped",
    "data.document_mask": "attention would see other tokens than in the steps before",
    "data.objective": "the model would learn another task than in the steps before",
    "data.boundary_loss": "other targets would carry the loss than in the steps before",
    "data.loss_weight": "the losses of sources would have other weights than in the steps before",
    "data.tokenizer": "the token ids would stand for other text than in the steps before",
    "data.sources": "the old data order would be applied to different data: some text would be repeated and some skipped",
    "data.mixture": "the sources would be read from other places: some samples would be repeated and some skipped",
}
IN_STEPS = {
    "run.tokens": "run.steps",
    "schedule.warmup_tokens": "schedule.warmup_steps",
    "schedule.decay_tokens": "schedule.decay_steps",
}  # keys in tokens, and those that a run records in their place
_ABOUT_RESUMING = ("run.resume", "run.accept_changes")  # they say how to resume, and nothing about the run
# Batches of pairs differ in size: another order has none that begins at the run's place.
_ORDER_OF_PAIRS = ("data.seed", "data.sources")
_SHOWN = 4  # values of one kind that a message lists
# They come and go with a source, or with a way of packing, which is what the message names.
_DETAILS = re.compile(r"data\.sources\.\d+\.documents|data\.packing\.index\.\d+")
_FOR_MESSAGES = re.compile(r"data\.sources\.\d+\.path")
_WIDTH = 200  # characters of a value that a line of the difference shows
_CURVE_POINTS = 1000  # steps at which two schedules are compared


@dataclass(frozen=True)
class Change:
    """A value that has changed. `consent`: its name in `run.accept_changes`, None if it cannot be accepted.

    `consequence`: the effect of the change, if the value itself does not show it. `places`: if the values are hashes, where the
    old and the new content lies.
    """

    name: str
    old: Any
    new: Any
    consent: str | None
    consequence: str = ""
    places: tuple[str, str] = ("", "")


# ---- what differs -----------------------------------------------------------------------------------------------------


def identity_changes(saved: dict[str, Any], own: dict[str, Any]) -> list[Change]:
    """The differences between two identities, which make them different runs."""
    names = [name for name in sorted(saved.keys() | own.keys()) if not _FOR_MESSAGES.fullmatch(name)]
    names = [name for name in names if (name in saved and name in own) or not _DETAILS.fullmatch(name)]
    changed = [name for name in names if saved.get(name) != own.get(name)]
    fixed = _ORDER_OF_PAIRS if saved.get("data.kind") == own.get("data.kind") == "pairs" else ()
    kinds = {name: next((k for k in _CONSEQUENCES if k not in fixed and _is_under(name, [k])), None) for name in changed}

    def places(name: str) -> tuple[str, str]:
        key = f"{name.removesuffix('.documents')}.path"
        return saved.get(key, ""), own.get(key, "")

    return [Change(n, saved.get(n), own.get(n), kinds[n], _CONSEQUENCES.get(kinds[n], ""), places(n)) for n in changed]


def difference_lines(saved: Config, own: Config) -> list[str]:
    """One line for each key whose value has changed, free ones included."""
    before, after = ({leaf.path: leaf.value for leaf in leaves(Config, dataclasses.asdict(one))} for one in (saved, own))
    paths = [*after, *(path for path in before if path not in after)]
    changed = [path for path in paths if before.get(path) != after.get(path) and path not in _ABOUT_RESUMING]
    return [f"{path}: {_cut(before.get(path))} -> {_cut(after.get(path))}" for path in changed]


def setting_changes(saved: Config, own: Config, step: int) -> list[Change]:
    """The keys whose change since `step` needs consent, because the next steps would be computed differently."""
    before, after = ({leaf.path: leaf for leaf in leaves(Config, dataclasses.asdict(one))} for one in (saved, own))
    both = [(before.get(path), after.get(path)) for path in dict.fromkeys([*after, *before])]
    changed = [(old, new) for old, new in both if (old and old.value) != (new and new.value)]
    consequence = _new_past(saved, own, step)
    ends = [(one.schedule.warmup_steps, one.run.steps) for one in (saved, own)]
    if consequence and any(warmup and warmup == steps for warmup, steps in ends):
        consequence += " (a warmup longer than the run is shortened to run.steps, which has changed)"
    rules = ("accept", "schedule") if consequence else ("accept",)
    found = []
    for old, new in changed:
        leaf = new or old
        if leaf.resume in rules:
            text = consequence if leaf.resume == "schedule" else ""
            found.append(Change(leaf.path, old and old.value, new and new.value, leaf.key, text or ""))
    return found


def _new_past(saved: Config, own: Config, step: int) -> str | None:
    """The effect of another schedule, if the steps already taken would have had other learning rates; else None."""
    if not step:
        return None
    schedule, steps = saved.schedule, saved.run.steps
    consumed, own_consumed = consumed_after(saved), consumed_after(own)

    def rates(number: int, old_peak: float = 1.0, new_peak: float = 1.0) -> tuple[float, float]:
        return (
            learning_rate(schedule, old_peak, steps, number, consumed),
            learning_rate(own.schedule, new_peak, own.run.steps, number, own_consumed),
        )

    points = {1 + i * step // _CURVE_POINTS for i in range(_CURVE_POINTS)}
    points |= joints(schedule, steps, step, consumed) | joints(own.schedule, own.run.steps, step, own_consumed)
    # The same curve written otherwise is rounded otherwise.
    if all(math.isclose(*rates(number), rel_tol=1e-9, abs_tol=1e-12) for number in points):
        return None
    peaks = saved.optim.lr, own.optim.lr
    end = max(step + 1, min(steps, own.run.steps))  # the end of the shorter one shows the difference best, if it shows one
    for digits in (3, 12):
        for number in (end, *sorted(points, reverse=True)):
            old, new = (f"{rate:.{digits}g}" for rate in rates(number, *peaks))
            if old != new:
                return f"the learning rate of step {number} would be {new} instead of {old}"
    return "the steps already taken would have had another share of optim.lr"


# ---- what is done about it --------------------------------------------------------------------------------------------


def check_changes(
    holder: object,
    identity: list[Change],
    settings: list[Change],
    accepted: list[str],
    tokens: int = 0,
    other_name: bool = True,
) -> None:
    """Raise CheckpointError listing all changes since `holder` that `run.accept_changes` does not name; warn of those that it names.

    `tokens`: the run's tokens so far, if a stage can change its mixture from there on; else 0. `other_name`: whether another
    run.name would help.
    """
    changes, named = [*identity, *settings], [IN_STEPS.get(name, name) for name in accepted]
    refused = [change for change in changes if change.consent is None or not _is_under(change.name, named)]
    if tolerated := [change for change in changes if change not in refused]:
        log.warning("%s: accepted %s", holder, _describe(tolerated))
    if not refused:
        return
    what, remedies = "was trained with other values", ["restore these values"]
    if any(change in identity for change in refused):
        what = "holds another run"
        remedies = ["choose another run.name, or restore these values"] if other_name else remedies
    if tokens and any(change.name.startswith("data.mixture") for change in refused):
        remedies.append(
            "to change the mixture from here on, give data.stages "
            f"a stage until_tokens={tokens} with the old weights, then one with the new"
        )
    keys = dict.fromkeys(change.consent for change in refused)
    if None not in keys:
        # Keys that are accepted already must stay accepted.
        remedies.append(f"if you mean it, set run.accept_changes=[{', '.join(dict.fromkeys([*accepted, *keys]))}]")
    raise CheckpointError(f"{holder} {what}: {_describe(refused)}; {'; '.join(remedies)}")


def check_model(source: Path, saved: dict[str, Any], own: dict[str, Any], telling: set[str]) -> None:
    """Raise CheckpointError if the weights of `run.init_from` belong to another model. `saved` and `own` are `model_identity`.

    `telling`: the keys from which the other keys of the two models are derived. Only these are named.
    """
    changes = identity_changes(saved, own)
    if not changes:
        return
    named = [change for change in changes if change.name in telling] or changes
    preset = source / "model.yaml"  # an import writes it
    section = (
        f"include {preset} in the configuration"
        if preset.is_file()
        else f"copy `model` of {source}/config.yaml to the configuration"
    )
    raise CheckpointError(
        f"run.init_from={source} holds another model: {_describe(named)}; {section}, in place of its section `model`"
    )


def check_accepted(accepted: list[str]) -> None:
    """Raise ConfigError for an item of `run.accept_changes` that cannot be accepted."""
    settings = dict.fromkeys(leaf.key for leaf in leaves(Config, None) if leaf.resume in ("accept", "schedule"))
    for name in accepted:
        if not _is_under(name, [*_CONSEQUENCES, *settings]):
            raise ConfigError(
                f"run.accept_changes={name}: a change of this key cannot be accepted; choose from "
                f"{', '.join([*settings, *_CONSEQUENCES])}"
            )


def _describe(changes: list[Change]) -> str:
    """The changed values by kind, with each consequence said once."""
    kinds: dict[tuple[str | None, str], list[Change]] = {}
    for change in changes:
        # Values that cannot be accepted are all listed. Several keys with one consequence (a schedule's) stand together.
        kinds.setdefault((None, change.consequence) if change.consequence else (change.consent, ""), []).append(change)
    parts = []
    for (_, consequence), members in kinds.items():
        listed = members[:_SHOWN] if consequence else members
        values = [
            f"{_title(c)} was {_shown(c.name, c.old, c.places[0])} and is {_shown(c.name, c.new, c.places[1])}" for c in listed
        ]
        more = f" and {len(members) - len(listed)} more" if len(members) > len(listed) else ""
        parts.append("; ".join(values) + more + (f" ({consequence})" if consequence else ""))
    return "; ".join(parts)


def _title(change: Change) -> str:
    share = re.fullmatch(r"data\.mixture\.(\d+)\.shares\.(\d+)", change.name)
    return f"the share of data.sources.{share[2]} in part {share[1]} of the mixture" if share else change.name


def _shown(name: str, value: Any, place: str) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{40,}", value):
        short = f"sha256 {value[:12]}"  # enough to tell two apart
        return f"{place} ({short})" if place else short
    if re.fullmatch(r"data\.mixture\.\d+\.shares\.\d+", name):
        return "none" if value is None else f"{value / UNIT:.4%}"
    return _as_in_yaml(value)


def _as_in_yaml(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _cut(value: Any) -> str:
    text = _as_in_yaml(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."


def _is_under(name: str, keys: list[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)
