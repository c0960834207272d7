"""run.json of a run's copy in an object store: which checkpoints are complete there, and which start of the run may write."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pretrain.storage import unrepeated

FORMAT, VERSION = "pretrain-copies", 1
_FOLDER = re.compile(r"step-([0-9]{8,18})-[0-9a-f]{12}")


def is_folder_of_copy(name: str) -> bool:
    """Whether a folder of this name is a copy, perhaps an unfinished one."""
    return _FOLDER.fullmatch(name) is not None


@dataclass(frozen=True)
class Copy:
    """A complete copy of a checkpoint. `skipped`: steps in a row that were skipped before it. `timeline`: as its state.json has it."""

    folder: str
    step: int
    skipped: int = 0
    timeline: list[dict[str, Any]] = field(default_factory=list, hash=False)

    @property
    def state(self) -> dict[str, Any]:
        """What decides whether it is in the past of a run (`choose.descends`)."""
        return {"step": self.step, "timeline": self.timeline}


@dataclass(frozen=True)
class CopiesIndex:
    """`copies` by rising step, all of one time line: that of `start`. `abandoned`: folders that no start takes any more."""

    start: str = ""
    host: str = ""
    pid: int = 0
    since: str = ""
    timeline: list[dict[str, Any]] = field(default_factory=list, hash=False)
    copies: tuple[Copy, ...] = ()
    abandoned: tuple[str, ...] = ()

    @classmethod
    def of_start(
        cls, start: str, timeline: list[dict[str, Any]], copies: Iterable[Copy], abandoned: Iterable[str]
    ) -> CopiesIndex:
        """The index of a start of this process."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(start, socket.gethostname(), os.getpid(), now, timeline, tuple(copies), tuple(abandoned))

    def with_copy(self, copy: Copy) -> CopiesIndex:
        """With one more. It takes the place of another one of its step, which is abandoned."""
        others = [other for other in self.copies if other.step != copy.step]
        left = [other.folder for other in self.copies if other.step == copy.step and other.folder != copy.folder]
        abandoned = [folder for folder in self.abandoned if folder != copy.folder]
        copies = sorted([*others, copy], key=lambda one: one.step)
        return dataclasses.replace(self, copies=tuple(copies), abandoned=(*abandoned, *left))

    def without(self, gone: Iterable[Copy]) -> CopiesIndex:
        """Without some of the copies."""
        names = {copy.folder for copy in gone}
        return dataclasses.replace(self, copies=tuple(copy for copy in self.copies if copy.folder not in names))

    def to_json(self) -> bytes:
        """The content of run.json."""
        return (json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n").encode()

    @classmethod
    def parse(cls, content: bytes) -> CopiesIndex:
        """From the content of run.json. Raises ValueError, or RecursionError, for anything else."""
        found = json.loads(content, object_pairs_hook=unrepeated, parse_constant=_refuse_constant)
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ValueError(f"not a {FORMAT}")
        if (version := found.pop("version", None)) != VERSION:
            raise ValueError(f"version {version!r} is not supported; this program reads version {VERSION}")
        kinds = {"start": str, "host": str, "pid": int, "since": str, "timeline": list, "copies": list, "abandoned": list}
        if {name: type(value) for name, value in found.items()} != kinds:
            raise ValueError("its entries are not those of such a file")
        copies = tuple(_copy_of(one) for one in found.pop("copies"))
        if [copy.step for copy in copies] != sorted({copy.step for copy in copies}):
            raise ValueError("its copies are not in the order of their steps")
        if not all(isinstance(name, str) for name in found["abandoned"]):
            raise ValueError("`abandoned` is no list of names")
        return cls(**{**found, "abandoned": tuple(found["abandoned"])}, copies=copies)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _copy_of(found: Any) -> Copy:
    kinds = {"folder": str, "step": int, "skipped": int, "timeline": list}
    if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != kinds:
        raise ValueError("a copy in it is not one")
    copy = Copy(**found)
    name = _FOLDER.fullmatch(copy.folder)
    if name is None or int(name[1]) != copy.step or copy.skipped < 0:
        raise ValueError(f"{copy.folder!r} is no name of a copy")
    return copy
