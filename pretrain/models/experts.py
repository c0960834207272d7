"""Mixture of experts (Shazeer et al., arXiv 1701.06538; Switch, arXiv 2101.03961), as single-device code.

    x_ND --router--> K experts per token, K weights
    rows (token, choice) sorted by expert --> experts, each on its stretch of rows --> back to tokens, weighted, summed over K

No expert has a capacity: every token reaches all its experts, and what a token gets does not depend on the others around it. N tokens,
K choices of each, R = N x K rows, E experts, D model, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError
from pretrain.models.activations import ACTIVATIONS, gate
from pretrain.models.layers import Linear, Mlp, at_hand


class RouterReport(NamedTuple):
    """What a layer's router says of a micro-step, over the positions that carry a loss."""

    loss_B: Tensor
    """Auxiliary losses of each sequence times its target tokens, fp32: dividing by the step's target tokens gives their mean."""

    counts_E: Tensor
    """Positions sent to each expert, int64."""


class Router(nn.Module):
    """Scores of all experts from one projection, computed in fp32; the best `experts.active` are chosen.

    `correction` is added to the scores for the choice alone and gets no gradient (arXiv 2408.15664): train/balancing.py moves it.
    `shares_E` is for `experts.balance_scope: global_batch`: how many of a position's choices went to each expert on average in the step
    before. train/balancing.py sets it, before the first step to even shares. Without a trainer it is None, which means even shares too.
    """

    casts = ("weight",)
    shares_E: Tensor | None = None

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config.experts
        count = config.experts.count
        self.weight = nn.Parameter(torch.empty(count, config.dim))
        self.bias = nn.Parameter(torch.zeros(count)) if config.experts.router_bias else None
        self.correction = nn.Parameter(torch.zeros(count), requires_grad=False) if config.experts.correction else None

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None) -> tuple[Tensor, Tensor, RouterReport | None]:
        """Chosen experts [B, T, K] and their weights [B, T, K], fp32; a report over the positions that are `counted_BT`."""
        config = self.config
        # The matrix is rounded to the compute format first, as FSDP2 hands it over; the products are of fp32.
        weight_ED = at_hand(self).to(x_BTD.dtype).float()
        logits_BTE = F.linear(x_BTD.float(), weight_ED, None if self.bias is None else self.bias.float())
        scores_BTE = logits_BTE.softmax(-1) if config.scoring == "softmax" else logits_BTE.sigmoid()
        chosen_BTK = self._choose(scores_BTE.detach())
        weights_BTK = scores_BTE.gather(-1, chosen_BTK)
        if config.normalise:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + 1e-20)
        if config.scale != 1:
            weights_BTK = weights_BTK * config.scale
        if counted_BT is None:
            return chosen_BTK, weights_BTK, None
        return chosen_BTK, weights_BTK, self.report(logits_BTE, scores_BTE, chosen_BTK, counted_BT)

    def _choose(self, scores_BTE: Tensor) -> Tensor:
        if self.correction is not None:
            scores_BTE = scores_BTE + self.correction.to(scores_BTE)
        if self.config.groups > 1:
            scores_BTE = _best_groups(scores_BTE, self.config.groups, self.config.active_groups)
        return scores_BTE.topk(self.config.active, dim=-1).indices

    def report(self, logits_BTE: Tensor, scores_BTE: Tensor, chosen_BTK: Tensor, counted_BT: Tensor) -> RouterReport:
        """Auxiliary losses and loads, over the counted positions, n of a sequence. The losses are those of a position, times n.

        Balance: E x sum over experts of f_e x P_e. P_e is the mean score of expert e, where the scores of a position sum to one. f_e is the
        share of positions sent to it. The f_e sum to K = `experts.active`, and so the loss is K where loads are even. It is equation 4 of
        arXiv 2101.03961. Equation 17 of arXiv 2412.19437 and Megatron divide f_e by K, so their loss is K times smaller. f_e is counted

        sequence       over the sequence itself (arXiv 2412.19437)
        global_batch   over all sequences of the step before: `shares_E` (arXiv 2501.11873, but for being one step old)

        In either case all layouts that do not cut sequences compute the same. z-loss: mean squared log-sum-exp of the logits (arXiv
        2202.08906, equation 5).
        """
        config, sequences, experts = self.config, len(counted_BT), self.config.count
        counted_BT1 = counted_BT[..., None]
        places = chosen_BTK + experts * torch.arange(sequences, device=chosen_BTK.device)[:, None, None]
        counts, counted = places.new_zeros(sequences * experts), counted_BT1.expand_as(places).flatten().long()
        counts_BE = counts.index_add_(0, places.flatten(), counted).view(sequences, experts)
        loss_B = torch.zeros(sequences, dtype=torch.float32, device=chosen_BTK.device)
        if config.balance_loss:
            normal_BTE = scores_BTE if config.scoring == "softmax" else scores_BTE / scores_BTE.sum(-1, keepdim=True)
            summed_BE = (normal_BTE * counted_BT1).sum(1)
            if config.balance_scope == "sequence":
                pulled_B = (counts_BE * summed_BE).sum(1) / counted_BT.sum(1).clamp(min=1)
            else:
                shares_E = torch.full((experts,), config.active / experts) if self.shares_E is None else self.shares_E
                pulled_B = summed_BE @ shares_E.to(summed_BE)
            loss_B = loss_B + config.balance_loss * experts * pulled_B
        if config.router_z_loss:
            loss_B = loss_B + config.router_z_loss * (logits_BTE.logsumexp(-1).square() * counted_BT).sum(1)
        return RouterReport(loss_B, counts_BE.sum(0))


def _best_groups(scores_BTE: Tensor, groups: int, active: int) -> Tensor:
    """Scores without the experts of other groups than the `active` best; a group is as good as its two best (DeepSeek-V3)."""
    scores_BTGS = scores_BTE.unflatten(-1, (groups, -1))
    best_BTA = scores_BTGS.topk(2, dim=-1).values.sum(-1).topk(active, dim=-1).indices
    kept_BTG = torch.zeros_like(scores_BTGS[..., 0], dtype=torch.bool).scatter(-1, best_BTA, True)
    return scores_BTGS.masked_fill(~kept_BTG[..., None], -torch.inf).flatten(-2)


def check_router(model: Model) -> None:
    """Raise ConfigError for a router that training would never reach, of a complete model."""
    experts = model.experts
    if experts.count > 1 and experts.active == 1 and experts.normalise:
        raise ConfigError(
            "model.experts.active=1 with model.experts.normalise=true never trains the router: a token's one weight is always 1, which has no "
            "gradient; raise model.experts.active to 2, or set normalise to false where the family allows it"
        )


def router_caution(model: Model) -> str | None:
    """What to say of a complete model in whose training nothing keeps the loads of experts even; None where something does."""
    experts = model.experts
    if experts.active >= experts.count or experts.balance_loss or (experts.correction and experts.correction_rate):
        return None
    said = "model.experts.balance_loss=0" + (" and model.experts.correction_rate=0" if experts.correction else "")
    return (
        f"nothing keeps the loads of the {experts.count} experts even ({said}): few of them may end up with all tokens; set "
        f"model.experts.balance_loss, to {0.01 / experts.active:.3g} say"
        + (", or model.experts.correction_rate" if experts.correction else "")
    )


class MixtureOfExperts(nn.Module):
    """Routed experts, and shared ones that every token passes through, in place of an MLP."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        width, mlp = config.experts.ffn_dim, config.mlp
        self.router = Router(config)
        self.experts = Experts(config.experts.count, config.dim, width, mlp.activation, mlp.gated, mlp.bias)
        shared = config.experts.shared
        self.shared = Mlp(config.dim, shared * width, mlp.activation, mlp.gated, mlp.bias) if shared else None
        self.shared_gate = Linear(config.dim, 1, steers=True) if config.experts.shared_gate else None

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None = None) -> tuple[Tensor, RouterReport | None]:
        """The sublayer's output; the router's report where there are positions to count (`Router`)."""
        chosen_BTK, weights_BTK, report = self.router(x_BTD, counted_BT)
        y_ND = dispatch(self.experts, x_BTD.flatten(0, 1), chosen_BTK.flatten(0, 1), weights_BTK.flatten(0, 1))
        y_BTD = y_ND.view_as(x_BTD)
        if self.shared is None:
            return y_BTD, report
        shared_BTD = self.shared(x_BTD)
        return y_BTD + (shared_BTD if self.shared_gate is None else shared_BTD * self.shared_gate(x_BTD).sigmoid()), report


def project_rows(x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, experts_R: Tensor, ends_E: Tensor) -> Tensor:
    """Each row times the weight of its expert, plus its bias. Rows are sorted by expert; those of expert e end at `ends_E[e]`."""
    return add_biases(multiply_rows(x_RI, weight_EOI, ends_E), bias_EO, experts_R)


def add_biases(y_RO: Tensor, bias_EO: Tensor | None, experts_R: Tensor) -> Tensor:
    """Rows plus the biases of their experts, if there are any."""
    # An embedding look-up: its gradient is a sum per expert, of zero rows too, in a fixed order.
    return y_RO if bias_EO is None else y_RO + F.embedding(experts_R, bias_EO.to(y_RO.dtype))


def multiply_rows(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Each row times the weight of its expert."""
    product = (
        _grouped if _has_grouped_kernel(x_RI, weight_EOI) else _one_operator if torch.compiler.is_compiling() else _one_by_one
    )
    return product(x_RI, weight_EOI.to(x_RI.dtype), ends_E)


def outer_products(g_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of each expert's weight, [E, O, I], from the gradients of its rows' results and the rows. Autograd makes the same."""
    if _has_grouped_kernel(x_RI, g_RO.new_empty(0, g_RO.shape[1], x_RI.shape[1])):
        return _grouped_kernel()(g_RO.T, x_RI, offs=ends_E.int())
    sizes = _stretches(ends_E, len(x_RI))
    return torch.stack([g.T @ x for g, x in zip(g_RO.split(sizes), x_RI.split(sizes))])


class Experts(nn.Module):
    """MLPs of one shape whose weights are stacked: gate and up [E, F, D], down [E, D, F], biases [E, F] and [E, D]. `product` is
    `project_rows`, unless parallel/ sets another.
    """

    casts = ("gate", "up", "down")
    product: Callable[..., Tensor] = staticmethod(project_rows)

    def __init__(self, count: int, dim: int, ffn_dim: int, activation: str, gated: bool, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Parameter(torch.empty(count, ffn_dim, dim)) if gated else None
        self.up = nn.Parameter(torch.empty(count, ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(count, dim, ffn_dim))
        self.gate_bias = nn.Parameter(torch.empty(count, ffn_dim)) if gated and bias else None
        self.up_bias = nn.Parameter(torch.empty(count, ffn_dim)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(count, dim)) if bias else None

    def forward(self, x_RD: Tensor, experts_R: Tensor) -> Tensor:
        """Each row through its expert; `experts_R` says which, and is sorted."""
        count = len(self.up)
        ends_E = torch.searchsorted(experts_R, torch.arange(count, device=x_RD.device), right=True)
        up_RF = self.product(x_RD, at_hand(self, "up"), self.up_bias, experts_R, ends_E)
        if self.gate is None:
            inner_RF = ACTIVATIONS[self.activation](up_RF)
        else:
            inner_RF = gate(
                self.activation, self.product(x_RD, at_hand(self, "gate"), self.gate_bias, experts_R, ends_E), up_RF
            )
        return self.product(inner_RF, at_hand(self, "down"), self.down_bias, experts_R, ends_E)


def _has_grouped_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped matrix product takes it: bf16 on CUDA, rows of whole 16 bytes, one at least. Without values, it is as on a new GPU."""
    aligned = all(size % 8 == 0 for size in weight.shape[1:])
    able = x.is_meta or (x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0))
    return bool(len(x)) and x.dtype == torch.bfloat16 and aligned and able


def _grouped(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """All stretches of rows in one kernel; where they end is never brought to the host."""
    return _grouped_kernel()(x_RI, weight_EOI.transpose(1, 2), offs=ends_E.int())


def _grouped_kernel() -> Callable[..., Tensor]:
    return getattr(F, "grouped_mm", None) or torch._grouped_mm  # the name before it was made public


def _one_by_one(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """An expert after the other. One without rows multiplies nothing, so that its weights get a gradient of zeros."""
    parts = zip(x_RI.split(_stretches(ends_E, len(x_RI))), weight_EOI.unbind())
    return torch.cat([F.linear(rows, weight) for rows, weight in parts])


@torch.library.custom_op("pretrain::multiply_rows", mutates_args=())
def _one_operator(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`_one_by_one` for the compiler, which does not look inside: the sizes of stretches change in every step, and it would compile anew for ever."""
    return _one_by_one(x_RI, weight_EOI, ends_E)


@torch.library.custom_op("pretrain::outer_products", mutates_args=())
def _outer_products(g_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    return outer_products(g_RO, x_RI, ends_E)


@_one_operator.register_fake
def _(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return x_RI.new_empty(len(x_RI), weight_EOI.shape[1])


@_outer_products.register_fake
def _(g_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    return g_RO.new_empty(len(ends_E), g_RO.shape[1], x_RI.shape[1])


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, g_RO: Tensor) -> tuple[Tensor, Tensor, None]:
    x_RI, weight_EOI, ends_E = ctx.saved_tensors
    return _one_operator(g_RO, weight_EOI.transpose(1, 2), ends_E), _outer_products(g_RO, x_RI, ends_E), None


_one_operator.register_autograd(_gradients, setup_context=_save)


def _stretches(ends_E: Tensor, rows: int) -> list[int]:
    if ends_E.is_meta:
        return even_loads(rows, len(ends_E))
    ends = ends_E.tolist()
    return [end - begin for begin, end in zip([0, *ends], ends)]


def even_loads(rows: int, count: int) -> list[int]:
    """Rows dealt out evenly: what loads are taken to be on the meta device, where shapes are all there is."""
    return [rows * (i + 1) // count - rows * i // count for i in range(count)]


def dispatch(experts: Experts, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Sum over a token's chosen experts of weight x output, [N, D]; always added up in the order of `chosen_NK`. N may be 0."""
    choices = chosen_NK.shape[1]
    experts_R, order_R = chosen_NK.flatten().sort(stable=True)
    place_R = inverse_of(order_R)
    y_RD = experts(_GatherChoices.apply(x_ND, order_R, place_R, choices), experts_R)
    y_NKD = permute(y_RD, place_R, order_R).unflatten(0, chosen_NK.shape)
    return (y_NKD * weights_NK.to(y_NKD.dtype)[..., None]).sum(1)


def inverse_of(order_R: Tensor) -> Tensor:
    """The permutation that undoes another one."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


def permute(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """x[order], whose gradient is g[inverse]: each is the inverse of the other."""
    return _Permute.apply(x_RD, order_R, inverse_R)


class _GatherChoices(torch.autograd.Function):
    """Rows of tokens, each as often as it has choices. Backward adds a token's rows in the order of its choices. The backward of plain
    indexing uses atomic additions instead: on CUDA their order, and with it the last bit, changes from run to run.
    """

    @staticmethod
    def forward(ctx, x_ND: Tensor, order_R: Tensor, place_R: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.choices = choices
        return x_ND[order_R // choices]

    @staticmethod
    def backward(ctx, g_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (place_R,) = ctx.saved_tensors
        return g_RD[place_R].unflatten(0, (len(place_R) // ctx.choices, ctx.choices)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """See `permute`."""

    @staticmethod
    def forward(ctx, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x_RD[order_R]

    @staticmethod
    def backward(ctx, g_RD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return g_RD[inverse_R], None, None
