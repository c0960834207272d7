"""Shapes of Mixtral that its tests go through."""

from pretrain.config.model_schema import Attention, Experts, Model, Rope

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2, experts=Experts(count=4, active=2)),
    "two experts of three, tied": Model(**SMALL, tie_embeddings=True, experts=Experts(count=3, active=2)),
    "every expert": Model(**SMALL, kv_heads=1, rope=Rope(theta=1e6), experts=Experts(count=4, active=4)),
    "window": Model(**SMALL, attention=Attention(window=9), norm_eps=1e-4, experts=Experts(count=5, active=3)),
    "wide heads": Model(**SMALL, head_dim=12, kv_heads=2, experts=Experts(count=8, active=2)),
}
