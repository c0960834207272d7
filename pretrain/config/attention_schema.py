"""The model's sections on attention and positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pretrain.config.keys import Except, key

Projection = Literal["query", "key", "value", "output"]

# Upper limits: well beyond any model, and low enough that a slip of the keyboard is refused at its key and not by an allocation.
WIDEST, LONGEST = 2**24, 2**40

SCALED = {"model.rope.scaling": Except("none")}
LLAMA3, YARN = {"model.rope.scaling": ("llama3",)}, {"model.rope.scaling": ("yarn",)}
WINDOWED = {"model.attention.window": Except(0)}
LINEAR = {"model.linear_attention.pattern": Except([False])}
DELTA = LINEAR | {"model.linear_attention.kind": ("gated_delta",)}


@dataclass
class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and its scaling to longer contexts."""

    theta: float | None = key(None, "Base of the rotation frequencies; 10000 by default.", gt=1, le=1e12)
    local_theta: float | None = key(
        None, "Base in layers with a sliding window; `theta` by default.", gt=1, le=1e12, when=WINDOWED
    )
    fraction: float | None = key(None, "Share of a head's width that is rotated, from its beginning; 1 by default.", gt=0, le=1)
    layout: Literal["half", "interleaved"] | None = key(
        None, "Which components of a head make a pair: i and i + half the width, or neighbours."
    )
    pattern: list[bool] | None = key(None, "Which layers rotate, repeated over the layers; [true] by default.")
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] | None = key(
        None,
        "How rotary frequencies are scaled: `linear` position interpolation (arXiv 2306.15595), `dynamic` NTK (base grows with the length beyond "
        "`original_length`), `llama3` (by wavelength), `yarn` (arXiv 2309.00071).",
    )
    factor: float | None = key(
        None, "How many times `original_length` the scaled positions reach; 1 by default.", ge=1, le=1e6, when=SCALED
    )
    original_length: int | None = key(
        None,
        "Length the unscaled model was trained at, tokens; `max_sequence_length` by default.",
        ge=1,
        le=LONGEST,
        when=SCALED,
    )
    low_frequency: float | None = key(
        None,
        "`llama3`: waves longer than `original_length` / `low_frequency` are scaled fully; below `high_frequency`.",
        gt=0,
        le=1e6,
        when=LLAMA3,
    )
    high_frequency: float | None = key(
        None, "`llama3`: waves shorter than `original_length` / `high_frequency` are not scaled.", gt=0, le=1e6, when=LLAMA3
    )
    beta_fast: float | None = key(
        None, "`yarn`: components that turn more often than this in original_length are kept.", gt=0, le=1e6, when=YARN
    )
    beta_slow: float | None = key(
        None, "`yarn`: components that turn less often than this are scaled fully.", gt=0, le=1e6, when=YARN
    )
    attention_factor: float | None = key(
        None, "`yarn`: factor on the rotated vectors; 0 derives it from `factor`.", ge=0, le=1e6, when=YARN
    )
    mscale: float | None = key(
        None, "`yarn` of DeepSeek: weight of the derived attention factor; 0: not used.", ge=0, le=1e6, when=YARN
    )
    mscale_all_dim: float | None = key(
        None, "`yarn` of DeepSeek: the same for all components, on the scores; 0: not used.", ge=0, le=1e6, when=YARN
    )
    truncate: bool | None = key(None, "`yarn`: round the range of components that are blended to whole ones.", when=YARN)
    scale_local: bool | None = key(
        None, "Whether layers with a sliding window are scaled as well; true by default.", when=WINDOWED
    )


@dataclass
class Relative:
    """Relative position bias (T5, Raffel et al., arXiv 1910.10683, section 2.1): a number per head and distance, added to the scores."""

    buckets: int | None = key(
        None,
        "Buckets of distances. Short distances, up to half of the buckets, have one each; longer ones share the others, by logarithm. An encoder "
        "has half of all for each direction. 32 by default.",
        ge=4,
        le=2**20,
    )
    max_distance: int | None = key(
        None, "From this distance on, tokens, all are in the last bucket; 128 by default.", ge=2, le=LONGEST
    )


@dataclass
class AttentionConfig:
    """What attention computes, apart from its sizes."""

    bias: list[Projection] | None = key(None, "Projections that have a bias; [] by default.")
    query_scalar: float | None = key(
        None, "Scores are divided by the square root of this; `head_dim` by default.", gt=0, le=1e12
    )
    soft_cap: float | None = key(
        None, "Scores are squashed to this range: cap × tanh(score / cap) (Gemma 2); 0: not.", ge=0, le=1e6
    )
    window: int | None = key(
        None, "Positions a query sees, itself and those before it, in layers with a window; 0: all.", ge=0, le=LONGEST
    )
    window_pattern: list[bool] | None = key(
        None, "Which layers have the window, repeated over the layers; [true] by default.", when=WINDOWED
    )
    output_gate: bool | None = key(
        None,
        "Whether the result is multiplied, before the last projection, by the sigmoid of one more projection (arXiv 2505.06708; Qwen 3.5).",
    )
    sinks: bool | None = key(None, "A learned logit per head that takes its share of the softmax and adds no value (gpt-oss).")


@dataclass
class LinearAttentionConfig:
    """Linear attention, in place of attention in some layers."""

    pattern: list[bool] | None = key(
        None, "Which layers have it, repeated over the layers; [false] by default. At least one layer keeps attention."
    )
    kind: Literal["gated_delta", "mamba2"] | None = key(
        None,
        "The layer: Gated DeltaNet (arXiv 2412.06464), the default, or Mamba 2 (arXiv 2405.21060), whose groups are heads of keys and whose "
        "state size is `key_dim`.",
        when=LINEAR,
    )
    key_heads: int | None = key(
        None, "Heads of queries and keys; by default `model.heads`, of Mamba 2 one.", ge=0, le=100_000, when=LINEAR
    )
    value_heads: int | None = key(
        None,
        "Heads of values, a multiple of `key_heads`; by default as many, of Mamba 2 so many that values are twice as wide as the model.",
        ge=0,
        le=100_000,
        when=LINEAR,
    )
    key_dim: int | None = key(
        None, "Width of a head of keys; by default `model.head_dim`, of Mamba 2 128.", ge=0, le=2**20, when=LINEAR
    )
    value_dim: int | None = key(
        None,
        "Width of a head of values; by default `key_dim`, of Mamba 2 the largest divisor of twice the model's width up to 64.",
        ge=0,
        le=2**20,
        when=LINEAR,
    )
    kernel: int | None = key(
        None,
        "Positions that the short convolutions of queries, keys and values see, itself included; 4 by default.",
        ge=1,
        le=1024,
        when=LINEAR,
    )
    negative_eigenvalues: bool | None = key(
        None,
        "Whether a head may correct itself by up to twice the difference, so that what it remembers of a key can change its sign "
        "(arXiv 2411.12537).",
        when=DELTA,
    )
    norm_placement: Literal["same", "pre", "reordered", "sandwich", "post"] | None = key(
        None, "`model.norm.placement` of the layers that have it; `same`, as by default: that of the others.", when=LINEAR
    )
    norm_eps: float | None = key(
        None, "`model.norm_eps` of the norm of its results; 0, as by default: that of the other norms.", ge=0, le=1, when=LINEAR
    )


@dataclass
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from one narrow vector per position."""

    kv_rank: int | None = key(
        None, "Width of the vector that keys and values are made from; 0: ordinary attention.", ge=0, le=WIDEST
    )
    query_rank: int | None = key(None, "Width that queries are compressed to; 0: they are not.", ge=0, le=WIDEST)
    rope_dim: int | None = key(
        None, "Width of the part of a head that is rotated; its key is shared by all heads.", ge=0, le=2**20
    )
    plain_dim: int | None = key(None, "Width of the part of a head that is not rotated.", ge=0, le=2**20)
    value_dim: int | None = key(None, "Width of a head's values.", ge=0, le=2**20)
    norm_eps: float | None = key(None, "`norm_eps` of the narrow vectors; 1e-6 by default.", gt=0, le=1)
