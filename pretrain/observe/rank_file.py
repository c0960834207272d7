"""ranks.json: what each rank of a run is doing, a few seconds ago. `tools/watch.py` shows it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from pretrain.observe.logs import Tolerated
from pretrain.storage import replace_text

RANKS_FILE = "ranks.json"


class RankFile:
    """Writes ranks.json in a thread of its own: storage may hang, and neither training nor the monitor may wait for it."""

    def __init__(self, directory: Path) -> None:
        self._thread = threading.Thread(target=self._write, name="ranks.json", daemon=True)
        self.path = directory / RANKS_FILE
        self._lines = Tolerated(str(self.path))
        self._changed, self._newest, self._ends = threading.Condition(), None, False

    def put(self, table: dict[str, Any]) -> None:
        """Take a table (distributed/roll_call.py). One that was not written yet is replaced; the caller never waits for storage."""
        newest = {"updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **table}
        with self._changed:
            if self._ends:
                return
            if self._thread.ident is None:
                self._thread.start()
            self._newest = newest
            self._changed.notify()

    def _write(self) -> None:
        while True:
            with self._changed:
                while self._newest is None and not self._ends:
                    self._changed.wait()
                if self._newest is None:
                    return
                text, self._newest = json.dumps(self._newest), None
            self._lines.attempt(lambda text=text: replace_text(self.path, text + "\n", durable=False))

    def close(self, seconds: float = 2.0) -> None:
        """Write the last table, if storage answers within these seconds."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        self._lines.close()
