"""The model's sections: typed switches that are independent of each other.

`null` means what the family says (models/families/), and where that says nothing, the plain value of `models/shape.py`. A family
is nothing but such values and the names that Hugging Face has for them; the network is built from the switches alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pretrain.config.keys import Except, key, section

FamilyName = Literal[
    "custom", "hf", "transformer", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "gemma2", "gemma3", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss",
    "granite", "llama", "minimax_m2", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
    "t5",
]  # fmt: skip
Projection = Literal["query", "key", "value", "output"]

# Upper limits: well beyond any model, and low enough that a slip of the keyboard is refused at its key and not by an allocation.
WIDEST, LONGEST, MOST_TOKENS = 2**24, 2**40, 2**26

SCALED = {"model.rope.scaling": Except("none")}
LLAMA3, YARN = {"model.rope.scaling": ("llama3",)}, {"model.rope.scaling": ("yarn",)}
WINDOWED, ENCODER = {"model.attention.window": Except(0)}, {"model.encoder.layers": Except(0)}


@dataclass
class Norm:
    """Normalisation of the residual stream and of queries and keys."""

    kind: Literal["rms", "rms_offset", "layer", "layer_plain"] | None = key(
        None,
        "`rms`: RMSNorm (arXiv 1910.07467); `rms_offset`: its gain is one plus the weight (Gemma); `layer`: LayerNorm with gain and "
        "bias (arXiv 1607.06450); `layer_plain`: without both.",
    )
    placement: Literal["pre", "post", "reordered", "sandwich"] | None = key(
        None,
        "Where a sublayer f is normalised: `pre` x + f(norm(x)); `post` norm(x + f(x)) (arXiv 1706.03762); `reordered` x + norm(f(x)) (OLMo 2); "
        "`sandwich` x + norm(f(norm(x))) (Gemma 2).",
    )
    qk: Literal["none", "head", "full"] | None = key(
        None, "RMSNorm of queries and keys before rotation: none, per `head` (Qwen 3) or over the `full` width (OLMo 2)."
    )


@dataclass
class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and its scaling to longer contexts."""

    theta: float | None = key(
        None,
        "Base of the rotation frequencies; 10000 by default.",
        gt=1,
        le=1e12,
    )
    local_theta: float | None = key(
        None,
        "Base in layers with a sliding window; `theta` by default.",
        gt=1,
        le=1e12,
        when=WINDOWED,
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
        None,
        "How many times `original_length` the scaled positions reach; 1 by default.",
        ge=1,
        le=1e6,
        when=SCALED,
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
        "`llama3`: waves longer than original_length over this are scaled fully.",
        gt=0,
        le=1e6,
        when=LLAMA3,
    )
    high_frequency: float | None = key(
        None,
        "`llama3`: waves shorter than original_length over this are not.",
        gt=0,
        le=1e6,
        when=LLAMA3,
    )
    beta_fast: float | None = key(
        None,
        "`yarn`: components that turn more often than this in original_length are kept.",
        gt=0,
        le=1e6,
        when=YARN,
    )
    beta_slow: float | None = key(
        None,
        "`yarn`: components that turn less often than this are scaled fully.",
        gt=0,
        le=1e6,
        when=YARN,
    )
    attention_factor: float | None = key(
        None,
        "`yarn`: factor on the rotated vectors; 0 derives it from `factor`.",
        ge=0,
        le=1e6,
        when=YARN,
    )
    mscale: float | None = key(
        None,
        "`yarn` of DeepSeek: weight of the derived attention factor; 0: not used.",
        ge=0,
        le=1e6,
        when=YARN,
    )
    mscale_all_dim: float | None = key(
        None,
        "`yarn` of DeepSeek: the same for all components, on the scores; 0: not used.",
        ge=0,
        le=1e6,
        when=YARN,
    )
    truncate: bool | None = key(
        None,
        "`yarn`: round the range of components that are blended to whole ones.",
        when=YARN,
    )
    scale_local: bool | None = key(
        None,
        "Whether layers with a sliding window are scaled as well; true by default.",
        when=WINDOWED,
    )


@dataclass
class Relative:
    """Relative position bias (T5, Raffel et al., arXiv 1910.10683, section 2.1): a number per head and distance, added to the scores."""

    buckets: int | None = key(
        None,
        "Distances are told apart in so many buckets: exactly up to half of them, then by logarithm; an encoder's are halved again, one "
        "half for each direction. 32 by default.",
        ge=4,
        le=2**20,
    )
    max_distance: int | None = key(
        None,
        "From this distance on, tokens, all are in the last bucket; 128 by default.",
        ge=2,
        le=LONGEST,
    )


@dataclass
class AttentionConfig:
    """What attention computes, apart from its sizes."""

    bias: list[Projection] | None = key(None, "Projections that have a bias; [] by default.")
    query_scalar: float | None = key(
        None,
        "Scores are divided by the square root of this; `head_dim` by default.",
        gt=0,
        le=1e12,
    )
    soft_cap: float | None = key(
        None,
        "Scores are squashed to this range: cap × tanh(score / cap) (Gemma 2); 0: not.",
        ge=0,
        le=1e6,
    )
    window: int | None = key(
        None,
        "Positions a query sees, itself and those before it, in layers with a window; 0: all.",
        ge=0,
        le=LONGEST,
    )
    window_pattern: list[bool] | None = key(
        None,
        "Which layers have the window, repeated over the layers; [true] by default.",
        when=WINDOWED,
    )
    sinks: bool | None = key(None, "A learned logit per head that takes its share of the softmax and adds no value (gpt-oss).")


@dataclass
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from one narrow vector per position."""

    kv_rank: int | None = key(
        None,
        "Width of the vector that keys and values are made from; 0: ordinary attention.",
        ge=0,
        le=WIDEST,
    )
    query_rank: int | None = key(
        None,
        "Width that queries are compressed to; 0: they are not.",
        ge=0,
        le=WIDEST,
    )
    rope_dim: int | None = key(
        None,
        "Width of the part of a head that is rotated; its key is shared by all heads.",
        ge=0,
        le=2**20,
    )
    plain_dim: int | None = key(
        None,
        "Width of the part of a head that is not rotated.",
        ge=0,
        le=2**20,
    )
    value_dim: int | None = key(
        None,
        "Width of a head's values.",
        ge=0,
        le=2**20,
    )
    norm_eps: float | None = key(
        None,
        "`norm_eps` of the narrow vectors; 1e-6 by default.",
        gt=0,
        le=1,
    )


@dataclass
class MlpConfig:
    """The feed-forward sublayer."""

    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "silu_clamped"] | None = key(
        None,
        "`gelu` exact, `gelu_tanh` its approximation, `relu2` the square of ReLU (arXiv 2109.08668), `silu_clamped` that of gpt-oss.",
    )
    gated: bool | None = key(None, "down(activation(gate(x)) × up(x)), as in SwiGLU and GeGLU (arXiv 2002.05202).")
    bias: bool | None = key(None, "Biases of the projections, of experts as well.")


@dataclass
class ExpertsConfig:
    """Mixture of experts in place of the MLP (arXiv 2101.03961). No expert has a capacity: no token is dropped."""

    count: int | None = key(None, "Routed experts of a layer; 0: none, every layer has an MLP.", ge=0, le=100_000)
    active: int | None = key(
        None,
        "Experts a token is sent to.",
        ge=0,
        le=100_000,
    )
    ffn_dim: int | None = key(
        None,
        "Hidden width of an expert; `model.ffn_dim` by default.",
        ge=0,
        le=2**26,
    )
    shared: int | None = key(
        None,
        "Experts that every token passes through, as one MLP of so many times `ffn_dim`.",
        ge=0,
        le=10_000,
    )
    dense_layers: list[int] | None = key(
        None,
        "Layers, from 0, that have an MLP of `model.ffn_dim` all the same; [] by default.",
        le=10_000,
    )
    scoring: Literal["softmax", "sigmoid"] | None = key(None, "What turns the router's logits into scores.")
    normalise: bool | None = key(None, "Whether the weights of a token's experts are made to sum to one.")
    scale: float | None = key(
        None,
        "Factor on those weights.",
        gt=0,
        le=1e6,
    )
    groups: int | None = key(
        None,
        "Groups of experts; a token chooses among the experts of its best groups. 1: no groups.",
        ge=1,
        le=100_000,
    )
    active_groups: int | None = key(
        None,
        "Groups a token's experts are chosen from.",
        ge=1,
        le=100_000,
        when={"model.experts.groups": Except(1)},
    )
    router_bias: bool | None = key(None, "Whether the router's projection has a bias.")
    correction: bool | None = key(
        None,
        "A bias per expert that decides who is chosen but not with what weight: balancing without a loss (arXiv 2408.15664).",
    )
    correction_rate: float | None = key(
        None,
        "How far that bias moves in a step, towards even loads.",
        ge=0,
        resume="accept",
        le=1000,
        when={"model.experts.correction": (True,)},
    )
    balance_loss: float | None = key(
        None,
        "Weight of each layer's load-balancing loss: `count` × sum over experts of (share of positions sent there) × (mean score), which is "
        "`active` where loads are even (arXiv 2101.03961). DeepSeek-V3 (arXiv 2412.19437) and Megatron divide theirs by `active`: their "
        "weight over `active` is ours. transformers averages over layers: its router_aux_loss_coef over the number of layers is ours.",
        ge=0,
        resume="accept",
        le=1e6,
    )
    balance_scope: Literal["sequence", "global_batch"] | None = key(
        None,
        "What those shares are counted over: each `sequence` by itself (DeepSeek-V3), or the `global_batch` of the step before (arXiv "
        "2501.11873), so that experts may specialise in kinds of text. No layout changes either. `sequence` by default.",
        resume="accept",
        when={"model.experts.balance_loss": Except(0.0)},
    )
    router_z_loss: float | None = key(
        None,
        "Weight of the mean squared log-sum-exp of the router's logits (arXiv 2202.08906).",
        ge=0,
        resume="accept",
        le=1e6,
    )


@dataclass
class EncoderConfig:
    """An encoder, whose output the decoder's blocks attend to. Trained on `data.pairs`, or with `data.objective: span_corruption`."""

    layers: int | None = key(
        None,
        "Blocks of the encoder; 0: a decoder alone. `model.layers` by default with families `transformer` and `t5`, else 0.",
        ge=0,
        le=10_000,
    )
    vocab_size: int | None = key(
        None,
        "Token ids the encoder knows; those of the tokenizer of the sources by default.",
        ge=2,
        le=MOST_TOKENS,
    )
    share_embedding: bool | None = key(None, "Use one embedding for sources and targets; they then have one tokenizer.")
    decoder_start_id: int | None = key(
        None,
        "Token that the decoder starts from; the end-of-document token of the targets' tokenizer by default. T5's own models start "
        "from their padding token, 0.",
        ge=0,
        le=MOST_TOKENS,
    )


@dataclass
class Model:
    """The network. Switches that are `null` are the family's."""

    family: FamilyName = key(
        "llama",
        "Model family: what the switches below are unless they are set, and which Hugging Face model an export is. What the family "
        "cannot express is refused; `custom` takes any combination and cannot be exported; `hf` is what `hf_config` describes.",
    )
    hf_config: str | None = key(
        None,
        "With `family: hf`, in place of all other keys of the model: a config.json of transformers, its directory, or its contents as "
        "JSON. The resolved configuration has the contents.",
        when={"model.family": ("hf",)},
    )
    dim: int = key(384, "Width of the residual stream.", ge=1, le=WIDEST)
    layers: int = key(6, "Number of decoder blocks.", ge=1, le=4096)
    heads: int = key(6, "Attention heads of a block (query heads).", ge=1, le=100_000)
    kv_heads: int | None = key(
        None,
        "Key/value heads, a divisor of `heads` (grouped-query attention); `heads` by default.",
        ge=1,
        le=100_000,
    )
    head_dim: int | None = key(
        None,
        "Width of a head; `dim / heads` by default.",
        ge=1,
        le=2**20,
    )
    ffn_dim: int | None = key(
        None,
        "Hidden width of the MLP; by default 4 × `dim`, or 8/3 of it rounded up to a multiple of 64 where it is gated.",
        ge=1,
        le=2**26,
    )
    vocab_size: int | None = key(
        None,
        "Token ids the model knows (rows of the embedding); those of the data's tokenizer by default.",
        ge=2,
        le=MOST_TOKENS,
    )
    tie_embeddings: bool | None = key(None, "Use the embedding's matrix as the output head too, instead of one of its own.")
    norm_eps: float | None = key(
        None,
        "Added to the mean square in a norm, so that it is never zero; 1e-5 by default.",
        gt=0,
        le=1,
    )
    positions: Literal["rope", "learned", "sinusoidal", "relative", "none"] | None = key(
        None,
        "How positions enter. `rope` rotates queries and keys. `learned` adds a vector for each of `max_sequence_length` positions (GPT-2), and "
        "`sinusoidal` adds sines and cosines (arXiv 1706.03762). `relative` adds a bias by distance to the scores (T5). An encoder-decoder has "
        "`sinusoidal`, `relative` or `none`, and a decoder `rope`, `learned` or `none`.",
    )
    parallel_residual: bool | None = key(
        None, "x + attention(norm(x)) + mlp(norm(x)) in place of one after the other (GPT-NeoX)."
    )
    embedding_multiplier: float | None = key(
        None,
        "Factor on the token embeddings; Gemma's is the square root of `dim`.",
        gt=0,
        le=1e6,
    )
    residual_multiplier: float | None = key(
        None,
        "Factor on what a sublayer adds to the residual stream.",
        gt=0,
        le=1e6,
    )
    logit_multiplier: float | None = key(
        None,
        "Factor on the logits.",
        gt=0,
        le=1e6,
    )
    logit_soft_cap: float | None = key(
        None,
        "Logits are squashed to this range: cap × tanh(logit / cap); 0: not.",
        ge=0,
        le=1e6,
    )
    dropout: float = key(
        0.0,
        "Share of zeroes in the embeddings and in what a sublayer adds to the residual stream, in training (arXiv 1706.03762, section 5.4). "
        "No layout changes what is zeroed (docs/models.md).",
        ge=0,
        lt=1,
        resume="accept",
    )
    predict_ahead: int = key(
        0,
        "Tokens beyond the next one that are predicted in training, each by a block of its own (DeepSeek-V3's multi-token prediction, arXiv "
        "2412.19437, section 2.2). An export leaves these blocks out.",
        ge=0,
        le=8,
    )
    encoder: EncoderConfig = section(EncoderConfig, when=ENCODER)
    norm: Norm = section(Norm)
    rope: Rope = section(Rope, when={"model.positions": ("rope",)})
    relative: Relative = section(Relative, when={"model.positions": ("relative",)})
    attention: AttentionConfig = section(AttentionConfig)
    latent: Latent = section(Latent, when={"model.latent.kv_rank": Except(0)})
    mlp: MlpConfig = section(MlpConfig)
    experts: ExpertsConfig = section(ExpertsConfig, when={"model.experts.count": Except(0)})
    attention_backend: Literal["auto", "sdpa", "flex"] = key(
        "auto",
        "What applies masks of documents and windows; changes speed and memory, not the result. `sdpa` is torch's "
        "scaled_dot_product_attention with a dense mask, a byte per pair of positions. `flex` is FlexAttention, which skips masked blocks and "
        "trains on CUDA only. `auto` takes flex on CUDA for heads of at least 16, else sdpa. Without such masks, attention is torch's causal "
        "kernel.",
        resume="free",
    )
    max_sequence_length: int | None = key(
        None,
        "Longest sequence the model is said to be good for: `max_position_embeddings` of an export, and the limit of "
        "tools/generate.py; `data.sequence_length` by default. With learned positions, as many as there are.",
        ge=1,
        resume="free",
        le=LONGEST,
    )
    init: Literal["fixed", "fan_in"] | None = key(
        None,
        "Initial weights. `fixed`: of standard deviation `init_std`, and over sqrt(2 × layers) for projections into the residual stream "
        "(GPT-2). `fan_in`, of an encoder-decoder: `init_std` over the root of a matrix's inputs, embeddings `init_std` itself; where "
        "scores are not divided (attention.query_scalar=1) queries are, over sqrt(head_dim) (T5). `fixed` by default.",
    )
    init_std: float | None = key(
        None,
        "Scale of initial weights; 0.02 by default, 1 with family `t5`.",
        gt=0,
        resume="free",
        le=1000,
    )
