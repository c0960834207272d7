"""Work of one process that may take longer than `parallel.timeout_seconds`, which the others hear of."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from pretrain.distributed.ranks import Ranks

T = TypeVar("T")


def while_alive(name: str, action: Callable[[], T], ranks: Ranks) -> T:
    """What `action` returns, which may take longer than `parallel.timeout_seconds`. All ranks call this together."""
    found: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def act() -> None:
        try:
            found.put((action(), None))
        except BaseException as error:  # raised below
            found.put((None, error))

    with ranks.part(name, storage=True), ranks.in_pieces(name) as seen:
        threading.Thread(target=act, name=name, daemon=True).start()
        while True:
            try:
                result, error = found.get(timeout=1.0)
                break
            except queue.Empty:
                seen(0)
        if error is not None:
            raise error
    return result
