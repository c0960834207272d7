"""What takes a download back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pretrain.checkpoint import files
from pretrain.distributed.ranks import Ranks


@dataclass
class Undo:
    """What a download has changed in the run directory, for a start that is refused after it."""

    made: list[Path] = field(default_factory=list)
    replaced: list[tuple[Path, bytes | None]] = field(default_factory=list)

    def run(self, ranks: Ranks) -> None:
        """Leave the directory as it was before. The main rank does it."""
        if not ranks.is_main:
            return
        for path, before in reversed(self.replaced):
            path.unlink(missing_ok=True) if before is None else path.write_bytes(before)
        for path in self.made:
            path.unlink() if path.is_file() else files.remove(path)
