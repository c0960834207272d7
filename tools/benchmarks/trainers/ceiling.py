"""The matrix products of the task's layers and of its output head alone, forward and backward: what no program can be faster than."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[3])]

import torch  # noqa: E402
from benchmarks.trainers.clock import Clock, Task  # noqa: E402

from pretrain.distributed.host_memory import keep_freed_memory  # noqa: E402
from pretrain.train.number_format import training_product  # noqa: E402

keep_freed_memory()
task = Task.given()
clock = Clock(task.result)
rows, dim = task.micro * task.length, task.dim
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[task.format]
block = [training_product(rows, *sizes, dtype) for sizes in ((dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim))]
head = training_product(rows, dim, task.vocabulary, dtype)
for _ in range(task.steps):
    for _ in range(task.accumulation):
        for product in block * task.layers:
            product()
        head()
    clock.stamp()
clock.write(None)
