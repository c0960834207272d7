"""What the families with a mixture of experts have in common."""

from __future__ import annotations

import re
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import LAYER, THEIRS
from pretrain.models.families.declare.family import Field
from pretrain.models.families.declare.weights import STACKED, Entry, entry

# Of config.json: about losses and logging in transformers' own training. Ours are keys of the run; `Family.balance` reads the second.
TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size"})


def needs_experts(model: Model) -> str | None:
    """Why a model without experts is none of these families, if it is."""
    return None if model.experts.count else "model.experts.count=0 has no experts"


def stacked(block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Entry, ...]:
    """Router and experts, one tensor per expert on disk."""
    names = {"gate": gate, "up": up, "down": down}
    return (
        entry(f"{LAYER}.mlp.router.weight", f"{THEIRS}.{block}.gate.weight"),
        *(
            entry(f"{LAYER}.mlp.experts.{ours}", f"{THEIRS}.{block}.experts.{{expert}}.{theirs}.weight", STACKED)
            for ours, theirs in names.items()
        ),
    )


SHARED = tuple(
    entry(f"{LAYER}.mlp.shared.{name}.weight", f"{THEIRS}.mlp.shared_experts.{name}_proj.weight")
    for name in ("gate", "up", "down")
)


# What DeepSeek-V3 and GLM-4.5 share: names, dense layers first, a shared expert, a correction of scores by sigmoid.
CORRECTED: dict[str, Any] = {"experts.scoring": "sigmoid", "experts.correction": True}
CORRECTION = entry(f"{LAYER}.mlp.router.correction", f"{THEIRS}.mlp.gate.e_score_correction_bias")


# What `corrected` says of them.
ROUTING = ("count", "active", "ffn_dim", "shared", "dense_layers", "normalise", "scale", "groups", "active_groups")


def corrected(count: int, ffn_dim: int, dense: int, scale: float, groups: int, active_groups: int) -> tuple[Field, ...]:
    """The fields of such experts; the arguments are what absent ones mean."""
    return (
        Field("experts.count", "n_routed_experts", count),
        Field("experts.active", "num_experts_per_tok", 8),
        Field("experts.ffn_dim", "moe_intermediate_size", ffn_dim),
        Field("experts.shared", "n_shared_experts", 1),
        Field("experts.dense_layers", "first_k_dense_replace", dense, lambda layers, model: len(layers), _first_layers),
        Field("experts.normalise", "norm_topk_prob", True, back=lambda flag, config: False if flag is None else flag),
        Field("experts.scale", "routed_scaling_factor", scale),
        Field("experts.groups", "n_group", groups),
        Field("experts.active_groups", "topk_group", active_groups),
    )


def _first_layers(count: Any, config: dict[str, Any]) -> Any:
    layers = config["num_hidden_layers"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0 or not isinstance(layers, int):
        raise ConfigError(
            f"config.json: first_k_dense_replace={shown(count)} is not supported: expected a whole number of layers"
        )
    return list(range(min(count, layers)))


def refuse_uncorrected(model: Model) -> str | None:
    """Why transformers has no such model of these families."""
    dense, shared = model.experts.dense_layers, model.experts.shared
    if dense != list(range(len(dense))):
        return f"model.experts.dense_layers={dense} are not the first ones"
    return needs_experts(model) or (None if shared else "model.experts.shared=0 has no shared expert")


def beyond_the_last_layer(name: str, model: Model) -> bool:
    """`dropped` where layers that predict tokens further ahead follow the others, which transformers leaves out as well."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= model.layers
