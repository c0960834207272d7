"""Any combination of the switches. Hugging Face transformers has no name for it, so there is no export."""

from pretrain.config.model_schema import Model
from pretrain.models.families.declare.family import Family


def _refuse(model: Model) -> str:
    return "model.family=custom is no model of transformers'"


CUSTOM = Family(name="custom", model_type="", architecture="", fields=(), weights=(), rope=None, refuse=_refuse)
