"""Say how much memory each GPU of a run needs, activations included, and which micro-batches fit. It needs no GPU, no data and no weights.

A step of the model runs without values, as it runs on one rank of the layout; see the head of pretrain/train/memory_estimate.py for what is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402

if TYPE_CHECKING:
    from pretrain.config.schema import Config
    from pretrain.train.memory_estimate import MemoryEstimate

GIGABYTE = 10**9
SYSTEM = GIGABYTE
"""What CUDA and NCCL take for themselves, about."""
CHECKPOINTING = ("none", "selective", "full")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file; its data need not exist")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="GPUs of the run (default: 1)")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="of each GPU, in 10^9 bytes: 85 for an 80 GiB H100, 150 for an H200")
    parser.add_argument(
        "--micro-sequences", type=int, nargs="+", metavar="N", help="a table with these micro-batches, and with less or more recomputation"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a configuration value")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.ranks < 1 or min(arguments.micro_sequences or [1]) < 1:
        parser.error("--ranks and --micro-sequences must be at least 1")
    if arguments.gpu_memory is not None and not arguments.gpu_memory > 0:
        parser.error(f"--gpu-memory {arguments.gpu_memory:g} is not above 0")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    return run_tool(lambda: print_estimates(arguments))


def print_estimates(arguments: argparse.Namespace) -> None:
    from pretrain.config.load import load_config

    config, _ = load_config(arguments.config, arguments.overrides)
    room = None if arguments.gpu_memory is None else arguments.gpu_memory * GIGABYTE
    if arguments.micro_sequences is None:
        print("\n".join(in_words(config, arguments.ranks, room)))
    else:
        print_table(config, arguments.ranks, room, sorted(set(arguments.micro_sequences)))


def in_words(config: Config, ranks: int, room: float | None) -> list[str]:
    """A line for each part of the memory."""
    from pretrain.train.memory_estimate import estimate_memory

    found = estimate_memory(config, ranks, room)
    rank, layout = found.fullest, found.layout
    rows, length = config.batch.micro_sequences, config.data.sequence_length
    sharded = f", a share of 1/{layout.state_parts}" if layout.state_parts > 1 else ""
    communication = ", backward and communication need" if ranks > 1 else " and backward need"
    parts = [
        ("weights", rank.weights, ""),
        ("moments of the optimizer", rank.moments, ""),
        ("gradients", rank.gradients, "" if rank.gradients == rank.all_gradients else "those that exist when the most memory is in use"),
        ("weights in the compute format", rank.beside, "gathered by FSDP2" if layout.strategy == "fsdp" else ""),
        ("buffers that gradients are sent from", rank.buffers, ""),
        ("activations", rank.activations, f"with what the loss{communication} for a moment"),
    ]
    return [
        f"{found.parameters:,} parameters, {layout.name} on {ranks} GPU{'s' if ranks > 1 else ''}{sharded}; micro-steps of {rows} x {length} tokens",
        *(f"{size / GIGABYTE:9.2f} GB  {name}{f' ({remark})' if remark else ''}" for name, size, remark in parts if size),
        f"{found.most / GIGABYTE:9.2f} GB  in all{_judged(found.most, room)}",
        *_remarks(config, found),
    ]


def _remarks(config: Config, found: MemoryEstimate) -> list[str]:
    remarks = []
    if len(found.stages) > 1:
        sizes = ", ".join(f"{stage.most / GIGABYTE:.2f}" for stage in found.stages)
        remarks.append(f"GB of the ranks of the pipeline, from the first: {sizes}; the parts are those of the fullest")
    if config.model.experts.count:
        remarks.append("every expert is taken to get as many tokens as the others; a rank whose experts get more needs more")
    return remarks


def _judged(size: int, room: float | None) -> str:
    if room is None:
        return ""
    left = room - size - SYSTEM
    return f", of {room / GIGABYTE:g}: {f'fits, with {left / GIGABYTE:.1f} to spare' if left >= 0 else 'does not fit'} (with {SYSTEM / GIGABYTE:g} for CUDA and NCCL)"


def print_table(config: Config, ranks: int, room: float | None, sizes: list[int]) -> None:
    """A row for each kind of recomputation, a column for each micro-batch. Each cell is printed as soon as it is known."""
    from pretrain.train.memory_estimate import estimate_memory, refuse_micro_sequences, refuse_unknown

    refuse_unknown(config)  # before the rows
    refuse_micro_sequences(sizes[-1], config.data.sequence_length)
    print(f"GB of each of {ranks} GPU{'s' if ranks > 1 else ''}, by sequences of {config.data.sequence_length} tokens in a micro-step")
    print(f"{'activation_checkpointing':26}" + "".join(f"{size:>9}" for size in sizes))
    for kind in CHECKPOINTING:
        print(f"{kind:26}", end="", flush=True)
        for size in sizes:
            most = estimate_memory(with_micro_batch(config, size, kind, ranks), ranks, room).most
            over = "!" if room is not None and most + SYSTEM > room else " "
            print(f"{most / GIGABYTE:8.1f}{over}", end="", flush=True)
        print()
    if room is not None:
        print(f"! does not fit into {room / GIGABYTE:g} GB with {SYSTEM / GIGABYTE:g} GB for CUDA and NCCL")


def with_micro_batch(config: Config, sequences: int, checkpointing: str, ranks: int) -> Config:
    """The configuration with other micro-batches, and at least as many sequences in a step, which the ranks can divide."""
    from pretrain.distributed.launcher import ranks_of_a_sample
    from pretrain.parallel.layout import take_rest

    config = take_rest(config, ranks)
    # A pipeline takes as many micro-batches as it has ranks, or a multiple of them.
    at_once = sequences * max(1, ranks // ranks_of_a_sample(config)) * (config.parallel.pipeline or 1)
    step = -(-config.batch.sequences // at_once) * at_once
    batch = dataclasses.replace(config.batch, micro_sequences=sequences, sequences=step)
    parallel = dataclasses.replace(config.parallel, activation_checkpointing=checkpointing)
    return dataclasses.replace(config, batch=batch, parallel=parallel)


if __name__ == "__main__":
    raise SystemExit(main())
