"""Relative position bias (T5, Raffel et al., arXiv 1910.10683, section 2.1), shared by all layers of a stack."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from pretrain.models.layers import Embedding


class RelativeBias(nn.Module):
    """A learned number per head and bucket of distances. `causal`: of a decoder, which sees no later position."""

    def __init__(self, heads: int, buckets: int, max_distance: int, causal: bool) -> None:
        super().__init__()
        self.buckets, self.max_distance, self.causal = buckets, max_distance, causal
        self.table = Embedding(buckets, heads)

    def forward(self, start: int, stop: int, device: torch.device) -> Tensor:
        """What is added to the scores of queries [start, stop) over keys [0, stop), [1, H, T, S]; -inf at later positions of a decoder."""
        distances = _distances(start, stop, device)
        bias_TSH = self.table(buckets_of(distances, self.buckets, self.max_distance, self.causal))
        bias_HTS = bias_TSH.permute(2, 0, 1)
        return (bias_HTS.masked_fill(distances > 0, -torch.inf) if self.causal else bias_HTS)[None]


@functools.lru_cache(8)
def _distances(start: int, stop: int, device: torch.device) -> Tensor:
    """Key position minus query position, [T, S]."""
    return torch.arange(stop, device=device)[None] - torch.arange(start, stop, device=device)[:, None]


def buckets_of(distances: Tensor, buckets: int, max_distance: int, causal: bool) -> Tensor:
    """The bucket of each distance (key minus query), int64: exact up to half of them, then by logarithm up to `max_distance`.

    Of an encoder, one half of the buckets is for later keys; of a decoder, those are all in the bucket of distance 0.
    """
    if causal:
        offset, distances = 0, (-distances).clamp(min=0)
    else:
        buckets //= 2
        offset, distances = (distances > 0).long() * buckets, distances.abs()
    exact = buckets // 2
    # In fp32 and in this order, as in T5's own code: where a distance lies on the border of two buckets, rounding decides.
    ratio = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distances < exact, distances, far)
