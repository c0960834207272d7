"""Python's search for unreachable cycles, after the same steps on all ranks.

Python starts it on its own when enough objects were made. Then one rank after the other stops for it, and each time all the others wait in a collective.
"""

from __future__ import annotations

import gc

EVERY_STEPS = 50


class GarbageCollection:
    """While it is open, Python collects after every so many steps and at no other time. What exists when it opens is not searched."""

    def __enter__(self) -> GarbageCollection:
        self._was_enabled, self._freezes = gc.isenabled(), not gc.get_freeze_count()  # a script may have frozen its own
        if self._freezes:
            gc.collect()
            gc.freeze()
        gc.disable()
        return self

    def __exit__(self, *error: object) -> None:
        if self._freezes:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collect if it is time."""
        if step % EVERY_STEPS == 0:
            gc.collect()
