"""The speed of collectives by size and number of ranks, beside a ring's formula that is fitted to this machine."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.measure import Options, Row, require, require_device, run_program

SIZES = (4096, 65_536, 1 << 20, 1 << 24)
_WORKER = Path(__file__).resolve().parent / "exchange.py"
# By operation: hops of a ring of n ranks, and bytes that leave a rank for each byte of the whole tensor.
HOPS = {
    "broadcast": lambda n: n - 1, "all-reduce": lambda n: 2 * (n - 1), "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: n - 1, "all-to-all": lambda n: n - 1, "send/recv": lambda n: 1,
}  # fmt: skip
MOVED = {
    "broadcast": lambda n: 1.0, "all-reduce": lambda n: 2 * (n - 1) / n, "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n, "all-to-all": lambda n: (n - 1) / n, "send/recv": lambda n: 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Exchange:
    """An operation on `size` bytes, and the seconds of one call in each turn on the slowest rank."""

    operation: str
    ranks: int
    size: int
    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def hops(self) -> int:
        return HOPS[self.operation](self.ranks)

    @property
    def moved(self) -> int:
        """Bytes that leave a rank in a ring."""
        return round(MOVED[self.operation](self.ranks) * self.size)


def exchanges(ranks: int, sizes: Sequence[int], backend: str, options: Options) -> list[Exchange]:
    """Every operation by size, on processes that torchrun starts. Sizes are rounded to equal shares of fp32 numbers."""
    unit = 4 * ranks
    rounded = sorted({options.scaled(size, unit) // unit * unit for size in sizes})
    result = options.work / f"exchanges-{ranks}.json"
    seconds = options.seconds / (6 * len(rounded) * options.turns)
    task = {"backend": backend, "sizes": rounded, "seconds": seconds, "turns": options.turns, "result": str(result)}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = run_program([*start, str(_WORKER), json.dumps(task)])
    wrong = [line for line in done.stderr.splitlines() if "Error" in line or "wrong result" in line] or done.stderr.splitlines()
    require(done.returncode == 0, f"{ranks} ranks fail: {' '.join(wrong[:1])}")
    found = json.loads(result.read_text())
    return [Exchange(one["operation"], ranks, one["size"], tuple(one["seconds"])) for one in found]


def fit_ring(found: Sequence[Exchange]) -> tuple[float, float]:
    """Seconds of a hop and seconds of a byte: the least squares of relative errors. Neither is negative."""
    taken = np.array([one.best for one in found])
    table = np.array([[one.hops, one.moved] for one in found]) / taken[:, None]
    hop, byte = np.linalg.lstsq(table, np.ones(len(found)), rcond=None)[0]
    if hop < 0 or byte < 0:  # one of both explains all
        alone = [(column @ np.ones(len(found))) / (column @ column) for column in table.T]
        errors = [np.square(column * value - 1).sum() for column, value in zip(table.T, alone)]
        hop, byte = (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])
    return float(hop), float(byte)


def collectives(ranks: Sequence[int], sizes: Sequence[int], backend: str, options: Options) -> list[Row]:
    """Milliseconds of each operation beside the formula: hops x latency + bytes / bandwidth."""
    rows = []
    require_device("cuda" if backend == "nccl" else "cpu", f"--backend {backend}")
    for count in ranks:
        options.say(f"{count} ranks")
        found = exchanges(count, sizes, backend, options)
        hop, byte = fit_ring(found)
        part = f"{backend}, {count} ranks"
        rows.append(Row(part, "ring: latency of a hop", hop * 1e6, "µs", "wall", better="lower", note="fitted"))
        if byte:
            rows.append(Row(part, "ring: bandwidth", 1e-9 / byte, "GB/s", "wall", note="fitted"))
        for one in found:
            formula = one.hops * hop + one.moved * byte
            note = f"{one.moved:,} bytes leave a rank: {one.moved / one.best / 1e9:.3g} GB/s; "
            note += f"{one.best / formula:.2f} x the formula"
            rows.append(
                Row(
                    part, f"{one.operation} of {one.size:,} bytes", one.best * 1e3, "ms", "wall",
                    statistics.median(one.seconds) * 1e3, better="lower", baseline=formula * 1e3, note=note,
                )
            )  # fmt: skip
    return rows
