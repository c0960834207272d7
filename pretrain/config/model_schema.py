"""The model's sections: typed switches that are independent of each other.

`null` means what the family says (models/families/), and where that says nothing, the plain value of `models/shape.py`. A family
is nothing but such values and the names that Hugging Face has for them; the network is built from the switches alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pretrain.config.attention_schema import LONGEST, WIDEST, AttentionConfig, Latent, LinearAttentionConfig, Relative, Rope
from pretrain.config.keys import Except, key, section

FamilyName = Literal[
    "custom", "hf", "transformer", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "gemma2", "gemma3", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss",
    "granite", "granite_hybrid", "llama", "minimax_m2", "mistral", "mixtral", "nemotron_h", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "smollm3", "starcoder2",
    "t5",
]  # fmt: skip

LARGEST_VOCABULARY = 2**26
MOST_LAYERS = 4096

ENCODER = {"model.encoder.layers": Except(0)}


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
    active: int | None = key(None, "Experts a token is sent to.", ge=0, le=100_000)
    ffn_dim: int | None = key(None, "Hidden width of an expert; `model.ffn_dim` by default.", ge=0, le=2**26)
    shared: int | None = key(
        None,
        "How many experts every token passes through. Together they are one MLP, whose width is this number times `ffn_dim`.",
        ge=0,
        le=10_000,
    )
    shared_gate: bool | None = key(
        None,
        "Whether their result is multiplied by the sigmoid of a projection to one number (Qwen 3.5).",
        when={"model.experts.shared": Except(0)},
    )
    dense_layers: list[int] | None = key(
        None, "Layers, from 0, that have an MLP of `model.ffn_dim` all the same; [] by default.", le=10_000
    )
    scoring: Literal["softmax", "sigmoid"] | None = key(None, "What turns the router's logits into scores.")
    normalise: bool | None = key(None, "Whether the weights of a token's experts are made to sum to one.")
    scale: float | None = key(None, "Factor on those weights.", gt=0, le=1e6)
    groups: int | None = key(
        None, "Groups of experts; a token chooses among the experts of its best groups. 1: no groups.", ge=1, le=100_000
    )
    active_groups: int | None = key(
        None, "Groups a token's experts are chosen from.", ge=1, le=100_000, when={"model.experts.groups": Except(1)}
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
        "weight divided by `active` is ours. transformers averages over layers: its router_aux_loss_coef divided by the number of layers with experts is ours.",
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
        None, "Weight of the mean squared log-sum-exp of the router's logits (arXiv 2202.08906).", ge=0, resume="accept", le=1e6
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
        None, "Token ids the encoder knows; those of the tokenizer of the sources by default.", ge=2, le=LARGEST_VOCABULARY
    )
    share_embedding: bool | None = key(None, "Use one embedding for sources and targets; they then have one tokenizer.")
    decoder_start_id: int | None = key(
        None,
        "Token that the decoder starts from; the end-of-document token of the targets' tokenizer by default. T5's own models start "
        "from their padding token, 0.",
        ge=0,
        le=LARGEST_VOCABULARY,
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
    layers: int = key(6, "Number of decoder blocks.", ge=1, le=MOST_LAYERS)
    heads: int = key(6, "Attention heads of a block (query heads).", ge=1, le=100_000)
    kv_heads: int | None = key(
        None, "Key/value heads, a divisor of `heads` (grouped-query attention); `heads` by default.", ge=1, le=100_000
    )
    head_dim: int | None = key(None, "Width of a head; `dim / heads` by default.", ge=1, le=2**20)
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
        le=LARGEST_VOCABULARY,
    )
    tie_embeddings: bool | None = key(None, "Use the embedding's matrix as the output head too, instead of one of its own.")
    norm_eps: float | None = key(
        None, "Added to the mean square in a norm, so that it is never zero; 1e-5 by default.", gt=0, le=1
    )
    positions: Literal["rope", "learned", "sinusoidal", "relative", "none"] | None = key(
        None,
        "How positions enter. `rope` rotates queries and keys. `learned` adds a vector for each of `max_sequence_length` positions (GPT-2), and "
        "`sinusoidal` adds sines and cosines (arXiv 1706.03762). `relative` adds a bias by distance to the scores (T5). An encoder-decoder has "
        "`sinusoidal`, `relative` or `none`, and a decoder `rope`, `learned` or `none`.",
    )
    sublayers: list[Literal["both", "mixer", "mlp"]] | None = key(
        None,
        "What blocks consist of, repeated over the layers: `both` attention and MLP, `mixer` attention or linear attention alone, `mlp` an MLP or "
        "experts alone (Nemotron-H, arXiv 2504.03624); [both] by default.",
    )
    parallel_residual: bool | None = key(
        None, "x + attention(norm(x)) + mlp(norm(x)) in place of one after the other (GPT-NeoX)."
    )
    embedding_multiplier: float | None = key(
        None, "Factor on the token embeddings; Gemma's is the square root of `dim`.", gt=0, le=1e6
    )
    residual_multiplier: float | None = key(None, "Factor on what a sublayer adds to the residual stream.", gt=0, le=1e6)
    logit_multiplier: float | None = key(None, "Factor on the logits.", gt=0, le=1e6)
    logit_soft_cap: float | None = key(
        None, "Logits are squashed to this range: cap × tanh(logit / cap); 0: not.", ge=0, le=1e6
    )
    dropout: float = key(
        0.0,
        "Share of zeroes in the embeddings and in what a sublayer adds to the residual stream, in training (arXiv 1706.03762, section 5.4). "
        "No layout changes what is zeroed (docs/models.md).",
        ge=0,
        lt=1,
        resume="accept",
    )
    attention_dropout: float = key(
        0.0,
        "Share of zeroes in the weights of attention, in training; GPT-2's `attn_pdrop`. No layout changes what is zeroed. Weights are then computed by "
        "matrix products, which keep all T x T of them.",
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
    linear_attention: LinearAttentionConfig = section(LinearAttentionConfig)
    latent: Latent = section(Latent, when={"model.latent.kv_rank": Except(0)})
    mlp: MlpConfig = section(MlpConfig)
    experts: ExpertsConfig = section(ExpertsConfig, when={"model.experts.count": Except(0)})
    attention_backend: Literal["auto", "sdpa", "flex", "varlen"] = key(
        "auto",
        "What applies masks of documents and windows; changes speed and memory, not the result. `sdpa` is torch's "
        "scaled_dot_product_attention with a dense mask, a byte per pair of positions. `flex` is FlexAttention, which skips masked blocks and "
        "trains on CUDA only. `varlen` is torch's flash kernel with documents as sequences of their own, in bf16 on CUDA, or that of "
        "`run.attention_kernel=FA3` or `FA4`. `auto` takes flex on CUDA for a head_dim of at least 16, else sdpa. Without such masks, `run.attention_kernel` says which "
        "kernel computes causal attention.",
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
        "Standard deviation of initial weights. `fixed`: `init_std`, divided for projections into the residual stream by the root of their number, "
        "which is 2 × `layers` (GPT-2). `fan_in`, for an encoder-decoder: `init_std` divided by the root of the number of a matrix's inputs, and `init_std` for embeddings; "
        "with attention.query_scalar=1 that of queries is also divided by sqrt(head_dim) (T5). `fixed` by default.",
    )
    init_std: float | None = key(
        None, "Scale of initial weights; 0.02 by default, 1 with family `t5`.", gt=0, resume="free", le=1000
    )
