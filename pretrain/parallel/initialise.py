"""Initial weights as a pure function of (seed, parameter name, shape), on every layout and device.

A parameter is drawn in blocks of rows, each from its own counter-based generator (Philox, Salmon et al., SC'11). So a rank that
holds a shard draws only its own rows, without communication or a whole tensor. The values are the same as on one process. The
values are drawn on the host, so that a GPU starts from the same bits as a CPU.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.distributed.cores import cores_of_host
from pretrain.distributed.launcher import launched_ranks, ranks_of_host
from pretrain.distributed.shards import local, place_of

BLOCK_ELEMENTS = 1 << 20  # part of the definition of the values: changing it changes every initial weight


def draw_rows(seed: int, name: str, shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of the standard normal values of a parameter, fp32."""
    row_size = int(np.prod(shape[1:], dtype=np.int64))
    block_rows = max(1, BLOCK_ELEMENTS // row_size)
    rows = np.empty((max(0, stop - start), *shape[1:]), dtype=np.float32)

    def draw(block: int) -> None:
        first, last = block * block_rows, min((block + 1) * block_rows, shape[0])
        key = hashlib.blake2b(f"{seed}/{name}/{list(shape)}/{block}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        values = generator.standard_normal((last - first, *shape[1:]), dtype=np.float32)
        low, high = max(first, start), min(last, stop)
        rows[low - start : high - start] = values[low - first : high - first]

    blocks = range(start // block_rows, -(-stop // block_rows))
    threads = min(len(blocks), _threads())
    if threads < 2:
        for block in blocks:
            draw(block)
    else:  # numpy draws without Python's lock
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(draw, blocks))
    return rows


@functools.cache
def _threads() -> int:
    """This process's share of the cores, which are idle while weights are drawn."""
    return max(1, cores_of_host() // ranks_of_host(launched_ranks()[2]))


@torch.no_grad()
def initialise(model: nn.Module, seed: int, scales: Mapping[str, float] = MappingProxyType({})) -> None:
    """Fill every parameter of a materialised network, sharded or not. `scales`: factors of standard deviations, by name."""
    for name, parameter in model.named_parameters():
        part = local(parameter)
        if part.is_meta:  # where shapes are all there is
            continue
        initial, place = model.initial(name), place_of(parameter)
        if callable(initial):
            # Every rank draws all of it: only vectors and small matrices have rules that are not normal distributions.
            part.copy_(initial(seed)[place])
            continue
        mean, std = initial
        if std == 0:
            part.fill_(mean)
        else:
            part.copy_(_normal_values(tuple(parameter.shape), place, name, seed).mul_(std * scales.get(name, 1.0)).add_(mean))


def _normal_values(shape: tuple[int, ...], place: tuple[slice, ...], name: str, seed: int) -> Tensor:
    rows = draw_rows(seed, name, shape, place[0].start, place[0].stop)
    return torch.from_numpy(np.ascontiguousarray(rows[(slice(None), *place[1:])]))
