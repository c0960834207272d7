"""Loads of experts, over all ranks and micro-steps of a step. They move the routers' corrections and are logged."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from pretrain.config.model_schema import Model
from pretrain.distributed.mesh import Mesh
from pretrain.models.experts import Router

log = logging.getLogger(__name__)


class ExpertLoads:
    """The loads of a model's experts; without experts it does nothing. All ranks call all methods together."""

    def __init__(self, model: nn.Module, config: Model, mesh: Mesh) -> None:
        self.model, self.config, self.mesh = model, config.experts, mesh
        # A model of transformers has none here: it handles its routers itself.
        self.routers = model.routers() if config.experts.count else {}
        if self.routers:
            model.begin_router_reports(mesh.device)
        known = mesh.ranks.gather("layers with experts", list(self.routers)) if config.experts.count else []
        self.layers = sorted({layer for own in known for layer in own}, key=int)
        """Those of all ranks; a rank of a pipeline has some of their routers."""
        self.since_report = torch.zeros(len(self.layers), config.experts.count or 0, dtype=torch.int64)
        self.by_last_step = bool(self.layers) and config.experts.balance_scope == "global_batch"
        if self.by_last_step:
            for router in self.routers.values():
                even = self.config.active / self.config.count
                router.shares_E = torch.full((self.config.count,), even, device=mesh.device)
        self.last: list[list[int]] | None = None
        """With `experts.balance_scope: global_batch`: positions that each expert got in the last step, by layer. A checkpoint holds them."""

    def restore(self, last: list[list[int]] | None) -> None:
        """Continue from the `last` of a checkpoint. Without one, the first step takes loads as even, and balancing has no effect in it."""
        if self.by_last_step and last is not None:
            counts_LE = torch.tensor(last)
            self.last = counts_LE.tolist()
            self._share(counts_LE.to(self.mesh.device), torch.tensor(True, device=self.mesh.device))
        elif self.by_last_step and self.mesh.ranks.is_main:
            log.info("experts: no loads are known yet, so the balancing loss has no effect in the first step")

    def _share(self, counts_LE: Tensor, taken: Tensor) -> None:
        """Tell the routers how the positions of a step were spread, if it was `taken`."""
        for router, counts_E in self._loaded(counts_LE):
            shares_E = counts_E.double() * self.config.active / counts_E.sum().clamp(min=1)
            router.shares_E = torch.where(taken, shares_E.float(), router.shares_E)

    def _loaded(self, counts_LE: Tensor) -> list[tuple[Router, Tensor]]:
        """The routers of this rank, and the loads of each."""
        return [(router, counts_LE[self.layers.index(layer)]) for layer, router in self.routers.items()]

    def after_step(self, target_tokens: int, taken: Tensor) -> dict[str, Tensor]:
        """Balance by the step's loads if it was `taken`, a truth value on the device. Return figures for `settle`; the host waits for none.

        `router_loss` among them is the mean auxiliary loss of a target token; it lacks where no such loss is configured.
        """
        if not self.layers:
            return {}
        device, reports = self.mesh.device, self.model.take_router_reports()
        if self.routers:
            self.model.begin_router_reports(device)
        # In one message: fp64 holds counts below 2^53 exactly. The last number is the loss.
        own = torch.zeros(self.since_report.numel() + 1, dtype=torch.float64, device=device)
        own_LE = own[:-1].view(self.since_report.shape)
        for layer, report in reports.items():
            own_LE[self.layers.index(layer)] = report.counts_E.double()
            own[-1] += report.loss_B
        total = self.mesh.add_over_layers(own)
        counts_LE, loss = total[:-1].view(self.since_report.shape).long(), total[-1]
        if self.config.correction_rate:
            for router, counts_E in self._loaded(counts_LE):
                move_correction(router.correction, counts_E * taken, self.config.correction_rate)
        if self.by_last_step:
            self._share(counts_LE, taken)
        losses = {"router_loss": loss / target_tokens} if self.config.balance_loss or self.config.router_z_loss else {}
        return {"loads": counts_LE, **losses}

    def settle(self, figures: dict[str, Tensor]) -> float | None:
        """Take up the figures of a step that was taken, once they are on the host. Return its `router_loss`."""
        if "loads" in figures:
            self.since_report += figures["loads"]
            if self.by_last_step:
                self.last = figures["loads"].tolist()
        return float(figures["router_loss"]) if "router_loss" in figures else None

    def take(self) -> tuple[dict[str, list[int]] | None, dict[str, float] | None]:
        """By layer: target tokens that each expert got since the last call, and the largest load over the mean one."""
        if not self.layers:
            return None, None
        counts = {layer: counts_E.tolist() for layer, counts_E in zip(self.layers, self.since_report)}
        self.since_report.zero_()
        return counts, {layer: max(c) * len(c) / max(1, sum(c)) for layer, c in counts.items()}


@torch.no_grad()
def move_correction(correction_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """One step towards even loads (arXiv 2408.15664, algorithm 1): up by `rate` below the mean load, down above it.

    It compares integers, so that every layout moves the same way.
    """
    direction_E = (counts_E.sum() - len(counts_E) * counts_E).sign()
    correction_E += rate * direction_E.to(correction_E)
