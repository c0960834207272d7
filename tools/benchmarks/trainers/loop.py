"""A loop as people write it after nanoGPT's: autocast, fused AdamW, clipping, DDP with no_sync."""

import contextlib
import math
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from benchmarks.trainers.clock import Clock, Task  # noqa: E402
from benchmarks.trainers.plain_network import Network  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

task = Task.given()
clock = Clock(task.result)


if task.ranks > 1:
    dist.init_process_group("gloo")
rank = dist.get_rank() if task.ranks > 1 else 0
torch.manual_seed(0)
network = Network(task.dim, task.layers, task.heads, task.vocabulary, task.length)
groups = [
    {"params": [p for p in network.parameters() if p.dim() > 1], "weight_decay": 0.1},
    {"params": [p for p in network.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
called = torch.compile(network) if task.compiled else network
called = DistributedDataParallel(called) if task.ranks > 1 else called
casting = torch.autocast("cpu", dtype=torch.bfloat16, enabled=task.format == "bf16")
for step in range(task.steps):
    for micro in range(task.accumulation):
        window = torch.from_numpy(task.windows((step * task.accumulation + micro) * task.ranks + rank))
        last = micro == task.accumulation - 1
        with contextlib.nullcontext() if last or task.ranks == 1 else called.no_sync():
            with casting:
                loss = called(window[:, :-1], window[:, 1:]) / task.accumulation
            loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * step / task.steps))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    clock.stamp()
clock.write(float(loss.detach()) * task.accumulation)
if task.ranks > 1:
    dist.destroy_process_group()
