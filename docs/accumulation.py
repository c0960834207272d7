"""Gradient accumulation and no_sync on the smallest model there is. Run it: python docs/accumulation.py (docs/accumulation.md)."""

import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ITEMS = [((6.0, 2.0), 15.0), ((5.0, 2.0), 12.0)]
LR = 1e-3


def new_model() -> nn.Linear:
    """y = w1·x1 + w2·x2 + b."""
    model = nn.Linear(2, 1)
    model.load_state_dict({"weight": torch.tensor([[0.773, 0.321]]), "bias": torch.tensor([0.067])})
    return model


def loss_of(model: nn.Module, item: tuple[tuple[float, float], float]) -> torch.Tensor:
    x, y = item
    return (model(torch.tensor(x)) - y).square().sum()


def sgd(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
            parameter.grad = None


def values(model: nn.Linear) -> list[float]:
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


def step_per_item() -> list[float]:
    model = new_model()
    for item in ITEMS:
        loss_of(model, item).backward()
        sgd(model)
    return values(model)


def accumulated() -> list[float]:
    model = new_model()
    for item in ITEMS:
        loss_of(model, item).backward()  # adds to .grad
    sgd(model)
    return values(model)


def ddp(rank: int, factor: float, micro_steps: list, defer: bool) -> tuple[list[float], int]:
    """One optimizer step of this rank; its weights after it, and how often gradients were reduced."""
    model, reductions = new_model(), []
    wrapped = DistributedDataParallel(model)

    def average(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        # What DDP does by itself, counted.
        reductions.append(bucket.index())
        small = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(small, async_op=True).get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, average)
    for i, item in enumerate(micro_steps):
        with wrapped.no_sync() if defer and i < len(micro_steps) - 1 else nullcontext():
            (factor * loss_of(wrapped, item)).backward()
    sgd(model)
    return values(model), len(reductions)


def uneven(rank: int, context) -> list[float]:
    """Two steps with three items: rank 0 has both, rank 1 has the second one and then nothing."""
    model = new_model()
    wrapped = DistributedDataParallel(model)
    with context(wrapped):
        for item in ITEMS if rank == 0 else ITEMS[1:]:
            (2.0 * loss_of(wrapped, item)).backward()
            sgd(model)
    return values(model)


def uneven_on_one_process() -> list[float]:
    model = new_model()
    for items in (ITEMS, ITEMS[1:]):
        for item in items:
            loss_of(model, item).backward()
        sgd(model)
    return values(model)


def without_join(rank: int, folder: str) -> None:
    """Without `join`, rank 0 waits in its second backward for a rank that has no more items."""
    limit = timedelta(seconds=3)
    dist.init_process_group("gloo", init_method=f"file://{folder}/waiting", rank=rank, world_size=2, timeout=limit)
    answer = Path(folder) / "answer.txt"
    if rank == 1:
        uneven(rank, nullcontext)
        while not answer.exists():
            time.sleep(0.1)
        return
    try:
        uneven(rank, nullcontext)
        answer.write_text("went on")
    except RuntimeError:
        answer.write_text("waits for rank 1 until the time limit")


def on_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {
        "two DDP ranks, one item each": ddp(rank, 2.0, [ITEMS[rank]], defer=False),
        "two DDP ranks, no factor (wrong)": ddp(rank, 1.0, [ITEMS[rank]], defer=False),
        "two DDP ranks, both items, no_sync": ddp(rank, 1.0, ITEMS[:: 1 - 2 * rank], defer=True),
        "two DDP ranks, both items, sync every": ddp(rank, 1.0, ITEMS[:: 1 - 2 * rank], defer=False),
        "two DDP ranks, three items, join": (uneven(rank, lambda wrapped: wrapped.join()), 2),
    }
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
    without_join(rank, folder)


if __name__ == "__main__":
    one = {"one process, a step per item": (step_per_item(), 0), "one process, accumulated": (accumulated(), 0)}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (folder,), nprocs=2)
        two, other = (torch.load(Path(folder) / f"rank{rank}.pt") for rank in (0, 1))
        waited = (Path(folder) / "answer.txt").read_text()
    for name, (numbers, reductions) in (one | two).items():
        print(f"{name:40}" + "".join(f"{v:8.4f}" for v in numbers) + f"   {reductions} reductions")
    assert two == other, "the ranks ended at different weights"
    print(f"{'two DDP ranks, three items, no join':40}   rank 0 {waited}")
    exact = {name: n for name, (n, _) in (one | two).items() if not any(word in name for word in ("wrong", "per item", "three"))}
    assert all(numbers == accumulated() for numbers in exact.values()), exact  # to the last bit
    assert two["two DDP ranks, three items, join"][0] == uneven_on_one_process()
    print("accumulated on one process = on two DDP ranks = with no_sync, to the last bit")
