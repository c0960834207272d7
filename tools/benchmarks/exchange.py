"""A rank of the benchmark of collectives: it times each operation by size, in turns, and the main rank writes what it found."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

Made = tuple[Callable[[], object], Callable[[], bool]]
"""An operation, and whether its result is right after one call."""


def operations(size: int, device: torch.device) -> dict[str, Made]:
    """The operations on `size` bytes of fp32, those of the whole result or of the whole input."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = size // 4
    share = count // ranks
    whole, part = torch.full((count,), rank + 1.0, device=device), torch.full((share,), rank + 1.0, device=device)
    received, total = torch.zeros_like(whole), ranks * (ranks + 1) / 2
    sent, reduced, scattered = whole.clone(), whole.clone(), part.clone()
    gathered, exchanged = torch.zeros_like(whole), torch.zeros_like(whole)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    numbers = torch.arange(1.0, ranks + 1, device=device)

    def shift() -> None:
        ways = [dist.P2POp(dist.isend, whole, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()

    def in_order(tensor: torch.Tensor) -> bool:
        return bool((tensor.view(ranks, share) == numbers[:, None]).all())

    return {
        "broadcast": (lambda: dist.broadcast(sent, 0), lambda: bool((sent == 1).all())),
        "all-reduce": (lambda: dist.all_reduce(reduced), lambda: bool((reduced == total).all()) and reduced.zero_() is reduced),
        "all-gather": (lambda: dist.all_gather_into_tensor(gathered, part), lambda: in_order(gathered)),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(scattered, whole), lambda: bool((scattered == total).all())),
        "all-to-all": (lambda: dist.all_to_all_single(exchanged, whole), lambda: in_order(exchanged)),
        "send/recv": (shift, lambda: bool((received == before + 1).all())),
    }  # fmt: skip


def seconds_of(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Seconds of one call, on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = torch.tensor([(time.perf_counter() - started) / times], dtype=torch.float64, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def main() -> None:
    task = json.loads(sys.argv[1])
    dist.init_process_group(task["backend"])
    device = torch.device("cpu")
    if task["backend"] == "nccl":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    calls, times = {}, {}
    for size in task["sizes"]:
        for name, (call, is_right) in operations(size, device).items():
            call()
            if not is_right():
                raise SystemExit(f"{name} of {size} bytes gives a wrong result")
            calls[name, size] = call
            # Every rank has the slowest rank's time, so that all make the same number of calls.
            times[name, size] = max(2, min(1000, int(task["seconds"] / seconds_of(call, 2, device))))
    found = {key: [] for key in calls}
    for _ in range(task["turns"]):
        for key, call in calls.items():
            found[key].append(seconds_of(call, times[key], device))
    if dist.get_rank() == 0:
        lines = [{"operation": name, "size": size, "seconds": seconds} for (name, size), seconds in found.items()]
        Path(task["result"]).write_text(json.dumps(lines))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads drop their tensors


if __name__ == "__main__":
    main()
