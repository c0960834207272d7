"""A loop as people write it after nanoGPT's: autocast, fused AdamW, clipping, DDP with no_sync, and the logits of a micro-batch at once."""

import contextlib
import math
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from benchmarks.trainers.clock import Clock, Task  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

task = Task.given()
clock = Clock(task.result)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(task.dim), nn.LayerNorm(task.dim)
        self.qkv, self.projection = nn.Linear(task.dim, 3 * task.dim), nn.Linear(task.dim, task.dim)
        self.up, self.down = nn.Linear(task.dim, 4 * task.dim), nn.Linear(4 * task.dim, task.dim)

    def forward(self, x):
        heads = [
            part.unflatten(-1, (task.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(task.dim, dim=2)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(task.vocabulary, task.dim), nn.Embedding(task.length, task.dim)
        self.blocks = nn.ModuleList(Block() for _ in range(task.layers))
        self.norm, self.head = nn.LayerNorm(task.dim), nn.Linear(task.dim, task.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(
            lambda module: nn.init.normal_(module.weight, std=0.02) if isinstance(module, (nn.Linear, nn.Embedding)) else None
        )

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(task.length))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


if task.ranks > 1:
    dist.init_process_group("gloo")
rank = dist.get_rank() if task.ranks > 1 else 0
torch.manual_seed(0)
network = Network()
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
