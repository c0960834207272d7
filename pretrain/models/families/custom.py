"""Any combination of the switches. Hugging Face transformers has no name for it, so there is no export."""

from pretrain.models.families.declare.family import Family

CUSTOM = Family(name="custom", rope=None)
