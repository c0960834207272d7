"""Whether the data that ranks read are intact."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from pretrain.data.shards.reader import Holding
from pretrain.errors import DataError, UserError

_SHARED = frozenset(
    "beegfs ceph cifs dvs fuse.ceph-fuse fuse.glusterfs fuse.juicefs gpfs lustre nfs nfs4 panfs pvfs2 smb3 wekafs".split()
)
"""File systems of a network, as the kernel names them. Their clients on all nodes see the same inode numbers and times."""


class RanksOfRun(Protocol):
    """The part of `distributed.ranks.Ranks` that checking needs."""

    rank: int

    def gather(self, name: str, value: Any) -> list[Any]: ...

    def attempt(self, name: str, action: Callable[[], Any], kind: type[UserError], storage: bool = False) -> Any: ...

    def in_pieces(self, name: str) -> AbstractContextManager[Callable[[int], object]]: ...


def verify_everywhere(held: list[tuple[str, Holding]], full: bool, ranks: RanksOfRun) -> bool:
    """Check that all ranks read intact data; raise DataError on every rank if not. Return whether files were hashed.

    Ranks have agreed on the content of their manifests before: `Plan.facts` names it.

    `held`: the data of the run (`TrainingData.holdings`). The size of every file is compared, and with `full` its hash. Ranks that
    see the same files, on a network file system or on one host, share the work. The ranks of a node look at what lies on its own disk.
    """
    host = socket.gethostname()
    places = ranks.attempt(
        "places of the data", lambda: [_place(holding.manifest_file, host) for _, holding in held], DataError
    )
    everywhere = ranks.gather("places of the data", places)
    name = "hashes of the data" if full else "files of the data"

    def verify() -> None:
        dealt: dict[tuple[int, ...], int] = defaultdict(int)
        with ranks.in_pieces(name) as seen:  # one rank may have far more to hash than another
            for number, (key, holding) in enumerate(held):
                together = tuple(rank for rank, there in enumerate(everywhere) if there[number] == places[number])
                # Each directory goes on where the one before it ended: many small ones would all begin with the first ranks.
                part = (together.index(ranks.rank) - dealt[together]) % len(together)
                try:
                    holding.verify(part, len(together), hashes=full, seen=seen)
                except DataError as error:
                    raise DataError(f"{key}: {error}") from error
                dealt[together] += holding.pieces_to_verify

    ranks.attempt(name, verify, DataError, storage=True)
    return full and bool(held)


def _place(file: Path, host: str) -> tuple[str, int, int, int]:
    """A value that is equal for ranks that see the same file. Disks and images of different nodes may be exact copies, so what is not
    known to be shared counts as its host's own.
    """
    with file.open("rb") as opened:
        status = os.fstat(opened.fileno())
        owner = "" if _file_system(opened.fileno()) in _SHARED else host
    return owner, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _file_system(descriptor: int, process: Path = Path("/proc/self")) -> str | None:
    """The kind of file system on which an open file lies; None if the kernel does not say.

    The kernel names the file's mount. A device number would not tell: Lustre's looks like that of a disk, and btrfs has none.
    """
    try:
        facts = (process / "fdinfo" / str(descriptor)).read_text()
        mounts = (process / "mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    numbers = [line.split()[1] for line in facts.splitlines() if line.startswith("mnt_id:")]
    # "27 1 254:0 / /data rw,relatime shared:1 - ext4 /dev/vda rw"; spaces in paths are written as \040.
    kinds = {mount.split()[0]: mount.partition(" - ")[2].split()[0] for mount in mounts}
    return kinds.get(numbers[0]) if numbers else None
