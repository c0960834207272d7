"""The encoder-decoder transformer (Vaswani et al., arXiv 1706.03762), as single-device code.

    source ids --embedding, positions--> encoder blocks --> memory [B, S, D]
                                                              | keys and values of cross-attention
    target ids --embedding, positions--> decoder blocks ------+--> logits [B, T, V]

Shapes: B batch, S source time, T target time, D model, H heads, K key/value heads, G head width, V vocabulary of the targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pretrain.config.model_schema import Model
from pretrain.config.schema import Loss
from pretrain.models.attention import Attention, Scored
from pretrain.models.caches import LayerCache
from pretrain.models.dropout import BlockDropout, Dropout, WeightMask, drop, every_row, make_dropout
from pretrain.models.layers import Embedding, Linear, Mlp, make_norm
from pretrain.models.loss import Losses, LossOptions
from pretrain.models.network import Unit
from pretrain.models.output_head import OutputHead
from pretrain.models.positions import RelativeBias


class DecodingLayerCache:
    """What decoding keeps of a layer: keys and values of the target positions so far, and of the encoder's output."""

    def __init__(self, capacity: int) -> None:
        self.own = LayerCache(capacity)
        self.cross: tuple[Tensor, Tensor] | None = None


class DecodingCache:
    """State of decoding, filled by the network: of each decoder layer, and which source positions are real, [B or 1, 1, 1, S].

    A stage of a pipeline fills in its own layers. A rank may have two stages, so each has to know alone whether it has read the sources.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.layers = [DecodingLayerCache(capacity) for _ in range(layers)]
        self.source_masks: dict[range, Tensor] = {}
        """By the layers of a stage that has read the sources."""

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order; one may come several times (hypotheses of a beam)."""
        self.reorder(rows)
        self.source_masks = {
            span: mask.index_select(0, rows) if len(mask) > 1 else mask for span, mask in self.source_masks.items()
        }
        for layer in self.layers:
            layer.cross = layer.cross and tuple(x.index_select(0, rows) for x in layer.cross)

    def reorder(self, rows: Tensor) -> None:
        """`select` where a sequence is only replaced by another one of the same source: what is kept of sources stays."""
        for layer in self.layers:
            layer.own.select(rows)


class CrossAttention(Scored):
    """Attention of target positions to the encoder's output."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        dim, head_dim, switches = config.dim, config.head_dim, config.attention
        self.head_dim = head_dim
        self.scale = switches.query_scalar**-0.5
        self.query = Linear(dim, config.heads * head_dim, "query" in switches.bias)
        self.key = Linear(dim, config.kv_heads * head_dim, "key" in switches.bias)
        self.value = Linear(dim, config.kv_heads * head_dim, "value" in switches.bias)
        self.output = Linear(config.heads * head_dim, dim, "output" in switches.bias)

    def keys_values(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, S, G] of the encoder's output."""
        return self._heads(self.key(memory_BSD)), self._heads(self.value(memory_BSD))

    def forward(
        self, x_BTD: Tensor, keys_values: tuple[Tensor, Tensor], mask: Tensor, dropout: WeightMask | None = None
    ) -> Tensor:
        y_BHTG = self.attend(self._heads(self.query(x_BTD)), *keys_values, mask, self.scale, dropout=dropout)
        return self.output(y_BHTG.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Layer(nn.Module):
    """A block of the encoder, or with cross-attention one of the decoder. By `norm.placement`, of each sublayer f:

    pre    x + dropout(f(norm(x)))
    post   norm(x + dropout(f(x)))
    """

    def __init__(self, config: Model, cross: bool) -> None:
        super().__init__()
        self.post = config.norm.placement == "post"
        self.attention_norm, self.attention = make_norm(config), Attention(config)
        self.cross_norm, self.cross = (make_norm(config), CrossAttention(config)) if cross else (None, None)
        self.mlp_norm = make_norm(config)
        self.mlp = Mlp(config.dim, config.ffn_dim, config.mlp.activation, config.mlp.gated, config.mlp.bias)

    def forward(
        self,
        x_BTD: Tensor,
        mask: Tensor | None,
        dropout: BlockDropout | None,
        memory_BSD: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: DecodingLayerCache | None = None,
    ) -> Tensor:
        """`mask` of self-attention: see models/masks.py, None for causal; `memory_BSD`: the encoder's output, unless it is in the cache."""
        own = cache.own if cache else None
        of_attention, of_cross = (dropout and dropout.get(f"{name}.weights") for name in ("attention", "cross"))
        x_BTD = self._add(
            x_BTD, lambda y: self.attention(y, None, mask, own, of_attention), self.attention_norm, dropout, "attention"
        )
        if self.cross is not None:
            # As a view, so that the gradients of keys and values meet before those of other layers. Sums in bf16 depend on the order. FSDP2
            # adds a layer's gradients first, because it takes the layer's inputs through a function of its own.
            pair = cache.cross if cache and cache.cross else self.cross.keys_values(memory_BSD.view_as(memory_BSD))
            if cache:
                cache.cross = pair
            x_BTD = self._add(x_BTD, lambda y: self.cross(y, pair, memory_mask, of_cross), self.cross_norm, dropout, "cross")
        return self._add(x_BTD, self.mlp, self.mlp_norm, dropout, "mlp")

    def _add(
        self, x_BTD: Tensor, run: Callable[[Tensor], Tensor], norm: nn.Module, dropout: BlockDropout | None, sublayer: str
    ) -> Tensor:
        y_BTD = drop(run(x_BTD if self.post else norm(x_BTD)), dropout and dropout[sublayer])
        return norm(x_BTD + y_BTD) if self.post else x_BTD + y_BTD


class EncoderDecoder(nn.Module):
    """Source and target ids in; logits of the next target tokens, or the summed loss of each pair, out. A network
    (`models/network.py`). Its layers are counted through: those of the encoder, then those of the decoder.
    """

    def __init__(self, config: Model, loss: Loss | None = None) -> None:
        super().__init__()
        self.config = config
        post = config.norm.placement == "post"
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.source_embedding = None if config.encoder.share_embedding else Embedding(config.encoder.vocab_size, config.dim)
        relative, heads = config.relative, config.heads
        self.encoder_bias = self.decoder_bias = None
        if config.positions == "relative":
            self.encoder_bias = RelativeBias(heads, relative.buckets, relative.max_distance, causal=False)
            self.decoder_bias = RelativeBias(heads, relative.buckets, relative.max_distance, causal=True)
        self.encoder = nn.ModuleDict({str(i): Layer(config, cross=False) for i in range(config.encoder.layers)})
        self.encoder_norm = None if post else make_norm(config)
        self.decoder = nn.ModuleDict({str(i): Layer(config, cross=True) for i in range(config.layers)})
        self.norm = None if post else make_norm(config)
        options = LossOptions.of(loss, config.logit_soft_cap, config.logit_multiplier)
        self.output = OutputHead(config.dim, config.vocab_size, options, tied=config.tie_embeddings)
        self.rows_at_hand, self.compute_dtype = every_row, torch.float32
        self.watch_layer: Callable[[str, Tensor, Tensor], None] | None = None
        """Is given the hidden states after each layer, if somebody watches, and [1, T, 1] which positions are real: 0 where ranks fill up."""
        self.first_of_decoder = config.encoder.layers
        """The number of the decoder's first layer."""

    def keep(self, spans: list[range]) -> EncoderDecoder:
        """Make this network one for these spans of layers alone, and return it. Tables stay with every span that uses them."""
        kept = {number for span in spans for number in span}
        for stack, first in ((self.encoder, 0), (self.decoder, self.first_of_decoder)):
            for name in list(stack):
                if first + int(name) not in kept:
                    del stack[name]
        config, last = self.config, self.first_of_decoder + self.config.layers - 1 in kept
        if self.first_of_decoder not in kept and not (0 in kept and config.encoder.share_embedding):
            self.embedding = self.embedding if last and config.tie_embeddings else None
        if 0 not in kept:
            self.source_embedding = None
        if self.first_of_decoder - 1 not in kept:
            self.encoder_norm = None
        if not last:
            self.norm = self.output = None
        self.encoder_bias = self.encoder_bias if len(self.encoder) else None
        self.decoder_bias = self.decoder_bias if len(self.decoder) else None
        return self

    def forward(
        self,
        tokens_BT: Tensor,
        source_BS: Tensor | None = None,
        source_lengths_B: Tensor | None = None,
        targets_BT: Tensor | None = None,
        keys_B: Tensor | None = None,
        cache: DecodingCache | None = None,
        with_cross_entropy: bool = False,
        span: range | None = None,
        hidden: tuple[Tensor, ...] = (),
    ) -> Tensor | Losses | tuple[Tensor, ...]:
        """Logits [B, T, V] in the compute format; with targets, the summed token losses of each pair [B], fp32, and if asked for the
        cross-entropy alone beside them.

        `tokens_BT`: the target so far, from its start token on. `source_lengths_B`: the real tokens of each source; the rest is padding.
        Without it all are real. Padding of targets needs no mask, because no position attends to a later one, and its target is IGNORED.
        `keys_B`: see `models/dropout.py`; without them nothing is dropped. With a `cache` the tokens continue those that are in it, one
        at a time after the first call, and only the first call reads the sources. `span`: go through these layers only (by default through
        all), from what the span before returned as `hidden`. Returned is `hidden` for the next span, as `hidden_like` describes it.
        """
        config, encoded = self.config, self.first_of_decoder
        span = span or range(encoded + config.layers)
        reads = cache is None or span not in cache.source_masks
        memory_mask = _real(source_lengths_B, source_BS) if reads else cache.source_masks[span]
        if cache:
            cache.source_masks[span] = memory_mask
        if span.start < encoded and reads:
            dropped = make_dropout(config, keys_B, source_BS.shape[1], self.rows_at_hand)
            hidden = (self.encode(source_BS, memory_mask, dropped, span, *hidden),)
        if span.stop <= encoded:
            return hidden
        dropout = make_dropout(config, keys_B, tokens_BT.shape[1], self.rows_at_hand)
        start = cache.layers[max(0, span.start - encoded)].own.length if cache else 0
        mask = self._causal(start, start + tokens_BT.shape[1], tokens_BT.device)
        if span.start <= encoded:
            hidden = (self._embed(self.embedding, tokens_BT, start, dropout, "decoder.embedding"), *hidden)
        x_BTD, memory_BSD = hidden if reads else (*hidden, None)
        for name, layer in self.decoder.items():
            if encoded + int(name) in span:
                dropped = dropout and dropout.of_block(f"decoder.{name}", ("attention", "cross", "mlp"))
                x_BTD = layer(x_BTD, mask, dropped, memory_BSD, memory_mask, cache.layers[int(name)] if cache else None)
                if self.watch_layer is not None:
                    self.watch_layer(f"decoder.{name}", x_BTD, self.rows_at_hand(x_BTD.new_ones(1, tokens_BT.shape[1], 1)))
        if span.stop < encoded + config.layers:
            return (x_BTD, memory_BSD) if reads else (x_BTD,)
        x_BTD = x_BTD if self.norm is None else self.norm(x_BTD)
        tied = self.embedding.weight if config.tie_embeddings else None
        return self.output(x_BTD, targets_BT, tied, with_cross_entropy=with_cross_entropy)

    def hidden_like(
        self,
        span: range,
        tokens_BT: Tensor,
        source_BS: Tensor | None = None,
        cache: DecodingCache | None = None,
        **others: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """What a forward pass with these arguments through `span` takes as `hidden`, without values, on the meta device.

        In the encoder these are its hidden states [B, S, D]. In the decoder they are those of the targets [B, T, D] and the encoder's output;
        without the latter where only a cache is continued.
        """

        def states(ids: Tensor) -> Tensor:
            return self.rows_at_hand(torch.empty(*ids.shape, self.config.dim, dtype=self.compute_dtype, device="meta"))

        memory = () if span.start == 0 or (cache is not None and span in cache.source_masks) else (states(source_BS),)
        return (states(tokens_BT), *memory) if span.start > self.first_of_decoder else memory

    def encode(
        self, source_BS: Tensor, mask: Tensor, dropout: Dropout | None, span: range | None = None, x_BSD: Tensor | None = None
    ) -> Tensor:
        """The encoder's output [B, S, D]; `mask` [B or 1, 1, 1, S] is true at real tokens. `span`: go through these layers only, from `x_BSD`."""
        span = span or range(self.first_of_decoder)
        if span.start == 0:
            table = self.embedding if self.source_embedding is None else self.source_embedding
            x_BSD = self._embed(table, source_BS, 0, dropout, "encoder.embedding")
        if self.config.positions == "relative":
            bias = self.encoder_bias(0, source_BS.shape[1], source_BS.device)
            # A mask of one row is that of sources without padding.
            mask = bias if len(mask) == 1 < len(source_BS) else bias.masked_fill(~mask, -torch.inf)
        for name, layer in self.encoder.items():
            if int(name) in span:
                x_BSD = layer(x_BSD, mask, dropout and dropout.of_block(f"encoder.{name}"))
                if self.watch_layer is not None:
                    self.watch_layer(f"encoder.{name}", x_BSD, self.rows_at_hand(x_BSD.new_ones(1, source_BS.shape[1], 1)))
        return x_BSD if self.encoder_norm is None or span.stop < self.first_of_decoder else self.encoder_norm(x_BSD)

    def _causal(self, start: int, stop: int, device: torch.device) -> Tensor | None:
        """The mask of the decoder's own attention; None is a causal one from the first position on."""
        if self.config.positions == "relative":
            return self.decoder_bias(start, stop, device)
        return torch.ones(1, 1, 1, stop, dtype=torch.bool, device=device) if start else None

    def _embed(self, table: Embedding, tokens_BT: Tensor, start: int, dropout: Dropout | None, name: str) -> Tensor:
        config = self.config
        x_BTD = table(tokens_BT)
        if config.embedding_multiplier != 1:
            x_BTD = x_BTD * config.embedding_multiplier
        if config.positions == "sinusoidal":
            table_TD = sinusoids(start, start + tokens_BT.shape[1], config.dim, tokens_BT.device)
            x_BTD = x_BTD + self.rows_at_hand(table_TD[None]).to(x_BTD.dtype)
        return drop(x_BTD, dropout and dropout.at(name))

    def units(self) -> list[Unit]:
        """See `models/network.py`. A shared table looks up the rows of sources and of targets. A tied head has no weights, and is in no unit."""
        tied, shared = self.config.tie_embeddings, self.config.encoder.share_embedding
        own = [] if self.embedding is None else [Unit([self.embedding], "first", lends_to=self.output if tied else None)]
        sources = [] if self.source_embedding is None else [Unit([self.source_embedding], "first")]
        encoder, decoder = ([Unit([layer], "block") for layer in stack.values()] for stack in (self.encoder, self.decoder))
        units = [*own, *encoder, *decoder] if shared else [*sources, *encoder, *own, *decoder]
        if tied or self.output is None:
            return units
        return [*units, Unit([self.output] if self.norm is None else [self.norm, self.output], "last", reshard=False)]

    def initial(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a parameter's initial values, by its name.

        Tables whose rows are multiplied start so that a row's components have variance one after that. Projections into the
        residual stream are scaled down by the square root of their number, as in the decoder-only network.
        """
        config = self.config
        if name.endswith(".bias"):
            return 0.0, 0.0
        if "norm" in name:
            return (0.0 if config.norm.kind == "rms_offset" else 1.0), 0.0
        if config.init == "fan_in":
            return 0.0, config.init_std * self._fan_in_scale(name)
        if "embedding" in name and config.embedding_multiplier != 1:
            return 0.0, 1 / config.embedding_multiplier
        if name.endswith(("attention.output.weight", "cross.output.weight", "mlp.down.weight")):
            sublayers = 2 * config.encoder.layers if name.startswith("encoder") else 3 * config.layers
            return 0.0, config.init_std / math.sqrt(sublayers)
        return 0.0, config.init_std

    def matmul_parameters(self) -> int:
        """Parameters that a token of a source or of a target is multiplied with."""
        return sum(count for count, _ in self._matrices())

    def _matrices(self) -> list[tuple[int, bool]]:
        """The size of each matrix that tokens are multiplied with, and whether these are tokens of sources. A tied table is one."""
        tables = {id(module.weight) for module in self.modules() if isinstance(module, Embedding)}
        found = [(self.config.vocab_size * self.config.dim, False)] if self.config.tie_embeddings else []
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and id(parameter) not in tables:
                of_sources = name.startswith("encoder.") or name.endswith(("cross.key.weight", "cross.value.weight"))
                found.append((parameter.numel(), of_sources))
        return found

    def flops_per_token(self, source_length: float, target_length: float) -> int:
        """FLOPs of one forward and backward pass per target token, on sources and targets of on average so many tokens."""
        config, ratio = self.config, source_length / target_length
        total = sum(count * (ratio if of_sources else 1.0) for count, of_sources in self._matrices())
        seen = config.encoder.layers * ratio * source_length + config.layers * (target_length + source_length)
        return round(6 * total + 12 * config.heads * config.head_dim * seen)

    def flops_by_layer(self, source_length: float, target_length: float) -> list[int]:
        """`flops_per_token` by layer, those of the encoder first. The last one has those of the output head, too."""
        config, ratio = self.config, source_length / target_length
        attention = 12 * config.heads * config.head_dim
        of_encoder = round(ratio * (6 * _multiplied(self.encoder["0"]) + attention * source_length))
        of_decoder = (self.flops_per_token(source_length, target_length) - config.encoder.layers * of_encoder) / config.layers
        head = 6 * config.vocab_size * config.dim
        return [of_encoder] * config.encoder.layers + [
            round(of_decoder - head / config.layers + head * (i == config.layers - 1)) for i in range(config.layers)
        ]

    def _fan_in_scale(self, name: str) -> float:
        config = self.config
        if name in ("embedding.weight", "source_embedding.weight"):
            return 1.0
        inputs = config.dim  # of the biases of positions as well, as in T5
        if name.endswith("attention.output.weight") or name.endswith("cross.output.weight"):
            inputs = config.heads * config.head_dim
        elif name.endswith("mlp.down.weight"):
            inputs = config.ffn_dim
        elif name.endswith("query.weight"):
            inputs *= config.head_dim / config.attention.query_scalar
        return inputs**-0.5


def _multiplied(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)


def _real(lengths_B: Tensor | None, tokens_BS: Tensor) -> Tensor:
    """True at the first `lengths_B` positions, [B, 1, 1, S]; without lengths at all, [1, 1, 1, S]."""
    places_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    if lengths_B is None:
        return (places_S >= 0)[None, None, None]
    return (places_S < lengths_B[:, None])[:, None, None]


def sinusoids(start: int, stop: int, dim: int, device: torch.device) -> Tensor:
    """Position encodings [T, D], fp32: sin and cos of position / 10000^(2i / D), interleaved (arXiv 1706.03762, section 3.5)."""
    exponent = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    angle_TD = torch.outer(torch.arange(start, stop, device=device, dtype=torch.float32), 10000.0**-exponent)
    return torch.stack((angle_TD.sin(), angle_TD.cos()), dim=-1).flatten(1)
