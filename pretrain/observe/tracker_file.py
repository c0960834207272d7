"""trackers.json of a run directory: by tracker, the run's id there, and the last step that is known to have arrived.

    {"wandb": "1f0c...", "mlflow": "9a3e...", "arrived": {"wandb": 120, "mlflow": 340}}

The next start sends the lines again that were logged and did not arrive, for instance because the process was killed.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from pretrain.storage import replace_text

TRACKERS_FILE = "trackers.json"
_LOCK = threading.Lock()
"""Each tracker has a thread of its own."""


def kept_id(directory: Path, tracker: str, new_id: str | None = None) -> str | None:
    """The run's id in a tracker. A run without an id keeps `new_id`, if given. Raises OSError."""
    with _LOCK:
        kept = _read(directory)
        if tracker not in kept and new_id is not None:
            kept[tracker] = new_id
            replace_text(directory / TRACKERS_FILE, json.dumps(kept, indent=1) + "\n")
        return kept.get(tracker)


def arrived_step(directory: Path, tracker: str) -> int:
    """The last step that has arrived, with all before it; 0 if nothing is known. Raises OSError."""
    return _read(directory).get("arrived", {}).get(tracker, 0)


def keep_arrived(directory: Path, tracker: str, step: int) -> None:
    """Remember the last step that has arrived. Raises OSError."""
    with _LOCK:
        kept = _read(directory)
        kept["arrived"] = {**kept.get("arrived", {}), tracker: step}
        replace_text(directory / TRACKERS_FILE, json.dumps(kept, indent=1) + "\n", durable=False)


def _read(directory: Path) -> dict[str, Any]:
    path = directory / TRACKERS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
