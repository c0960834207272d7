"""Whether a checkpoint, or a run directory, holds the run that a configuration describes; what a difference would do.

Two things are compared. The *identity* (`Plan.identity`) is the model, the optimizer and everything that decided the samples so far. The
*configuration* is compared key by key, and each key says what a change at a resume means (`config/keys.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.keys import leaves
from pretrain.config.schema import Config, Schedule
from pretrain.config.written import build_section
from pretrain.data.mixture import UNIT
from pretrain.errors import CheckpointError, ConfigError
from pretrain.optim.schedule import learning_rate

log = logging.getLogger(__name__)

# The keys of an identity that can be accepted, with all that lies under them, and what comes of a change.
_CONSEQUENCES = {
    "data.kind": "other data would be read from their start",
    "data.seed": "the samples to come would be in another order: of this epoch, some would come twice and some not at all",
    "data.shuffle_shards": "the samples to come would be in another order: of this epoch, some would come twice and some not at all",
    "data.sequence_length": "samples would be cut elsewhere: of this epoch, some text would come twice and some not at all",
    "data.packing": "samples would be cut elsewhere: of this epoch, some text would come twice and some not at all",
    "data.document_mask": "attention would see other tokens than in the steps before",
    "data.objective": "another task would be learnt than in the steps before",
    "data.boundary_loss": "other targets would carry the loss than in the steps before",
    "data.tokenizer": "the token ids would stand for other text than in the steps before",
    "data.sources": "another text would be read under the order of the old one, partly again and partly not at all",
    "data.mixture": "the sources would be read from other places, partly again and partly not at all",
}
_ABOUT_RESUMING = ("run.resume", "run.accept_changes")  # they say how to go on, and nothing of the run
_SHOWN = 4  # values of one kind that a message lists
# Parts that records of before 2026-12 lack: where they do, there is nothing to compare.
_LATER = re.compile(r"data\.tokenizer\.\w+|data\.sources\.\d+\.documents|data\.packing\.index\.\d+")
_FOR_MESSAGES = re.compile(r"data\.sources\.\d+\.path")
_WIDTH = 200  # characters of a value that a line of the difference shows
_CURVE_POINTS = 1000  # steps at which two schedules are compared


@dataclass(frozen=True)
class Change:
    """A value that is not what it was. `consent`: what `run.accept_changes` calls it, None where it cannot be accepted.

    `consequence`: what comes of it, where the value itself does not say so; `places`: where the content lies
    that the old and the new value are hashes of.
    """

    name: str
    old: Any
    new: Any
    consent: str | None
    consequence: str = ""
    places: tuple[str, str] = ("", "")


# ---- what differs -----------------------------------------------------------------------------------------------------


def identity_changes(saved: dict[str, Any], own: dict[str, Any]) -> list[Change]:
    """What makes the run of one identity another than that of the other."""
    names = [name for name in sorted(saved.keys() | own.keys()) if not _FOR_MESSAGES.fullmatch(name)]
    names = [name for name in names if name in saved or not _LATER.fullmatch(name)]
    changed = [name for name in names if saved.get(name) != own.get(name)]
    kinds = {name: next((key for key in _CONSEQUENCES if _is_under(name, [key])), None) for name in changed}

    def places(name: str) -> tuple[str, str]:
        key = f"{name.removesuffix('.documents')}.path"
        return saved.get(key, ""), own.get(key, "")

    return [Change(n, saved.get(n), own.get(n), kinds[n], _CONSEQUENCES.get(kinds[n], ""), places(n)) for n in changed]


def differences(saved: dict[str, Any], own: Config) -> list[str]:
    """One line for each key whose value is not what it was, free ones included. `saved`: a configuration as config.yaml has it."""
    before, after = ({leaf.path: leaf.value for leaf in leaves(Config, values)} for values in (saved, dataclasses.asdict(own)))
    paths = [*after, *(path for path in before if path not in after)]
    changed = [path for path in paths if before.get(path) != after.get(path) and path not in _ABOUT_RESUMING]
    return [f"{path}: {_cut(before.get(path))} -> {_cut(after.get(path))}" for path in changed]


def setting_changes(saved: dict[str, Any], own: Config, step: int) -> list[Change]:
    """The keys whose change since `step` needs consent: the steps to come would be computed otherwise."""
    before, after = ({leaf.path: leaf for leaf in leaves(Config, values)} for values in (saved, dataclasses.asdict(own)))
    both = [(before.get(path), after.get(path)) for path in dict.fromkeys([*after, *before])]
    changed = [(old, new) for old, new in both if old is None or new is None or old.value != new.value]
    consequence = _new_past(saved, own, step)
    rules = ("accept", "schedule") if consequence else ("accept",)
    found = []
    for old, new in changed:
        leaf = new or old
        if leaf.resume in rules:
            text = consequence if leaf.resume == "schedule" else ""
            found.append(Change(leaf.path, old and old.value, new and new.value, leaf.key, text or ""))
    return found


def _new_past(saved: dict[str, Any], own: Config, step: int) -> str | None:
    """What another schedule does, where the steps already taken would have had other learning rates; None where they would not."""
    schedule = build_section(Schedule, {leaf.path: leaf.value for leaf in leaves(Schedule, saved.get("schedule", {}))})
    steps = saved.get("run", {}).get("steps", Config().run.steps)

    def rates(number: int, old_peak: float = 1.0, new_peak: float = 1.0) -> tuple[float, float]:
        return learning_rate(schedule, old_peak, steps, number), learning_rate(own.schedule, new_peak, own.run.steps, number)

    points = {step, *(1 + i * step // _CURVE_POINTS for i in range(_CURVE_POINTS))} if step else ()
    if all(old == new for old, new in map(rates, points)):
        return None
    shown = max(step + 1, min(steps, own.run.steps))  # the end of the shorter one says most
    old, new = rates(shown, saved.get("optim", {}).get("lr", own.optim.lr), own.optim.lr)
    return f"the learning rate of step {shown} would be {new:.3g} instead of {old:.3g}"


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

    `tokens`: how far the run is, where its mixture can be changed from there on by a stage; else 0. `other_name`: whether another
    run.name is a way out.
    """
    changes = [*identity, *settings]
    refused = [change for change in changes if change.consent is None or not _is_under(change.name, accepted)]
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
            "to mix otherwise from here on, leave the past as it was: "
            f"a stage of data.stages until_tokens={tokens} with the old weights, then one with the new"
        )
    keys = dict.fromkeys(change.consent for change in refused)
    if None not in keys:
        # What is accepted already has to stay so.
        remedies.append(f"if it is meant, run.accept_changes=[{', '.join(dict.fromkeys([*accepted, *keys]))}]")
    raise CheckpointError(f"{holder} {what}: {_describe(refused)}; {'; '.join(remedies)}")


def check_model(source: Path, saved: dict[str, Any], own: dict[str, Any], telling: set[str]) -> None:
    """Raise CheckpointError where the weights of `run.init_from` are of another model. Both are `model_identity`.

    `telling`: the keys from which the others of the two models are derived. Only these are named.
    """
    changes = identity_changes(saved, own)
    if not changes:
        return
    named = [change for change in changes if change.name in telling] or changes
    preset = source / "model.yaml"  # of an import
    section = (
        f"include {preset} in the configuration" if preset.is_file() else f"copy the section `model` of {source}/config.yaml"
    )
    raise CheckpointError(
        f"run.init_from={source} holds another model: {_describe(named)}; {section}, in place of what it says of the model"
    )


def check_accepted(accepted: list[str]) -> None:
    """Raise ConfigError for an item of `run.accept_changes` that names nothing that can be accepted."""
    settings = dict.fromkeys(leaf.key for leaf in leaves(Config, None) if leaf.resume in ("accept", "schedule"))
    for name in accepted:
        if not _is_under(name, [*_CONSEQUENCES, *settings]):
            raise ConfigError(
                f"run.accept_changes={name}: a change of it cannot be accepted; those that can are "
                f"{', '.join([*settings, *_CONSEQUENCES])}"
            )


def _describe(changes: list[Change]) -> str:
    """The changed values, those of one kind together, with what comes of it said once."""
    kinds: dict[tuple[str | None, str], list[Change]] = {}
    for change in changes:
        # What cannot be accepted is listed whole; several keys of one consequence (a schedule's) stand together.
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
    return str(value)


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."


def _is_under(name: str, keys: list[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)
