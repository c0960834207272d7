"""LitGPT's network, loss and Fabric, put together as `litgpt pretrain` does. It runs in an environment of its own.

Its GPT-2 has no table of positions, and its output head is not tied: neither changes the products that a step makes.
"""

import math
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
from benchmarks.trainers.clock import Clock, Task  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from litgpt import GPT, Config  # noqa: E402
from litgpt.utils import chunked_cross_entropy  # noqa: E402

task = Task.given()
clock = Clock(task.result)
fabric = Fabric(
    accelerator="cpu", devices=task.ranks, strategy="ddp" if task.ranks > 1 else "auto",
    precision={"fp32": "32-true", "bf16": "bf16-mixed"}[task.format],
)  # fmt: skip
fabric.launch()
fabric.seed_everything(0, verbose=False)
config = Config(
    block_size=task.length, padded_vocab_size=task.vocabulary, n_layer=task.layers, n_head=task.heads, n_embd=task.dim,
    rotary_percentage=0.0, parallel_residual=False, bias=True, lm_head_bias=False, norm_class_name="LayerNorm",
    mlp_class_name="GptNeoxMLP", gelu_approximate="tanh", intermediate_size=4 * task.dim,
)  # fmt: skip
model = fabric.setup(torch.compile(GPT(config)) if task.compiled else GPT(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
optimizer = fabric.setup_optimizers(optimizer)
loss = None
for step in range(task.steps):
    for group in optimizer.param_groups:
        group["lr"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * step / task.steps))
    for micro in range(task.accumulation):
        window = torch.from_numpy(task.windows((step * task.accumulation + micro) * task.ranks + fabric.global_rank))
        with fabric.no_backward_sync(model, enabled=micro < task.accumulation - 1):
            loss = chunked_cross_entropy(model(window[:, :-1].contiguous()), window[:, 1:].contiguous())
            fabric.backward(loss / task.accumulation)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    clock.stamp()
clock.write(float(loss.detach()))
