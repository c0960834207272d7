"""What the families with a mixture of experts have in common."""

from __future__ import annotations

from pretrain.config.model_schema import Model
from pretrain.models.families.common import LAYER, THEIRS
from pretrain.models.families.weights import STACKED, Entry, entry

# Of config.json: about losses and logging in transformers' own training. Ours are keys of the run.
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
