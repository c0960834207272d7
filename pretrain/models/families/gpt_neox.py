"""GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373): parallel residual, partial rotation, projections fused per head."""

from collections.abc import Callable
from typing import Any

from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import (
    ALL_PROJECTIONS,
    GPT_BLOCK,
    SIZES,
    activation,
    attention_bias,
    buffers,
    eps,
    refuse_uneven_heads,
    tied,
)
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import one_of, switches
from pretrain.models.families.declare.weights import FUSED_PER_HEAD, entry

_OURS, _THEIRS = "layers.{layer}", "gpt_neox.layers.{layer}"
_MODULES = {
    "norm": "gpt_neox.final_layer_norm",
    f"{_OURS}.attention_norm": f"{_THEIRS}.input_layernorm",
    f"{_OURS}.mlp_norm": f"{_THEIRS}.post_attention_layernorm",
    f"{_OURS}.attention.output": f"{_THEIRS}.attention.dense",
    f"{_OURS}.mlp.up": f"{_THEIRS}.mlp.dense_h_to_4h",
    f"{_OURS}.mlp.down": f"{_THEIRS}.mlp.dense_4h_to_h",
}


def _only(older: str, newer: str) -> Callable[[Any, dict[str, Any]], Any]:
    """`back` of an older name, which transformers reads here where it does not read the newer one; that may only say the same."""

    def back(value: Any, config: dict[str, Any]) -> Any:
        inner = config.get("rope_parameters")
        inside = inner.get(newer) if isinstance(inner, dict) else None
        # transformers puts rope_scaling in the place of rope_parameters, and then reads the older name.
        said = value if inside is None or config.get("rope_scaling") else inside
        if inside not in (None, said):
            raise ConfigError(
                f"config.json: {newer}={shown(inside)} of rope_parameters is not read for gpt_neox beside rope_scaling; write {older}"
            )
        for name in (older, newer):
            if name in config and config[name] != said:
                raise ConfigError(
                    f"config.json: {name}={shown(config[name])} is not read for gpt_neox, whose other field says {shown(said)}"
                )
        return value

    return back


GPT_NEOX = Family(
    name="gpt_neox",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fields=(
        *(size for size in SIZES if size.ours not in ("kv_heads", "head_dim")),
        activation("hidden_act", "gelu"),
        eps(1e-5, "layer_norm_eps"),
        tied(False),
        Field("parallel_residual", "use_parallel_residual", True),
        attention_bias(True),
        # The names of before transformers 5, which llama.cpp's converter reads; an absent fraction is a quarter.
        Field("rope.fraction", "rotary_pct", 0.25, back=_only("rotary_pct", "partial_rotary_factor")),
        Field("rope.theta", "rotary_emb_base", 10000, back=_only("rotary_emb_base", "rope_theta")),
    ),
    weights=(
        entry("embedding.weight", "gpt_neox.embed_in.weight"),
        entry("output.weight", "embed_out.weight"),
        *(entry(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in _MODULES.items() for kind in ("weight", "bias")),
        *(
            entry(
                [f"{_OURS}.attention.{n}.{kind}" for n in ALL_PROJECTIONS[:3]],
                f"{_THEIRS}.attention.query_key_value.{kind}",
                FUSED_PER_HEAD,
            )
            for kind in ("weight", "bias")
        ),
    ),
    fixed=GPT_BLOCK,
    defaults={
        "parallel_residual": True,
        "rope.fraction": 0.25,
        "mlp.activation": "gelu",
        "attention.bias": list(ALL_PROJECTIONS),
    },
    # Dropout is for training; the others say nothing about a causal model.
    inert=frozenset({"hidden_dropout", "classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"}),
    refuse=refuse_uneven_heads,
    dropped=buffers(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    partial=True,
    prefix="gpt_neox.",
    llama_cpp=switches("parallel_residual", "rope.fraction") | {"rope.theta": one_of(10000.0)},
)
