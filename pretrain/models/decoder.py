"""The decoder-only transformer, as single-device code.

    tokens --embedding--> hidden [B, T, D] --layers, each by its LayerSpec--> hidden --norm, output--> logits or losses

A forward pass may go through a span of the layers only. It then takes the hidden states that the span before returned, and returns its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.model_schema import Model
from pretrain.config.schema import Loss
from pretrain.conventions import IGNORED
from pretrain.models.block import Block
from pretrain.models.caches import Cache
from pretrain.models.dropout import Dropout, drop, every_row, make_dropout
from pretrain.models.experts import MixtureOfExperts, Router, RouterReport
from pretrain.models.layer_specs import LayerSpec, MaskKind, layer_specs
from pretrain.models.layers import Embedding, make_norm
from pretrain.models.linear_attention import initial_values, recurrence_flops
from pretrain.models.loss import Losses, LossOptions
from pretrain.models.masks import (
    Mask,
    attention_backend,
    attention_mask,
    cached_mask,
    document_begins,
    document_numbers,
    document_positions,
    starts_of,
)
from pretrain.models.multi_token import MultiTokenPrediction
from pretrain.models.network import Initial, Unit
from pretrain.models.output_head import OutputHead
from pretrain.models.positions import Tables, rotary_tables
from pretrain.models.shape import head_widths

Inputs = dict[MaskKind, tuple[Tables | None, Mask | None]]
"""What layers get, by the kind of mask that they need (`LayerSpec.mask_kind`): rotary tables and mask."""


class Decoder(nn.Module):
    """Token ids in; logits, or the summed loss of each sequence, out. A network (`models/network.py`).

    A tied output head has no weight: the embedding's is one parameter with one name. There are no
    buffers, so a model built on the meta device is complete once its parameters are filled.
    """

    def __init__(self, config: Model, loss: Loss | None = None) -> None:
        super().__init__()
        self.config = config
        self.rows_at_hand, self.compute_dtype = every_row, torch.float32
        self.make_mask = attention_mask
        """`attention_mask`, unless parallel/ sets another."""
        self.watch_layer: Callable[[str, Tensor, Tensor], None] | None = None
        """Is given the hidden states after each layer, if somebody watches, and [1, T, 1] which positions are real: 0 where ranks fill up."""
        self.router_reports: dict[str, RouterReport] = {}
        self.embedding: nn.Module | None = Embedding(config.vocab_size, config.dim)
        learned = config.positions == "learned"
        self.position_embedding = Embedding(config.max_sequence_length, config.dim) if learned else None
        specs = layer_specs(config)
        self.sublayers = sum((spec.mixer != "none") + (spec.mlp != "none") for spec in specs)
        """Projections into the residual stream, of the whole network."""
        # By number, so that a slice keeps the names of its parameters.
        self.layers = nn.ModuleDict({str(i): Block(config, spec) for i, spec in enumerate(specs)})
        self.norm = make_norm(config) if config.norm.placement != "post" else None
        options = LossOptions.of(loss, config.logit_soft_cap, config.logit_multiplier)
        self.output: nn.Module | None = OutputHead(config.dim, config.vocab_size, options, tied=config.tie_embeddings)
        self.multi_token = _multi_token(config, specs[-1], loss) if config.predict_ahead else None

    def keep(self, spans: list[range]) -> Decoder:
        """Make this network one for these spans of layers alone, and return it.

        The embedding stays with the first layer, the head with the last one. A tied table stays with both, as one parameter in each of the two
        networks. So does the embedding where the last layer's network predicts further tokens, which it embeds.
        """
        kept = {number for span in spans for number in span}
        for name in list(self.layers):
            if int(name) not in kept:
                del self.layers[name]
        last = self.config.layers - 1 in kept
        if not last:
            self.norm = self.output = self.multi_token = None
        if 0 not in kept and self.multi_token is None:
            self.position_embedding = None
            if not (last and self.config.tie_embeddings):
                self.embedding = None
        return self

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
        with_cross_entropy: bool = False,
        positions_BT: Tensor | None = None,
        keys_B: Tensor | None = None,
        sequence_weights_B: Tensor | None = None,
        starts_BN: Tensor | None = None,
        span: range | None = None,
        hidden: tuple[Tensor, ...] = (),
    ) -> Tensor | Losses | tuple[Tensor, ...]:
        """Logits [B, T, V] in the compute format; with targets, the summed token losses of each sequence [B], fp32, in training
        with the auxiliary losses of routers (`models/experts.py`). `with_cross_entropy`: return that alone beside them.

        `documents_BT` [B, T] numbers the document of each position; padding has a number of its own. No position then attends to another
        document, and positions count from 0 in each. `positions_BT` [B, T] gives other positions. With a `cache` the tokens continue
        those that are in it, and are added to it. `keys_B`: see `models/dropout.py`; without them nothing is dropped.
        `sequence_weights_B`: factors on the objective of each sequence, without the losses of routers; the cross-entropy is not weighted.
        `starts_BN`: where documents begin, for `varlen` (`models/masks.py`); made here if it is not given.
        `span`: go through these layers only (by default through all), from what the span before returned as `hidden`. Returned is `hidden`
        for the next span, as `hidden_like` describes it.
        """
        span = span or range(self.config.layers)
        enters, leaves = span.start == 0, span.stop == self.config.layers
        if enters == bool(hidden):
            raise ValueError("the first span of a network takes tokens alone, and the others what the span before returned")
        dropout = make_dropout(self.config, keys_B, tokens_BT.shape[1], self.rows_at_hand)
        counted_BT = targets_BT != IGNORED if targets_BT is not None and torch.is_grad_enabled() else None
        blocks = {name: block for name, block in self.layers.items() if int(name) in span}
        ahead = self.multi_token if leaves and counted_BT is not None else None
        specs = [block.spec for block in blocks.values()] + ([ahead.spec] if ahead else [])
        places, inputs = self._begin(tokens_BT, documents_BT, cache, positions_BT, specs, starts_BN)
        embedded_BTD = self._embed(tokens_BT, places, dropout) if enters or ahead else None
        auxiliary_B = [loss_B for losses_AB in hidden[1:] for loss_B in losses_AB]
        x_BTD = embedded_BTD if enters else hidden[0]
        if enters and ahead:
            # The gradients of the first block's two uses meet before those of multi-token prediction (see `Layer.forward` of the
            # encoder-decoder). No view else: of a length that varies, a compiled block would be compiled once for views and once for others.
            x_BTD = embedded_BTD.view_as(embedded_BTD)
        for name, block in blocks.items():
            rope, mask = inputs[block.spec.mask_kind]
            layer_cache = cache.layers[int(name)] if cache else None
            dropped = dropout and dropout.of_block(f"layers.{name}")
            x_BTD, report = block(x_BTD, rope if block.spec.rope else None, mask, layer_cache, counted_BT, dropped)
            auxiliary_B += self._keep_report(name, report)
            if self.watch_layer is not None:
                self.watch_layer(f"layers.{name}", x_BTD, self.rows_at_hand(x_BTD.new_ones(1, tokens_BT.shape[1], 1)))
        if not leaves:
            return (x_BTD, torch.stack(auxiliary_B)) if auxiliary_B else (x_BTD,)
        hidden_BTD, x_BTD = x_BTD, x_BTD if self.norm is None else self.norm(x_BTD)
        tied = self.embedding.weight if self.config.tie_embeddings else None
        if targets_BT is None:
            return self.output(x_BTD, None, tied)
        if ahead is None:
            losses = self.output(x_BTD, targets_BT, tied, sequence_weights_B, with_cross_entropy=True)
            objective_B, cross_entropy_B = losses
        else:
            rope, mask = inputs[ahead.spec.mask_kind]
            rope = rope if ahead.spec.rope else None
            further_BTD, reports = ahead(hidden_BTD, embedded_BTD, rope, mask, counted_BT, dropout)
            for depth, report in enumerate(reports):
                auxiliary_B += self._keep_report(str(self.config.layers + depth), report)
            losses = ahead.losses(self.output, x_BTD, further_BTD, targets_BT, documents_BT, tied, sequence_weights_B)
            objective_B, cross_entropy_B = losses.objective_B.sum(dim=0), losses.cross_entropy_B[0]
        for loss_B in auxiliary_B:
            objective_B = objective_B + loss_B
        return Losses(objective_B, cross_entropy_B) if with_cross_entropy else objective_B

    def hidden_like(
        self, span: range, tokens_BT: Tensor, targets_BT: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, ...]:
        """What a forward pass with these arguments through `span` takes as `hidden`, without values, on the meta device.

        These are the hidden states [B, T, D]; and in training the auxiliary losses [A, B] of the layers before that have a router.
        """
        if span.start == 0:
            return ()
        x_BTD = self.rows_at_hand(torch.empty(*tokens_BT.shape, self.config.dim, dtype=self.compute_dtype, device="meta"))
        routers = sum(spec.experts for spec in layer_specs(self.config)[: span.start])
        if not routers or targets_BT is None or not torch.is_grad_enabled():
            return (x_BTD,)
        return x_BTD, torch.empty(routers, len(tokens_BT), dtype=torch.float32, device="meta")

    def _keep_report(self, layer: str, report: RouterReport | None) -> list[Tensor]:
        """The auxiliary losses of a layer's router, if it has one. Its report is added up over micro-steps, until someone takes it."""
        if report is None:
            return []
        loss, counts = self.router_reports.get(layer, (0, 0))
        self.router_reports[layer] = RouterReport(loss + report.loss_B.detach().double().sum(), counts + report.counts_E)
        return [report.loss_B]

    def begin_router_reports(self, device: torch.device) -> None:
        """Let the reports of this part's routers begin with zeros. Without, a compiled forward pass has one version to begin them and one to add."""
        count = self.config.experts.count
        self.router_reports = {
            layer: RouterReport(
                torch.zeros((), dtype=torch.float64, device=device), torch.zeros(count, dtype=torch.int64, device=device)
            )
            for layer in self.routers()
        }

    def take_router_reports(self) -> dict[str, RouterReport]:
        """By layer with experts, what its router said in training since the last call, losses summed to a scalar."""
        reports, self.router_reports = self.router_reports, {}
        return reports

    def routers(self) -> dict[str, Router]:
        """By layer with experts; the blocks of multi-token prediction are numbered on after the last layer."""
        blocks = dict(self.layers.items())
        for number, depth in enumerate(self.multi_token.depths if self.multi_token else []):
            blocks[str(self.config.layers + number)] = depth.block
        return {name: block.mlp.router for name, block in blocks.items() if isinstance(block.mlp, MixtureOfExperts)}

    def _begin(
        self,
        tokens_BT: Tensor,
        documents_BT: Tensor | None,
        cache: Cache | None,
        positions_BT: Tensor | None,
        specs: list[LayerSpec],
        starts_BN: Tensor | None = None,
    ) -> tuple[Tensor, Inputs]:
        """The places of the tokens in their sequences; and what blocks of these specs get."""
        device = tokens_BT.device
        start = cache.length if cache else 0
        stop = start + tokens_BT.shape[1]
        if documents_BT is not None and documents_BT.shape != tokens_BT.shape:  # would be broadcast otherwise
            raise ValueError(f"documents are {tuple(documents_BT.shape)}, tokens {tuple(tokens_BT.shape)}")
        if cache is not None:
            documents_BT = cache.label(documents_BT, tokens_BT.shape[1])
        numbers_BT = None if documents_BT is None else document_numbers(documents_BT)  # of all positions
        if starts_BN is None and self.config.attention_backend == "varlen":
            starts_BN = starts_of(None if cache else numbers_BT, tokens_BT)
        restarted_BT = document_positions(numbers_BT)[:, start:] if numbers_BT is not None and positions_BT is None else None
        inputs: Inputs = {"none": (None, None)}
        for window in {spec.mask_kind for spec in specs} - {"none"}:
            if window == "begins":
                inputs[window] = None, None if numbers_BT is None else document_begins(numbers_BT)[:, start:]
                continue
            mask = self._mask(start, stop, numbers_BT, device, window, cache, starts_BN)
            if positions_BT is not None:
                tables = self._tables(positions_BT, stop, window > 0)
            else:
                tables = self._tables(torch.arange(stop, device=device), stop, window > 0)
                tables = tables and tuple(table[start:] if restarted_BT is None else table[restarted_BT] for table in tables)
            # Sequences may differ in positions, heads do not.
            inputs[window] = tables and tuple(table[:, None] if table.dim() == 3 else table for table in tables), mask
        places = restarted_BT if positions_BT is None else positions_BT
        return torch.arange(start, stop, device=device) if places is None else places, inputs

    def _embed(self, tokens_BT: Tensor, positions_BT: Tensor, dropout: Dropout | None) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        if self.config.embedding_multiplier != 1:
            # Rounded to the compute format first, as Gemma does.
            x_BTD = x_BTD * torch.full((), self.config.embedding_multiplier, dtype=x_BTD.dtype, device=x_BTD.device)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(positions_BT)
        return drop(x_BTD, dropout and dropout.at("embedding"))

    def _tables(self, positions: Tensor, length: int, local: bool) -> Tables | None:
        """In the compute format: cast in each layer, they would be kept for backward by each layer."""
        if self.config.positions != "rope":
            return None
        cos, sin = rotary_tables(self.config, positions, length, local)
        return cos.to(self.compute_dtype), sin.to(self.compute_dtype)

    def _mask(
        self,
        start: int,
        stop: int,
        numbers_BT: Tensor | None,
        device: torch.device,
        window: int,
        cache: Cache | None,
        starts_BN: Tensor | None,
    ) -> Mask | None:
        """None where only the future is masked, which torch's causal kernel does by itself."""
        switches = self.config.attention
        if start or (cache is not None and numbers_BT is not None):
            return cached_mask(start, stop, device, window, numbers_BT)
        is_plain = numbers_BT is None and not 0 < window < stop and not switches.soft_cap and not switches.sinks
        training = torch.is_grad_enabled()
        backend = None if is_plain else attention_backend(self.config, device, training, self.compute_dtype)
        return self.make_mask(stop, device, backend, numbers_BT, window, *([starts_BN] if backend == "varlen" else []))

    def units(self) -> list[Unit]:
        """See `models/network.py`. A tied head has no weights, and is in no unit, nor is the norm before it."""
        blocks = [*self.layers.values(), *(self.multi_token.depths if self.multi_token else ())]
        tied = self.config.tie_embeddings
        units = [Unit([block], "block") for block in blocks]
        if self.embedding is not None:
            units.insert(0, Unit([self.embedding], "first", lends_to=self.output if tied else None))
        if self.output is not None and not tied:
            units.append(Unit([module for module in (self.norm, self.output) if module is not None], "last", reshard=False))
        return units

    def initial(self, name: str) -> Initial:
        """Mean and standard deviation of a parameter's initial values, by its name.

        Projections into the residual stream are scaled down by the square root of their number (GPT-2, section 2.3).
        """
        if "linear_attention." in name and (found := initial_values(name, self.config)) is not None:
            return found
        if name.endswith(("bias", "sinks", "correction")):
            return 0.0, 0.0
        if self.config.latent.kv_rank and name.endswith(("attention.query_norm.weight", "attention.kv_norm.weight")):
            return 1.0, 0.0  # those of latent attention have no offset
        if "norm" in name:
            return (0.0 if self.config.norm.kind == "rms_offset" else 1.0), 0.0
        if name.endswith(("attention.output.weight", "mlp.down.weight", "experts.down", "shared.down.weight")):
            return 0.0, self.config.init_std / math.sqrt(self.sublayers)
        return 0.0, self.config.init_std

    def matmul_parameters(self) -> int:
        """Parameters that a token is multiplied with; of routed experts those of the active ones."""
        config, tables = self.config, {id(module.weight) for module in self.modules() if isinstance(module, Embedding)}
        matrices = [(name, p) for name, p in self.named_parameters() if p.dim() > 1 and id(p) not in tables]
        # Every token predicted ahead goes through the one head again; a tied one is a table.
        return self._active(matrices) + (config.predict_ahead + config.tie_embeddings) * config.vocab_size * config.dim

    def _active(self, parameters: Iterable[tuple[str, Tensor]]) -> int:
        matrices = [(name, p.numel()) for name, p in parameters if p.dim() > 1 and not name.endswith(("bias", "filter"))]
        routed = sum(count for name, count in matrices if "experts." in name)
        others, experts = sum(count for name, count in matrices if "experts." not in name), self.config.experts
        return others + routed * experts.active // max(1, experts.count)

    def attention_flops(self, sequence_length: int) -> int:
        """FLOPs per token of scores and of the sums over values, forward and backward, over all layers."""
        specs = layer_specs(self.config)
        specs += specs[-1:] * (self.config.predict_ahead or 0)
        return sum(self._attention_flops(spec, sequence_length) for spec in specs)

    def _attention_flops(self, spec: LayerSpec, sequence_length: int) -> int:
        if not spec.has_scores:
            return recurrence_flops(self.config) if spec.linear else 0
        seen = min(sequence_length, spec.window or sequence_length)
        return 6 * self.config.heads * sum(head_widths(self.config)) * seen

    def flops_by_layer(self, sequence_length: int) -> list[int]:
        """`flops_per_token` by layer. The last one has those of the output head and of predicting further tokens, too."""
        found = [
            6 * self._active(block.named_parameters()) + self._attention_flops(block.spec, sequence_length)
            for block in self.layers.values()
        ]
        found[-1] += self.flops_per_token(sequence_length) - sum(found)
        return found

    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs of one forward and backward pass per token; of the whole network."""
        return 6 * self.matmul_parameters() + self.attention_flops(sequence_length)


def _multi_token(config: Model, spec: LayerSpec, loss: Loss | None) -> MultiTokenPrediction:
    weight = (loss or Loss()).predict_ahead_weight
    blocks = [Block(config, spec) for _ in range(config.predict_ahead)]
    return MultiTokenPrediction(blocks, config.dim, spec, lambda: make_norm(config), weight)


def count_parameters(model: nn.Module) -> int:
    """Parameters, a tied one counted once; of whole tensors where they are sharded."""
    return sum(p.numel() for p in model.parameters())
