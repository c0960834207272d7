"""Whether a checkpoint, or a run directory, holds the run that a configuration describes; what a difference would do."""

from __future__ import annotations

import logging
import re
from typing import Any

from pretrain.data.mixture import UNIT
from pretrain.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

# Of the keys of an identity that can be accepted, with all that lies under them: what comes of a change.
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
    "data.text": "the text would go on at the same file and row of another list of files",
}
_SHOWN = 4  # values of one kind that a message lists
# Parts that records of before 2026-12 lack: where they do, there is nothing to compare.
_LATER = re.compile(r"data\.tokenizer\.\w+|data\.sources\.\d+\.documents|data\.packing\.index\.\d+")
_FOR_MESSAGES = re.compile(r"data\.sources\.\d+\.path")
_HASH = re.compile("[0-9a-f]{64}")


def check_identity(saved: dict[str, Any], own: dict[str, Any], holder: object, accepted: list[str], tokens: int = 0) -> None:
    """Raise CheckpointError listing what makes the run that `holder` holds another one than this configuration's.

    Differences under a key of `accepted` (`run.accept_changes`) are warned of instead. `tokens`: how far the run is, where its
    mixture can be changed from there on by a stage; else 0.
    """
    names = [name for name in sorted(saved.keys() | own.keys()) if not _FOR_MESSAGES.fullmatch(name)]
    names = [name for name in names if name in saved or not _LATER.fullmatch(name)]
    changed = [name for name in names if saved.get(name) != own.get(name)]
    refused = [name for name in changed if not (_is_under(name, accepted) and _kind(name))]
    if tolerated := [name for name in changed if name not in refused]:
        log.warning("%s: accepted %s", holder, _describe(tolerated, saved, own))
    if not refused:
        return
    remedies = ["choose another run.name, or restore these values"]
    if tokens and any(name.startswith("data.mixture") for name in refused):
        remedies.append(
            "to mix otherwise from here on, leave the past as it was: "
            f"a stage of data.stages until_tokens={tokens} with the old weights, then one with the new"
        )
    kinds = dict.fromkeys(_kind(name) for name in refused)
    if None not in kinds:
        remedies.append(f"if it is meant, run.accept_changes=[{', '.join(map(str, kinds))}]")
    raise CheckpointError(f"{holder} holds another run: {_describe(refused, saved, own)}; {'; '.join(remedies)}")


def check_accepted(accepted: list[str]) -> None:
    """Raise ConfigError for an item of `run.accept_changes` that names nothing that can be accepted."""
    for name in accepted:
        if not _kind(name):
            raise ConfigError(
                f"run.accept_changes={name}: not a part of the data's identity; those are {', '.join(_CONSEQUENCES)}"
            )


def _describe(names: list[str], saved: dict[str, Any], own: dict[str, Any]) -> str:
    """The changed values, those of one kind together, with what comes of it said once."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_kind(name) or "", []).append(name)
    parts = []
    for kind, members in sorted(kinds.items(), key=lambda item: names.index(item[1][0])):
        listed = members if not kind else members[:_SHOWN]
        values = [f"{_title(n)} was {_shown(n, saved)} and is {_shown(n, own)}" for n in listed]
        more = f" and {len(members) - len(listed)} more" if len(members) > len(listed) else ""
        parts.append("; ".join(values) + more + (f" ({_CONSEQUENCES[kind]})" if kind else ""))
    return "; ".join(parts)


def _title(name: str) -> str:
    share = re.fullmatch(r"data\.mixture\.(\d+)\.shares\.(\d+)", name)
    return f"the share of data.sources.{share[2]} in part {share[1]} of the mixture" if share else name


def _shown(name: str, record: dict[str, Any]) -> str:
    value = record.get(name)
    if isinstance(value, str) and _HASH.fullmatch(value):
        path = record.get(f"{name.removesuffix('.documents')}.path")
        return f"{path} (sha256 {value[:12]})" if path else f"sha256 {value[:12]}"
    if re.fullmatch(r"data\.mixture\.\d+\.shares\.\d+", name):
        return "none" if value is None else f"{value / UNIT:.4%}"
    return str(value)


def _kind(name: str) -> str | None:
    return next((key for key in _CONSEQUENCES if _is_under(name, [key])), None)


def _is_under(name: str, keys: list[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)
