"""Python's search for unreachable cycles, after the same steps on all ranks.

Python starts it on its own when enough objects were made. Then one rank after the other stops for it, and each time all the others wait in a collective.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

EVERY_STEPS = 50

_modules_are_frozen = False


@contextlib.contextmanager
def first_import(until: contextlib.ExitStack) -> Iterator[None]:
    """Open it around the first import of torch and of what needs torch. Python would search thousands of times there, for half a second.

    What exists when it closes is not searched until `until` closes or a `GarbageCollection` does. Does nothing when torch was imported before,
    when collections are off, or when a script has frozen objects of its own.
    """
    global _modules_are_frozen
    if "torch" in sys.modules or not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
        _modules_are_frozen = True
        until.callback(_unfreeze)
    finally:
        gc.enable()


def _unfreeze() -> None:
    global _modules_are_frozen
    gc.unfreeze()
    _modules_are_frozen = False


class GarbageCollection:
    """While it is open, Python collects after every so many steps and at no other time. What exists when it opens is not searched."""

    def __enter__(self) -> GarbageCollection:
        # Objects that a script has frozen are left to it.
        self._was_enabled, self._freezes = gc.isenabled(), _modules_are_frozen or not gc.get_freeze_count()
        if self._freezes:
            gc.collect()
            gc.freeze()
        gc.disable()
        return self

    def __exit__(self, *error: object) -> None:
        if self._freezes:
            _unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collect if it is time."""
        if step % EVERY_STEPS == 0:
            gc.collect()
