"""Python's search for unreachable cycles, after the same steps on all ranks.

Python starts it on its own when enough objects were made. Then one rank after the other stops for it, and each time all the others wait in a collective.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

EVERY_STEPS = 50


@contextlib.contextmanager
def first_import() -> Iterator[None]:
    """For the first import of torch and what needs it. Python collects neither meanwhile nor, later, from what modules made, which stays anyway.

    A start becomes half a second shorter. Does nothing after torch was imported, while collections are off, or when a script has frozen
    objects of its own.
    """
    if "torch" in sys.modules or not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


class GarbageCollection:
    """While it is open, Python collects after every so many steps and at no other time.

    It does not search what was frozen before: modules (`first_import`) or objects of a script. If nothing was, it freezes all that exists.
    """

    def __enter__(self) -> GarbageCollection:
        self._was_enabled, self._freezes = gc.isenabled(), not gc.get_freeze_count()
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
