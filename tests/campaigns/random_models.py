"""A random `model` section for a layout: every family of ours, and for `custom` nearly every switch that a model has."""

from __future__ import annotations

from random import Random
from typing import Any, get_args

from pretrain.config.model_schema import FamilyName

PAIRED = ("transformer", "t5")
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "granite_hybrid", "nemotron_h")
MAMBA = ("granite_hybrid", "nemotron_h")
CORRECTED = ("deepseek_v3", "glm4_moe", "ernie4_5_moe")
SPARSE = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "minimax_m2", "qwen3_next", "qwen3_5_moe", *CORRECTED)
ONE_WIDTH = ("mixtral", "gpt_oss", "olmoe", "granite_hybrid", "qwen3_5_moe", "minimax_m2")  # experts are as wide as model.ffn_dim
UNEVEN = ("custom", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe")  # weights of a token's experts need not sum to one
ROTATED_IN_PART = ("glm4", "glm4_moe", "gpt_neox", "minimax_m2", *HYBRID)  # an even number of components, and not none
DENSE_OR_SPARSE = ("granite_hybrid", "nemotron_h")
FAMILIES = [family for family in get_args(FamilyName) if family not in ("hf", "custom")]


def random_family(random: Random) -> str:
    """`custom` has most of the switches, so every fourth model is one."""
    return "custom" if random.random() < 0.25 else random.choice(FAMILIES)


def model_section(random: Random, family: str, sizes: dict[str, int], stages: int = 1, ring: bool = False) -> dict[str, Any]:
    """`sizes`: the axes of the layout that have several ranks; the pipeline has so many stages. Widths are such that the ranks can share them, mostly.
    A ring drops no weights of attention.
    """
    tensor = sizes.get("tensor", 1)
    heads = tensor * random.choice((1, 2, 3, 4)[: 4 // min(tensor, 4)])
    layers = max(random.choice((2, 3)) if family in HYBRID else random.choice((1, 2, 3)), stages + random.choice((0, 1)))
    head_dim = random.choice((8, 16) if family in ROTATED_IN_PART else (4, 8, 10))
    model: dict[str, Any] = {"family": family, "dim": heads * head_dim, "layers": layers, "heads": heads,
                             "ffn_dim": tensor * random.choice((5, 16, 33))}  # fmt: skip
    if random.random() < 0.4:
        model["tie_embeddings"] = random.random() < 0.5
    model["dropout"] = random.choice((0, 0, 0.1))
    model["attention_dropout"] = 0 if ring else random.choice((0, 0, 0, 0.2))
    if family in PAIRED:
        return model | {"encoder": {"layers": random.choice((1, 2)), "share_embedding": True}}
    if random.random() < 0.2:
        model["predict_ahead"] = random.choice((1, 2))
    if family not in ("deepseek_v3", "gpt2", "gpt_neox", "olmoe") and random.random() < 0.5:
        model["kv_heads"] = random.choice([n for n in range(1, heads + 1) if heads % n == 0])
    return model | family_sections(random, model, sizes)


def family_sections(random: Random, model: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """What a family has beside attention and an MLP."""
    family, found = model["family"], {}
    if family in SPARSE or family in ("custom", *DENSE_OR_SPARSE) and random.random() < 0.4:
        found["experts"] = experts_section(random, model, sizes.get("tensor", 1))
    if family in HYBRID:
        found["linear_attention"] = linear_section(random, "mamba2" if family in MAMBA else "gated_delta", family, sizes)
    if family == "granite_hybrid":  # values are a multiple of the model's width
        found["linear_attention"]["value_dim"] = max(1, 2 * model["dim"] // found["linear_attention"]["value_heads"])
    if family == "deepseek_v3":
        found["latent"] = latent_section(random)
    return found | (custom_switches(random, model, sizes) if family == "custom" else {})


def latent_section(random: Random) -> dict[str, Any]:
    return {"kv_rank": 6, "query_rank": random.choice((0, 5)), "rope_dim": 4, "plain_dim": 6, "value_dim": random.choice((5, 10))}


def linear_section(random: Random, kind: str, family: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Linear attention whose heads the ranks of the tensor and of the context axis can share."""
    ranks = sizes.get("tensor", 1) * sizes.get("context", 1)
    key_heads = ranks * random.choice((1, 2))
    section: dict[str, Any] = {"key_heads": key_heads, "value_heads": key_heads * random.choice((1, 2, 3)),
                               "key_dim": random.choice((3, 4, 8)), "value_dim": random.choice((4, 6, 8))}  # fmt: skip
    if kind == "mamba2" and random.random() < 0.4 or kind == "gated_delta" and ranks == 1 and random.random() < 0.2:
        section |= {"key_heads": 1, "value_heads": 2 * ranks}
    if family == "olmo_hybrid":
        section["value_heads"] = section["key_heads"]
    if random.random() < 0.3:
        section["kernel"] = random.choice((2, 3))
    return section


def experts_section(random: Random, model: dict[str, Any], tensor: int) -> dict[str, Any]:
    family = model["family"]
    count = random.choice((2, 3, 4, 6))
    least = 1 if family in UNEVEN else 2  # one expert whose weight is made 1 would never train the router
    section: dict[str, Any] = {"count": count, "active": random.randint(least, count), "ffn_dim": tensor * random.choice((4, 9))}
    if family in ONE_WIDTH:
        del section["ffn_dim"]
    if section["active"] == 1:
        section["normalise"] = False
    if family in ("custom", "nemotron_h", *CORRECTED):
        section |= {"correction": True, "correction_rate": 0.01} if random.random() < 0.5 else {}
    if not section.get("correction"):
        section |= {"balance_loss": 0.02, "balance_scope": random.choice(("sequence", "global_batch"))}
    if random.random() < 0.3:
        section["router_z_loss"] = 0.01
    if family in ("deepseek_v3", "glm4_moe", "nemotron_h"):
        section |= {"groups": 1, "active_groups": 1}
    if family == "custom":
        section |= custom_experts(random, section, model["layers"])
    return section


def custom_experts(random: Random, section: dict[str, Any], layers: int) -> dict[str, Any]:
    switches: dict[str, Any] = {
        "scoring": random.choice(("softmax", "sigmoid")),
        "scale": random.choice((1.0, 1.5)),
        "router_bias": random.random() < 0.2,
    }
    if random.random() < 0.4:
        switches |= {"shared": random.choice((1, 2)), "shared_gate": random.random() < 0.5}
    if section["count"] in (4, 6) and section["active"] <= section["count"] // 2 and random.random() < 0.4:
        switches |= {"groups": 2, "active_groups": 1}
    if layers > 1 and random.random() < 0.2:
        switches["dense_layers"] = [0]
    return switches


def custom_switches(random: Random, model: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    layers = model["layers"]
    placement = random.choice(("pre", "pre", "post", "reordered", "sandwich"))
    section: dict[str, Any] = {
        "norm": {
            "kind": random.choice(("rms", "rms_offset", "layer", "layer_plain")),
            "placement": placement,
            "qk": random.choice(("none", "head", "full")),
        },
        "attention": custom_attention(random),
        "positions": random.choice(("rope", "rope", "rope", "learned", "none")),
        "mlp": {
            "activation": random.choice(("silu", "gelu", "gelu_tanh", "relu", "relu2")),
            "gated": random.random() < 0.6,
            "bias": random.random() < 0.3,
        },
        "logit_soft_cap": random.choice((0, 0, 5.0)),
        "embedding_multiplier": random.choice((1.0, 4.0)),
        "residual_multiplier": random.choice((1.0, 0.5)),
        "logit_multiplier": random.choice((1.0, 1.0, 0.5)),
        "parallel_residual": placement != "post" and random.random() < 0.2,
    }
    if section["positions"] == "rope":
        section["rope"] = rope_section(random, layers)
    if "kv_heads" not in model and random.random() < 0.3:
        section |= {"latent": latent_section(random), "attention": {"window": section["attention"]["window"]}}
        section["norm"]["qk"] = "none"
    if layers > 1 and random.random() < 0.35:
        section["linear_attention"] = custom_linear(random, placement, sizes)
        section["attention"].pop("window_pattern", None)
    if layers > 1 and "predict_ahead" not in model and random.random() < 0.2:
        section["sublayers"] = random.choice((["mixer", "mlp"], ["both", "mixer"], ["both", "mlp"], ["mixer", "both"]))
    return section


def custom_linear(random: Random, placement: str, sizes: dict[str, int]) -> dict[str, Any]:
    kind = random.choice(("gated_delta", "mamba2"))
    section = {"kind": kind, "pattern": random.choice(([True, False], [False, True])), **linear_section(random, kind, "custom", sizes)}
    if kind == "gated_delta":
        section["negative_eigenvalues"] = random.random() < 0.5
    if placement != "post" and random.random() < 0.3:
        section["norm_placement"] = "pre"
    return section


def custom_attention(random: Random) -> dict[str, Any]:
    window = random.choice((0, 0, 3, 7))
    attention: dict[str, Any] = {
        "bias": random.sample(["query", "key", "value", "output"], random.randint(0, 4)),
        "soft_cap": random.choice((0, 0, 2.0)),
        "sinks": random.random() < 0.3,
        "window": window,
        "output_gate": random.random() < 0.2,
    }
    if window:
        attention["window_pattern"] = random.choice(([True], [True, False]))
    if random.random() < 0.2:
        attention["query_scalar"] = 20.0
    return attention


def rope_section(random: Random, layers: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "theta": random.choice((100.0, 10_000.0)),
        "layout": random.choice(("half", "interleaved")),
        "pattern": [True, False] if layers > 1 and random.random() < 0.3 else [True],
        "scaling": random.choice(("none", "none", "linear", "llama3", "yarn")),
    }
    if rope["scaling"] != "none":
        rope["factor"] = 4.0
    if rope["scaling"] in ("llama3", "yarn"):
        rope["original_length"] = 16
    return rope
