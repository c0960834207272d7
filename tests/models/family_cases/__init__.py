"""What the tests know of every family, in a file of its own:

CASES      small models by name, each of which turns on something that could go wrong alone.
PUBLISHED  by preset of configs/models/, the config.json of the hub that it is the shape of.
COUNTS     by preset, the parameters as published: the hub's totals for the safetensors files, a tied head counted once.
READ       fields that vLLM, SGLang or llama.cpp's converter look up by name and do without, or fail without; an export has them.

The files of the hub are written from memory and from copies of them, without the fields that say nothing of the network
(`_name_or_path`, ids of special tokens, ...) except for some of each kind.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

# What vLLM's and SGLang's model files of 2024 to 2026 and llama.cpp's convert_hf_to_gguf.py look up wherever names are Llama's.
LLAMA = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta", "rope_parameters", "hidden_act",
    "tie_word_embeddings", "initializer_range",
}  # fmt: skip
FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def collected(name: str) -> dict[str, Any]:
    """What the files of all families say under this name, together."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        own = getattr(importlib.import_module(f"family_cases.{family}"), name)
        assert not found.keys() & own.keys(), (
            f"{family}.{name} has what another family has: {sorted(found.keys() & own.keys())}"
        )
        found |= own
    return found


def hub(architecture: str, dim: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **rest: Any) -> dict[str, Any]:
    """A config.json by the names that nearly all of them have; of transformers 4.31 to 5.0."""
    return {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
        "hidden_size": dim,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": vocab,
        **rest,
    }
