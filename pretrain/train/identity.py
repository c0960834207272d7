"""Whether a checkpoint, or a run directory, holds the run that a configuration describes; what a difference would do."""

from __future__ import annotations

import logging
from typing import Any

from pretrain.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

# Of the keys of an identity that can be accepted, with all that lies under them: what comes of a change.
_CONSEQUENCES = {
    "data.seed": "the samples to come would be in another order: of this epoch, some would come twice and some not at all",
    "data.shuffle_shards": "the samples to come would be in another order: of this epoch, some would come twice and some not at all",
    "data.sequence_length": "samples would be cut elsewhere: of this epoch, some text would come twice and some not at all",
    "data.packing": "samples would be cut elsewhere: of this epoch, some text would come twice and some not at all",
    "data.document_mask": "attention would see other tokens than in the steps before",
    "data.boundary_loss": "other targets would carry the loss than in the steps before",
    "data.tokenizer": "the token ids would stand for other text than in the steps before",
    "data.sources": "another text would be read under the order of the old one, partly again and partly not at all",
    "data.mixture": "the sources would be read from other places, partly again and partly not at all",
}


def check_identity(saved: dict[str, Any], own: dict[str, Any], holder: object, accepted: list[str], tokens: int = 0) -> None:
    """Raise CheckpointError listing every value that makes what `holder` holds another run than this configuration's.

    Differences under a key of `accepted` (`run.accept_changes`) are warned of instead. `tokens`: how far the run is.
    """
    names = sorted(saved.keys() | own.keys())
    changed = [name for name in names if saved.get(name) != own.get(name)]
    refused = [name for name in changed if not (_is_under(name, accepted) and _consequence(name))]
    for name in changed:
        if name not in refused:
            log.warning("%s: accepted %s", holder, _describe(name, saved, own))
    if not refused:
        return
    mixture = any(name.startswith("data.mixture") for name in refused)
    remedies = ["choose another run.name, or restore these values"]
    if mixture and tokens:
        remedies.append(
            f"to mix otherwise from here on, leave the past as it was: a stage of data.stages until_tokens={tokens} with the old weights, "
            "then one with the new"
        )
    acceptable = sorted({_consequence(name)[0] for name in refused if _consequence(name)})
    if acceptable and all(_consequence(name) for name in refused):
        remedies.append(f"if it is meant, run.accept_changes=[{', '.join(acceptable)}]")
    what = "; ".join(_describe(name, saved, own) for name in refused)
    raise CheckpointError(f"{holder} holds another run: {what}; {'; '.join(remedies)}")


def check_accepted(accepted: list[str]) -> None:
    """Raise ConfigError for an item of `run.accept_changes` that names nothing that can be accepted."""
    for name in accepted:
        if not _consequence(name):
            raise ConfigError(
                f"run.accept_changes={name}: not a part of the data's identity; those are {', '.join(_CONSEQUENCES)}"
            )


def _describe(name: str, saved: dict[str, Any], own: dict[str, Any]) -> str:
    consequence = _consequence(name)
    return f"{name} was {saved.get(name)} and is {own.get(name)}" + (f" ({consequence[1]})" if consequence else "")


def _consequence(name: str) -> tuple[str, str] | None:
    return next(((key, text) for key, text in _CONSEQUENCES.items() if _is_under(name, [key])), None)


def _is_under(name: str, keys: list[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)
