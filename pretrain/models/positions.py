"""Positions in attention: rotary embedding (Su et al., arXiv 2104.09864) with its scaling to longer contexts, and T5's relative bias
(Raffel et al., arXiv 1910.10683, section 2.1).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pretrain.config.attention_schema import Rope
from pretrain.config.model_schema import Model
from pretrain.models.dropout import every_row
from pretrain.models.layers import Embedding

Tables = tuple[Tensor, Tensor]
"""Cosines and sines, fp32, of the rotated width, halves repeated: [T, R], or [B, 1, T, R] where sequences differ in positions."""


def rotated_width(config: Model) -> int:
    """Components of a head that are rotated, from its beginning."""
    if config.latent.kv_rank:
        return config.latent.rope_dim
    return int(config.head_dim * config.rope.fraction)


def rotary_tables(config: Model, positions: Tensor, length: int, local: bool = False) -> Tables:
    """Tables [T, R] for positions [T], or [B, T, R] for [B, T]. `length`: of the sequence; `local`: for layers with a sliding window."""
    rope, width = config.rope, rotated_width(config)
    theta = rope.local_theta if local else rope.theta
    scaled = rope.scaling != "none" and (rope.scale_local or not local)
    if scaled and rope.scaling == "dynamic" and length > rope.original_length:
        # The base grows so that the slowest component has turned no further at the end than it had in training.
        stretch = rope.factor * length / rope.original_length - (rope.factor - 1)
        theta = theta * stretch ** (width / (width - 2))
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.int64).float() / width
    frequency_R = 1.0 / theta**exponent
    amplitude = 1.0
    if scaled and rope.scaling == "linear":
        frequency_R = frequency_R / rope.factor
    elif scaled and rope.scaling == "llama3":
        frequency_R = _llama3(frequency_R, rope)
    elif scaled and rope.scaling == "yarn":
        frequency_R = _yarn(frequency_R, rope, theta, width)
        amplitude = yarn_amplitude(rope)
    angle = positions.float()[..., None] * frequency_R
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos() * amplitude, angle.sin() * amplitude


def _llama3(frequency: Tensor, rope: Rope) -> Tensor:
    """By wavelength: short waves are kept, long ones interpolated, those in between blended (Llama 3.1)."""
    wavelength = 2 * math.pi / frequency
    turns = rope.original_length / wavelength
    kept = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
    blended = (1 - kept) * frequency / rope.factor + kept * frequency
    scaled = torch.where(wavelength > rope.original_length / rope.low_frequency, frequency / rope.factor, blended)
    return torch.where(wavelength < rope.original_length / rope.high_frequency, frequency, scaled)


def _yarn(frequency: Tensor, rope: Rope, theta: float, width: int) -> Tensor:
    """NTK by parts (Peng et al., arXiv 2309.00071, section 3.2): components that turn fast are kept, slow ones interpolated."""

    def component(turns: float) -> float:
        return width * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = component(rope.beta_fast), component(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(len(frequency), device=frequency.device, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return frequency / rope.factor * (1 - kept) + frequency * kept


def yarn_amplitude(rope: Rope) -> float:
    """Factor on the rotated vectors (arXiv 2309.00071, section 3.4; DeepSeek-V2 divides two of them)."""
    if rope.attention_factor:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """0.1 × weight × ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rotate(x_BHTG: Tensor, tables: Tables, layout: str = "half") -> Tensor:
    """Rotate queries or keys by position. Components beyond the tables' width are left as they are.

    The pairs are i and i + half the width, as in Hugging Face's Llama. An `interleaved` head, whose pairs are neighbours, is
    brought into that order first and stays in it: scores do not change when queries and keys are permuted alike.
    """
    cos, sin = (table.to(x_BHTG.dtype) for table in tables)
    width = cos.shape[-1]
    turning, rest = x_BHTG[..., :width], x_BHTG[..., width:]
    if layout == "interleaved":
        turning = turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    if x_BHTG.device.type == "cpu" and not torch.compiler.is_compiling():
        turned = _Turn.apply(turning, cos, sin)
    else:
        first, second = turning.chunk(2, dim=-1)
        turned = turning * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


class _Turn(torch.autograd.Function):
    """The same in two passes instead of five, and two instead of eight backward: the gradient turns the other way.

    Both halves of the tables must be alike, and get no gradient. A second derivative is not to be had.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _turned(g, *ctx.saved_tensors, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    first, second = slice(0, half), slice(half, None)
    turned = x * cos
    turned[..., first].addcmul_(x[..., second], sin[..., first], value=-direction)
    turned[..., second].addcmul_(x[..., first], sin[..., second], value=direction)
    return turned


class RelativeBias(nn.Module):
    """A learned number per head and bucket of distances. `causal`: of a decoder, which sees no later position."""

    def __init__(self, heads: int, buckets: int, max_distance: int, causal: bool) -> None:
        super().__init__()
        self.buckets, self.max_distance, self.causal = buckets, max_distance, causal
        self.table = Embedding(buckets, heads)
        self.rows_at_hand = every_row
        """A function that says which queries the biases are for. It says all, unless parallel/ sets another one."""

    def forward(self, start: int, stop: int, device: torch.device) -> Tensor:
        """What is added to the scores of queries [start, stop) over keys [0, stop), [1, H, T, S]; -inf at later positions of a decoder."""
        distances = self.rows_at_hand(_distances(start, stop, device)[None])[0]
        bias_TSH = self.table(buckets_of(distances, self.buckets, self.max_distance, self.causal))
        bias_HTS = bias_TSH.permute(2, 0, 1)
        return (bias_HTS.masked_fill(distances > 0, -torch.inf) if self.causal else bias_HTS)[None]


def _distances(start: int, stop: int, device: torch.device) -> Tensor:
    """Key position minus query position, [T, S]."""
    return torch.arange(stop, device=device)[None] - torch.arange(start, stop, device=device)[:, None]


def buckets_of(distances: Tensor, buckets: int, max_distance: int, causal: bool) -> Tensor:
    """The bucket of each distance (key minus query), int64: exact up to half of them, then by logarithm up to `max_distance`.

    An encoder has one half of the buckets for later keys. A decoder puts those into the bucket of distance 0.
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
