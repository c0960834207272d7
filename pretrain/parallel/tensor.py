"""Tensor parallelism with sequence parallelism: ranks share the matrices of every layer (Megatron-LM, arXiv 1909.08053 and 2205.05198).

    hidden states [B, R, D]      each rank has R of the T positions; norms, dropout and the residual stream work on these
        | gather                 all positions
    sublayer                     each rank has some heads, some columns of the MLP, or some inner columns of every expert
        | scatter                sums over ranks, of this rank's positions
    hidden states [B, R, D]

The embedding has some rows of its table on each rank, and so has the output head, which computes its losses from the logits of these rows.

One rule holds for all gradients: in backward, every rank has a part of each, and the parts add up to the gradient. `gather` adds them where
positions are exchanged. A parameter that is split has no other parts. Any other parameter (norms, biases, routers, the small matrices of
latent attention, filters) is whole on every rank; its parts are added once in a step, by `sum_gradients`.

Where the number of ranks does not divide T, the last positions are filled up, and what is computed from them is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from pretrain.distributed.mesh import Mesh
from pretrain.distributed.shards import local, own_part
from pretrain.models.attention import Attention, LatentAttention
from pretrain.models.encoder_decoder import CrossAttention
from pretrain.models.experts import Experts, MixtureOfExperts
from pretrain.models.layers import Embedding, Linear, Mlp
from pretrain.models.linear_attention import LinearAttention
from pretrain.models.multi_token import MultiTokenDepth, MultiTokenPrediction
from pretrain.models.output_head import OutputHead
from pretrain.models.positions import RelativeBias
from pretrain.parallel.collectives import add_in_place, extend, gather
from pretrain.parallel.tensor_modules import (
    AllTokens,
    CrossSublayer,
    HeadOfAllPositions,
    LookUpPart,
    NormOfAllHeads,
    OwnHeads,
    OwnLinearHeads,
    OwnTokens,
    Positions,
    SharedRouter,
    Sublayer,
    first_row,
    like_whole,
)

SUBLAYERS = (Attention, LatentAttention, CrossAttention, LinearAttention, Mlp, MixtureOfExperts)
"""What stands between a `gather` and a `scatter`."""


class TensorAxis:
    """Splits a network that is on the meta device over the ranks of the mesh's axis `tensor`."""

    def __init__(self, mesh: Mesh) -> None:
        self.device_mesh = mesh.device_mesh("tensor")
        self.group, self.size, self.rank = self.device_mesh.get_group(), mesh.sizes["tensor"], mesh.coordinates["tensor"]
        self.split_names: set[str] = set()
        """The parameters that are split."""

    def split(self, network: nn.Module, rows: Callable[[int], int] = lambda length: length) -> None:
        """Split the parameters of a network, and set what its modules compute with.

        `rows`: how many positions of a sequence of a length these ranks have together; under context parallelism not all.
        """
        self.network = network
        targets, sources = Positions(self.group), Positions(self.group)

        def note_lengths(network: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
            targets.length = rows((arguments[0] if arguments else named["tokens_BT"]).shape[1])
            source_BS = arguments[1] if len(arguments) > 1 else named.get("source_BS")
            if source_BS is not None:
                sources.length = rows(source_BS.shape[1])

        network.rows_at_hand = targets.own
        network.register_forward_pre_hook(note_lengths, with_kwargs=True)
        encoder = set(network.encoder.modules()) if hasattr(network, "encoder") else set()
        inner = {module.shared for module in network.modules() if isinstance(module, MixtureOfExperts)}
        biases = {module.table for module in network.modules() if isinstance(module, RelativeBias)}
        for module in network.modules():
            positions = sources if module in encoder else targets
            if module not in biases:
                self._split_module(module, positions)
            if isinstance(module, SUBLAYERS) and module not in inner:
                extend(module, Sublayer, positions=positions)
            if isinstance(module, CrossAttention):
                extend(module, CrossSublayer, sources=sources)
        self.split_names = {name for name, p in network.named_parameters() if isinstance(p, DTensor)}

    def sum_gradients(self) -> None:
        """Add the parts of the gradients of parameters that are whole on every rank. Call it after the last micro-step of a step."""
        whole = [p.grad for name, p in self.network.named_parameters() if name not in self.split_names and p.grad is not None]
        parts = [local(gradient) for gradient in whole]
        # With parallel.offload, matrices are on the host.
        for device in sorted({part.device for part in parts}, key=str):
            add_in_place([part for part in parts if part.device == device], self.group)

    def _split_module(self, module: nn.Module, positions: Positions) -> None:
        match module:
            case Attention() | LatentAttention() | CrossAttention() | LinearAttention():
                self._split_attention(module)
            case Mlp():
                self._split_linear(module.up, 0)
                self._split_linear(module.gate, 0)
                self._split_linear(module.down, 1)
            case MixtureOfExperts():  # every rank routes all positions, and has some inner columns of every expert
                extend(module.router, SharedRouter, ranks=self.size)
            case Experts():
                for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
                    self._split_parameter(module, name, dim)
                module.product = partial(self._expert_product, module.product)
            case Embedding():
                self._split_parameter(module, "weight", 0)
                module.rows = partial(self._look_up, positions)
            case OutputHead():
                table = self.network.embedding if module.weight is None else module
                module.shard = HeadShard(self, len(table.weight))
                self._split_parameter(module, "weight", 0)
                extend(module, HeadOfAllPositions, positions=positions)
            case MultiTokenPrediction():
                extend(module, AllTokens, positions=positions)
            case MultiTokenDepth():
                extend(module, OwnTokens, positions=positions)

    def _split_attention(self, module: nn.Module) -> None:
        """Give each rank some heads. Fewer key heads than ranks stay whole, and each rank uses the one of its query heads."""
        if isinstance(module, LinearAttention):
            whole = ("query", "key") if module.key_heads == 1 else ()
            module.split_key_heads = max(1, module.key_heads // self.size)
            for name in module.projections:
                if name not in whole:
                    self._split_linear(getattr(module, name), 0)
            self._split_linear(module.output, 1)
            extend(module, OwnLinearHeads, group=self.group)
            return
        if isinstance(module, LatentAttention):
            heads = keys = module.output.in_features // module.value_dim
            for name in ("query", "query_up", "kv_up"):
                self._split_linear(getattr(module, name, None), 0)
        else:
            heads, keys = (linear.out_features // module.head_dim for linear in (module.query, module.key))
            split = [module.query, module.key, module.value] if keys % self.size == 0 else [module.query]
            for linear in (*split, getattr(module, "gate", None)):
                self._split_linear(linear, 0)
            if isinstance(module, Attention) and not module.per_head and module.query_norm is not None:
                for linear, norm in ((module.query, module.query_norm), (module.key, module.key_norm)):
                    if linear in split:
                        extend(norm, NormOfAllHeads, group=self.group, own=self.own(norm.weight.numel()))
        self._split_linear(module.output, 1)
        own = self.own(heads)
        used = slice(own.start * keys // heads, (own.stop - 1) * keys // heads + 1) if keys % self.size else slice(None)
        extend(module, OwnHeads, own_heads=own, used_keys=used)

    def _split_linear(self, linear: Linear | None, dim: int) -> None:
        """Split the rows (`dim` 0) or the columns (1) of a projection, if there is one."""
        if linear is not None:
            self._split_parameter(linear, "weight", dim)
            linear.product = partial(self._product_of_columns if dim else self._product_of_rows, linear.product)

    def _split_parameter(self, module: nn.Module, name: str, dim: int) -> None:
        whole = getattr(module, name)  # experts without gates have no such parameter
        if whole is not None and not isinstance(whole, DTensor):
            # Without a source rank it communicates nothing.
            part = distribute_tensor(whole.data, self.device_mesh, [Shard(dim)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))

    def own(self, count: int) -> slice:
        """This rank's stretch of `count` things, which all ranks share equally."""
        return own_part(count, self.rank, self.size)

    # ---- what modules compute -----------------------------------------------------------------------------------------

    def _product_of_rows(self, product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's components of the result."""
        return product(x, weight.to_local(), None if bias is None else bias[self.own(len(bias))])

    def _product_of_columns(self, product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's addend of the result. One rank adds the bias."""
        return product(x, weight.to_local(), self._once(bias))

    def _expert_product(
        self,
        product: Callable[..., Tensor],
        x_RI: Tensor,
        weight_EOI: Tensor,
        bias_EO: Tensor | None,
        experts_R: Tensor,
        ends_E: Tensor,
    ) -> Tensor:
        if bias_EO is not None:
            of_result = weight_EOI.placements[-1].dim == 2
            bias_EO = self._once(bias_EO) if of_result else bias_EO[:, self.own(bias_EO.shape[1])]
        return product(x_RI, weight_EOI.to_local(), bias_EO, experts_R, ends_E)

    def _once(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias * float(self.rank == 0)

    def _look_up(self, positions: Positions, table_VD: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        rows = LookUpPart.apply(table_VD, ids, dtype, first_row(len(table_VD), self.size, self.rank))
        return positions.scatter(rows) if ids.dim() > 1 else positions.scatter(rows[None])[0]


class HeadShard:
    """The rows of the output weight that a rank holds. See `VocabularyShard` in models/loss.py."""

    def __init__(self, axis: TensorAxis, vocabulary: int) -> None:
        self.axis, self.vocabulary = axis, vocabulary
        self.start, self.largest = first_row(vocabulary, axis.size, axis.rank), -(-vocabulary // axis.size)

    def part(self, weight_VD: Tensor) -> Tensor:
        return weight_VD.to_local()

    def whole(self, gradient: Tensor, weight_VD: Tensor) -> Tensor:
        return like_whole(gradient, weight_VD)

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.axis.group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        return gather(values[None], self.axis.group).unflatten(1, (self.axis.size, -1))[0]

    def join(self, logits_BTV: Tensor) -> Tensor:
        filled = F.pad(logits_BTV, (0, self.largest - logits_BTV.shape[2])).transpose(1, 2)
        return gather(filled, self.axis.group)[:, : self.vocabulary].transpose(1, 2)
