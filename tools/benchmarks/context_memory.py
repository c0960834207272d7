"""What one long sequence costs a rank under each method of context parallelism: memory and time of a forward and a backward pass.

python tools/benchmarks/context_memory.py --ranks 4 --length 16384
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # a clone works without being installed

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as processes  # noqa: E402

from pretrain.config.model_schema import Model  # noqa: E402
from pretrain.config.schema import Config  # noqa: E402
from pretrain.distributed import ranks as distributed  # noqa: E402
from pretrain.distributed.mesh import Mesh  # noqa: E402
from pretrain.models import build_network  # noqa: E402
from pretrain.models.families import complete  # noqa: E402
from pretrain.parallel.context import ContextAxis  # noqa: E402
from pretrain.parallel.initialise import initialise  # noqa: E402
from pretrain.parallel.ring import RingAxis  # noqa: E402

METHODS = {"allgather": ContextAxis, "ring": RingAxis}
MEGABYTE = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"ranks": 4, "length": 16384, "dim": 512, "layers": 4, "heads": 8, "kv-heads": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    args = parser.parse_args()
    print(
        f"{args.length} positions, {args.ranks} ranks, {args.layers} layers of {args.dim}, {args.kv_heads} of {args.heads} heads have keys"
    )
    print("method      kept for backward, MB  peak above weights, MB  seconds  CPU seconds")
    for method in METHODS:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        queue = processes.get_context("spawn").SimpleQueue()
        processes.start_processes(_measure, (method, args, port, queue), args.ranks, start_method="spawn")
        rows = [queue.get() for _ in range(args.ranks)]
        kept, peak, seconds, busy = (max(column) for column in zip(*rows))
        print(f"{method:<10}  {kept / MEGABYTE:21.0f}  {peak / MEGABYTE:22.0f}  {seconds:7.1f}  {busy:11.1f}", flush=True)
    return 0


def _measure(rank: int, method: str, args: argparse.Namespace, port: int, queue) -> None:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    torch.set_num_threads(1)
    mesh = Mesh({"context": args.ranks}, distributed.start(Config(), alone=False))
    shape = Model(family="llama", dim=args.dim, layers=args.layers, heads=args.heads, kv_heads=args.kv_heads, vocab_size=1000)
    with torch.device("meta"):
        network = build_network(complete(shape, args.length))
    METHODS[method](mesh).split(network)
    network.to_empty(device="cpu")
    initialise(network, 0)
    _pass(network, 256)  # what is made once
    network.zero_grad(set_to_none=False)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, started, used = _resident("VmRSS"), time.monotonic(), time.process_time()
    kept = _pass(network, args.length)
    queue.put((kept, _resident("VmHWM") - before, time.monotonic() - started, time.process_time() - used))
    distributed.stop()


def _pass(network: torch.nn.Module, length: int) -> int:
    """A forward and a backward pass. Returned are the bytes that autograd keeps between them, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ids = torch.arange(length + 1)[None] % 1000
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        losses = network(tokens_BT=ids[:, :-1], targets_BT=ids[:, 1:])
    losses.sum().backward()
    return sum(size for place, size in kept.items() if place not in weights)


def _resident(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    raise SystemExit(main())
