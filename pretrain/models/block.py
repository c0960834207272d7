"""A transformer block: attention, or linear attention, and MLP or experts in the residual stream, with norms where the switches put them.
Some models have blocks with one of the two alone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pretrain.config.model_schema import Model
from pretrain.models.attention import Attention, LatentAttention
from pretrain.models.caches import LayerCache, RecurrentCache
from pretrain.models.dropout import BlockDropout, drop
from pretrain.models.experts import MixtureOfExperts, RouterReport
from pretrain.models.layer_specs import LayerSpec
from pretrain.models.layers import Mlp, make_norm
from pretrain.models.linear_attention import GatedDeltaNet, Mamba2
from pretrain.models.masks import Mask
from pretrain.models.positions import Tables


class Block(nn.Module):
    """One layer. The norms, by the placement that its `spec` names, of a sublayer f:

    pre        x + f(norm(x))                 attention_norm, mlp_norm
    reordered  x + output_norm(f(x))          attention_output_norm, mlp_output_norm
    sandwich   x + output_norm(f(norm(x)))    all four
    post       output_norm(x + f(x))          attention_output_norm, mlp_output_norm

    Dropout acts on what a sublayer adds to x, and on the weights of attention.
    """

    def __init__(self, config: Model, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        before, after = spec.placement in ("pre", "sandwich"), spec.placement != "pre"
        self.post = spec.placement == "post"
        self.parallel = config.parallel_residual
        self.multiplier = config.residual_multiplier
        mixes, has_mlp = spec.mixer != "none", spec.mlp != "none"
        self.attention_norm = make_norm(config) if before and mixes else None
        self.attention = self.linear_attention = None
        match spec.mixer:
            case "gated_delta":
                self.linear_attention = GatedDeltaNet(config)
            case "mamba2":
                self.linear_attention = Mamba2(config)
            case "latent":
                self.attention = LatentAttention(config)
            case "attention":
                self.attention = Attention(config)
        self.attention_output_norm = make_norm(config) if after and mixes else None
        self.mlp_norm = make_norm(config) if before and has_mlp else None
        self.mlp = MixtureOfExperts(config) if spec.experts else _mlp(config) if has_mlp else None
        self.mlp_output_norm = make_norm(config) if after and has_mlp else None

    def forward(
        self,
        x_BTD: Tensor,
        rope: Tables | None = None,
        mask: Mask | None = None,
        cache: LayerCache | RecurrentCache | None = None,
        counted_BT: Tensor | None = None,
        dropout: BlockDropout | None = None,
    ) -> tuple[Tensor, RouterReport | None]:
        """The residual stream; the report of a router over the positions that are `counted_BT`, where there are both.

        `mask`: for linear attention, where documents begin.
        """
        reports: list[RouterReport | None] = []

        def attention(y_BTD: Tensor) -> Tensor:
            if self.linear_attention is not None:
                return self.linear_attention(y_BTD, mask, cache)
            return self.attention(y_BTD, rope, mask, cache, dropout and dropout["attention.weights"])

        def mlp(y_BTD: Tensor) -> Tensor:
            if not isinstance(self.mlp, MixtureOfExperts):
                return self.mlp(y_BTD)
            y_BTD, report = self.mlp(y_BTD, counted_BT)
            reports.append(report)
            return y_BTD

        if self.spec.mixer != "none":
            added = self._sublayer(x_BTD, attention, self.attention_norm, self.attention_output_norm)
            added = drop(added, dropout and dropout["attention"])
            if not self.parallel:
                x_BTD = self._joined(x_BTD, added, self.attention_output_norm)
        if self.mlp is not None:
            from_mlp = self._sublayer(x_BTD, mlp, self.mlp_norm, self.mlp_output_norm)
            from_mlp = drop(from_mlp, dropout and dropout["mlp"])
            x_BTD = x_BTD + added + from_mlp if self.parallel else self._joined(x_BTD, from_mlp, self.mlp_output_norm)
        return x_BTD, (reports[0] if reports else None)

    def _sublayer(
        self, x_BTD: Tensor, run: Callable[[Tensor], Tensor], before: nn.Module | None, after: nn.Module | None
    ) -> Tensor:
        y_BTD = run(x_BTD if before is None else before(x_BTD))
        if after is not None and not self.post:
            y_BTD = after(y_BTD)
        return y_BTD if self.multiplier == 1 else y_BTD * self.multiplier

    def _joined(self, x_BTD: Tensor, added_BTD: Tensor, norm: nn.Module | None) -> Tensor:
        return norm(x_BTD + added_BTD) if self.post else x_BTD + added_BTD


def _mlp(config: Model) -> Mlp:
    return Mlp(config.dim, config.ffn_dim, config.mlp.activation, config.mlp.gated, config.mlp.bias)
