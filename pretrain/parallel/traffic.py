"""What ranks send each other in a step, by formula: what each axis does, from the modules of a rank's part of the network.

    ddp        an all-reduce per bucket of gradients
    fsdp       an all-gather of each unit before it computes, a reduce-scatter of its gradients; over replicas an all-reduce;
               vectors together in one all-reduce per step
    tensor     each sublayer gathers its input and scatters its sum, and backward the other way round; tables, head and loss add theirs
    context    each attention gathers keys and values, and backward scatters their gradients; so do the reports of routers
    pipeline   messages, in the order of the schedule; gradients of tables that several stages hold
    expert     five exchanges for each layer with experts

Clipping and the optimizer are not in it. `equivalence/measured_run.py` counts what a run really sends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from pretrain.config.schema import Config
from pretrain.distributed.mesh import AXES, coordinates_of
from pretrain.distributed.shards import stretch_length
from pretrain.models import network_without_values
from pretrain.models.attention import Attention, LatentAttention
from pretrain.models.encoder_decoder import CrossAttention, EncoderDecoder
from pretrain.models.experts import MixtureOfExperts, Router
from pretrain.models.families import family_of
from pretrain.models.layers import Embedding
from pretrain.models.linear_attention import LinearAttention, Mamba2
from pretrain.models.loss import LossOptions
from pretrain.models.loss_chunks import whole_chunk_size
from pretrain.models.network import Unit
from pretrain.parallel.blocks import DTYPES
from pretrain.parallel.ddp import keeps_buckets
from pretrain.parallel.fsdp_gathers import keeps_weights, resharding
from pretrain.parallel.layout import Layout
from pretrain.parallel.pipeline_order import (
    DEFERRING,
    FORWARD,
    WEIGHT,
    Action,
    cut,
    order,
    share_layers,
    stage_ranks,
    stages_of,
)
from pretrain.parallel.strategy import layer_costs
from pretrain.parallel.tensor import SUBLAYERS

GATHER, SCATTER, REDUCE, EXCHANGE, SEND, RECEIVE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send", "receive"
KINDS = (GATHER, SCATTER, REDUCE, EXCHANGE, SEND, RECEIVE)


@dataclass
class Traffic:
    """Collectives of a rank by kind: `each` of every micro-step, and what comes `once` in a step besides."""

    each: Counter[str] = field(default_factory=Counter)
    once: Counter[str] = field(default_factory=Counter)
    unknown: set[str] = field(default_factory=set)
    """Kinds that have no formula."""

    def step(self, micro_steps: int) -> dict[str, int]:
        """The collectives of a step, without the kinds that are unknown."""
        counts = {kind: micro_steps * self.each[kind] + self.once[kind] for kind in KINDS if kind not in self.unknown}
        return {kind: count for kind, count in counts.items() if count}

    def formula(self, micro_steps: int) -> dict[str, str]:
        """The same, as sums: `4 x 7 + 1`."""

        def written(kind: str) -> str:
            parts = [f"{micro_steps} x {self.each[kind]}"] if self.each[kind] else []
            return " + ".join([*parts, *([str(self.once[kind])] if self.once[kind] else [])])

        return {kind: written(kind) for kind in self.step(micro_steps)}


def expected_traffic(config: Config, layout: Layout, rank: int) -> Traffic | None:
    """The collectives of a rank's forward and backward passes, for a complete configuration. None where there is no formula."""
    if _unknown(config, layout):
        return None
    sizes = layout.axes
    network = network_without_values(config)
    place = coordinates_of(rank, {axis: sizes[axis] for axis in AXES})
    traffic = Traffic()
    if layout.pipeline > 1:
        stages = PipelinePart.of(network, config, layout, place["pipeline"])
        network = stages.network
        _add_messages(traffic, stages, config)
    if layout.strategy == "ddp":
        _add_buckets(traffic, network, config, layout)
    if layout.strategy == "fsdp":
        _add_shards(traffic, network, config, layout)
    if layout.tensor > 1:
        _add_matrices(traffic, network, config, layout)
    if layout.context > 1:
        _add_positions(traffic, network, config, layout)
    if layout.expert > 1:
        traffic.each[EXCHANGE] += 5 * sum(isinstance(module, MixtureOfExperts) for module in network.modules())
    return traffic


def _unknown(config: Config, layout: Layout) -> bool:
    """Whether a layout has no formula: compiled blocks, sizes that differ from step to step, recomputed collectives."""
    parallel = config.parallel
    recomputed = parallel.activation_checkpointing != "none" and (layout.tensor > 1 or layout.context > 1 or layout.expert > 1)
    of_others = not family_of(config.model.family).is_ours and layout.strategy == "fsdp"
    return bool(parallel.compile != "none" or recomputed or of_others or parallel.offload or not layout.micro_steps)


def _sync_counts(config: Config, hybrid: bool) -> tuple[bool, bool]:
    """Whether gradients are scattered, and whether they are reduced over replicas, in each micro-step; else in the last one."""
    mode = config.parallel.grad_sync
    if config.parallel.pipeline > 1 and config.parallel.pipeline_schedule in DEFERRING:
        mode = "last"
    return mode != "last", mode == "every" or (mode == "auto" and not hybrid)


def _add(traffic: Traffic, kind: str, count: int, each: bool) -> None:
    (traffic.each if each else traffic.once)[kind] += count


# ---- data axes ----------------------------------------------------------------------------------------------------------


def _add_buckets(traffic: Traffic, network: nn.Module, config: Config, layout: Layout) -> None:
    """DDP fills buckets in the order in which gradients come, which is about that of the parameters reversed.

    Buckets that are kept (`keeps_buckets`) are in the order of the parameters, and a map of used ones travels besides.
    """
    kept = keeps_buckets(config, layout.replicate)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    limit = int(config.parallel.ddp.bucket_mb * 2**20)
    buckets, _ = dist._compute_bucket_assignment_by_size(trained if kept else trained[::-1], [limit])
    _add(traffic, REDUCE, len(buckets) + kept, config.parallel.grad_sync == "every")


def _add_shards(traffic: Traffic, network: nn.Module, config: Config, layout: Layout) -> None:
    sharing, hybrid = layout.shard * layout.context, layout.replicate > 1
    scatters, reduces = _sync_counts(config, hybrid)
    if layout.pipeline > 1 and sharing > 1:
        traffic.unknown.add(GATHER)  # in backward FSDP2 gathers ahead, at times for another micro-batch than the next
    weights = _groups_of_weights(network, config, layout)
    look_ups = 2 if config.model.encoder.share_embedding else 1
    for unit, reshard, groups in weights:
        for ranks in groups:
            if ranks > 1:
                _add(traffic, GATHER, gathers(unit, reshard, look_ups), reshard is True or not keeps_weights(config))
                _add(traffic, SCATTER, 1, scatters)
            if hybrid:
                _add(traffic, REDUCE, 1, reduces)
    has_vectors = any(parameter.dim() < 2 and parameter.requires_grad for parameter in network.parameters())
    if has_vectors and layout.replicate * sharing > 1:
        traffic.once[REDUCE] += 1


def gathers(unit: Unit | None, reshard: bool | int, look_ups: int) -> int:
    """How often a micro-step gathers the weights of a unit. None: the root, whose weights are kept for backward.

    A table is gathered for each look-up, and for a tied head again, but not in backward. The other units are gathered in forward, and again
    in backward if forward frees them (`reshard`, of `fsdp_gathers.resharding`).
    """
    if unit is not None and isinstance(unit.modules[0], Embedding):
        lent = unit.lends_to is not None
        return look_ups + lent if reshard else 1
    return 2 if reshard else 1


def _groups_of_weights(network: nn.Module, config: Config, layout: Layout) -> list[tuple[Unit | None, bool | int, list[int]]]:
    """Each unit that has matrices, the root as None, whether forward frees them, and how many ranks share them: those of experts may be fewer."""
    units = [unit for unit in network.units() if unit.apart]
    freed = resharding(units, config.parallel.reshard_after_forward)
    inside = {parameter for unit in units for module in unit.modules for parameter in module.parameters()}
    sharing, found = layout.shard * layout.context, []
    of_experts = {
        parameter
        for module in network.modules()
        if isinstance(module, MixtureOfExperts) and layout.expert > 1
        for parameter in module.experts.parameters()
    }
    for unit, reshard in [*zip(units, freed), (None, False)]:
        own = {p for module in unit.modules for p in module.parameters()} if unit else set(network.parameters()) - inside
        matrices = {parameter for parameter in own if parameter.dim() > 1 and parameter.requires_grad}
        groups = [sharing] if matrices - of_experts else []
        groups += [sharing // layout.expert] if matrices & of_experts else []
        if groups:
            found.append((unit, reshard, groups))
    return found


# ---- tensor and context axes ----------------------------------------------------------------------------------------------


def _add_pairs(traffic: Traffic, forward: str, count: int) -> None:
    """Collectives whose backward is the opposite one."""
    traffic.each[forward] += count
    traffic.each[SCATTER if forward == GATHER else GATHER] += count


def _add_matrices(traffic: Traffic, network: nn.Module, config: Config, layout: Layout) -> None:
    modules = list(network.modules())
    inner = {module.shared for module in modules if isinstance(module, MixtureOfExperts)}
    sublayers = sum(isinstance(module, SUBLAYERS) and module not in inner for module in modules)
    memories = sum(isinstance(module, CrossAttention) for module in modules)  # each gathers the encoder's output
    _add_pairs(traffic, GATHER, sublayers + memories + _shifts(network))
    _add_pairs(traffic, SCATTER, sublayers + _look_ups(network))
    for module in modules:
        if isinstance(module, Attention) and not module.per_head and module.query_norm is not None:
            norms = 2 if config.model.kv_heads % layout.tensor == 0 else 1
            traffic.each[REDUCE] += 2 * norms
    if config.model.linear_attention.key_heads == 1:
        _add_sums_of_group(traffic, modules)
    if network.output is not None:
        _add_pairs(traffic, GATHER, 1)
        chunks = _chunks_of_logits(config, layout)
        traffic.each[GATHER] += chunks
        traffic.each[REDUCE] += chunks * (2 if config.loss.label_smoothing else 1)
    routers = any(isinstance(module, Router) for module in modules)
    if routers or any(parameter.dim() < 2 and parameter.requires_grad for parameter in network.parameters()):
        traffic.once[REDUCE] += 1


def _add_sums_of_group(traffic: Traffic, modules: list[nn.Module]) -> None:
    """The norms of Mamba 2 where ranks share the value heads of a key head. Each adds up in forward, when forward is computed again, and in backward."""
    traffic.each[REDUCE] += 3 * sum(isinstance(module, Mamba2) for module in modules)


def _look_ups(network: nn.Module) -> int:
    """How often a micro-step looks up rows of a table."""
    if isinstance(network, EncoderDecoder):
        first_of_encoder, first_of_decoder = "0" in network.encoder, "0" in network.decoder
        return first_of_encoder + first_of_decoder
    calls = "0" in network.layers or network.multi_token is not None
    return calls * (1 + (network.position_embedding is not None))


def _shifts(network: nn.Module) -> int:
    """Multi-token prediction gathers the embedded tokens to shift them."""
    return getattr(network, "multi_token", None) is not None


def _chunks_of_logits(config: Config, layout: Layout) -> int:
    length, context = _target_length(config), layout.context
    rows = length if context == 1 else 2 * stretch_length(length, context)
    tokens = config.batch.micro_sequences * rows * (1 + config.model.predict_ahead)
    largest = -(-config.model.vocab_size // layout.tensor)
    options = LossOptions.of(config.loss)
    on_cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    return -(-tokens // whole_chunk_size(tokens, largest, DTYPES[config.precision.compute], on_cpu, options))


def _target_length(config: Config) -> int:
    from pretrain.data.tasks import Spans

    spans = Spans.of_data(config.data)
    return spans.target_length if spans else config.data.sequence_length


def _add_positions(traffic: Traffic, network: nn.Module, config: Config, layout: Layout) -> None:
    modules, experts = list(network.modules()), config.model.experts
    attentions = sum(isinstance(module, (Attention, LatentAttention, CrossAttention)) for module in modules)
    if config.parallel.context_method == "ring":
        for kind in (SEND, RECEIVE):  # forward sends keys and values on; backward does so again, and sends their gradients home
            traffic.each[kind] += attentions * 3 * (layout.context - 1)
        attentions = 0
    _add_pairs(traffic, GATHER, 2 * attentions + _shifts(network))
    linear = [module for module in modules if isinstance(module, LinearAttention)]
    traffic.each[EXCHANGE] += 4 * len(linear)  # to heads and back, forward and backward
    if linear and max(1, config.model.linear_attention.key_heads // layout.tensor) == 1:
        _add_pairs(traffic, GATHER, len(linear))
        _add_sums_of_group(traffic, linear)
    routers = sum(isinstance(module, Router) for module in modules)
    traffic.each[GATHER] += 4 * routers  # logits, scores, choices, and which positions count
    traffic.each[SCATTER] += routers * (bool(experts.balance_loss) + bool(experts.router_z_loss))


# ---- the pipeline ---------------------------------------------------------------------------------------------------------


@dataclass
class PipelinePart:
    """A rank's part of a pipeline: its network, what it computes in which order, and who else holds its parameters."""

    network: nn.Module
    rank: int
    spans: list[range]
    rank_of: list[int]
    """One for each stage."""
    actions: list[Action]
    holders: dict[str, list[int]]

    @classmethod
    def of(cls, network: nn.Module, config: Config, layout: Layout, rank: int) -> PipelinePart:
        parallel, ranks = config.parallel, layout.pipeline
        spans = cut(layer_costs(network, config), stages_of(parallel))
        rank_of = stage_ranks(parallel.pipeline_schedule, ranks, len(spans))
        by_rank, holders = share_layers(network, spans, rank_of)
        actions = order(parallel.pipeline_schedule, ranks, len(spans), layout.micro_steps)[rank]
        return cls(network.keep(by_rank[rank]), rank, spans, rank_of, actions, holders)


def _add_messages(traffic: Traffic, stages: PipelinePart, config: Config) -> None:
    last = len(stages.spans) - 1

    def tensors(stage: int) -> int:
        """How many a stage takes from the one before."""
        ids = torch.empty(1, 8, dtype=torch.int64, device="meta")
        more = {"source_BS": ids} if config.model.encoder.layers else {}
        return len(stages.network.hidden_like(stages.spans[stage], tokens_BT=ids, targets_BT=ids, **more))

    for kind, stage, _ in stages.actions:
        if kind == WEIGHT:
            continue
        if stage < last and stages.rank_of[stage + 1] != stages.rank:
            traffic.once[SEND if kind == FORWARD else RECEIVE] += tensors(stage + 1)
        if stage > 0 and stages.rank_of[stage - 1] != stages.rank:
            traffic.once[RECEIVE if kind == FORWARD else SEND] += tensors(stage)
    for name, _ in stages.network.named_parameters():
        others = stages.holders[name]
        if len(others) > 1:
            count = len(others) - 1 if stages.rank == others[0] else 1
            traffic.once[SEND] += count
            traffic.once[RECEIVE] += count
