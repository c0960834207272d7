"""Checks, before a run starts, of the callbacks and sinks that a script adds to it. A slip in them would be silent, or a traceback hours later."""

from __future__ import annotations

import difflib
import hashlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.errors import ConfigError, shown
from pretrain.observe.sinks import Sink
from pretrain.train.callbacks import Callback

CALLED = ("start", "evaluate", "on_record", "on_save", "close")
"""The methods of a callback that a run calls."""
WRITES = ("open", "write", "close")
"""Those of a sink."""


@dataclass(frozen=True)
class Extensions:
    """The callbacks and sinks that a script adds to a run. Raises ConfigError for other objects, and for those of which a run calls nothing."""

    callbacks: Sequence[Callback] = ()
    sinks: Sequence[Sink] = ()

    def __post_init__(self) -> None:
        for name, given, kind, methods in (
            ("callbacks", self.callbacks, Callback, CALLED),
            ("sinks", self.sinks, Sink, WRITES),
        ):
            if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
                raise ConfigError(f"main({name}={shown(given)}) is not a list; write {name}=[...]")
            object.__setattr__(self, name, list(given))  # an iterator would be empty the second time
            for one in getattr(self, name):
                _check_kind(name, one, kind)
                _check_methods(one, kind, methods)

    def facts(self) -> dict[str, Any]:
        """The facts that all ranks must have in common: the code of each callback."""
        return {f"callback {number}": _code_of(type(callback)) for number, callback in enumerate(self.callbacks)}


NO_EXTENSIONS = Extensions()


def _check_kind(name: str, one: object, kind: type) -> None:
    if isinstance(one, type):
        raise ConfigError(f"main({name}=[...]): {one.__name__} is a class; write {one.__name__}(...), which makes one")
    if not isinstance(one, kind):
        raise ConfigError(
            f"main({name}=[...]): {shown(one)} is not a {kind.__name__}; derive its class from {kind.__name__} of {kind.__module__}"
        )


def _check_methods(one: object, kind: type, methods: Sequence[str]) -> None:
    """Raise ConfigError for a method that a run never calls, and for an object of which it would call nothing of its own."""
    own = [name for name in dir(type(one)) if not name.startswith("_") and not hasattr(kind, name)]
    others = [name for name in own if callable(getattr(type(one), name))]
    for name in others:
        if name.startswith("on_"):
            near = difflib.get_close_matches(name, methods, n=1, cutoff=0.6)
            hint = f"the nearest that it calls is {near[0]}" if near else f"it calls {', '.join(methods)}"
            raise ConfigError(
                f"{type(one).__name__}.{name} is never called by a run; {hint}. Rename it, or begin its name with _"
            )
    needed = ("write",) if kind is Sink else methods
    if any(name in getattr(one, "__dict__", {}) or getattr(type(one), name) is not getattr(kind, name) for name in needed):
        return
    what = needed[0] if len(needed) == 1 else f"one of {', '.join(needed)}"
    near = [name for name in others if difflib.get_close_matches(name, needed, n=1, cutoff=0.75)]
    raise ConfigError(f"{type(one).__name__} would do nothing in a run: define {what}{f' (it has {near[0]})' if near else ''}")


def _code_of(kind: type) -> str:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # typed into an interpreter
        source = ""
    return f"{kind.__qualname__} {hashlib.sha256(source.encode()).hexdigest()[:12]}"
