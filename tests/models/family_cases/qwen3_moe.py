"""Shapes of Qwen3-MoE that its tests go through."""

from pretrain.config.model_schema import Attention, Experts, Model, Rope

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
BIASED = Attention(bias=["query", "key", "value", "output"])

CASES = {
    "plain": Model(**SMALL, kv_heads=2, experts=Experts(count=6, active=2, ffn_dim=20)),
    "weights do not sum to one": Model(
        **SMALL, kv_heads=1, tie_embeddings=True, experts=Experts(count=4, active=3, ffn_dim=24, normalise=False)
    ),
    "dense layers": Model(
        **SMALL | {"layers": 4}, head_dim=16, experts=Experts(count=4, active=2, ffn_dim=16, dense_layers=[0, 2])
    ),
    "biases, yarn": Model(
        **SMALL,
        attention=BIASED,
        norm_eps=1e-5,
        rope=Rope(theta=1e6, scaling="yarn", factor=4.0, original_length=16),
        experts=Experts(count=8, active=8, ffn_dim=12),
    ),
}
