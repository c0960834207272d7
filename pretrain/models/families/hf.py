"""Models that transformers builds itself: configuration and names are its own (models/hf_model.py)."""

import json
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.models.families.family import Family


class _Own(Family):
    def to_hf(self, model: Model) -> dict[str, Any]:
        return json.loads(model.hf_config)


HF = _Own(name="hf", model_type="", architecture="", fields=(), weights=None, rope=None)
