"""Shapes of DeepSeek-V3 that its tests go through."""

from pretrain.config.model_schema import Experts, Latent, Model, Rope

SMALL = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
LATENT = Latent(kv_rank=12, query_rank=20, rope_dim=4, plain_dim=10, value_dim=6)
YARN = Rope(scaling="yarn", factor=4.0, original_length=16, mscale=1.0, mscale_all_dim=0.7)

CASES = {
    "plain": Model(
        **SMALL,
        latent=LATENT,
        experts=Experts(count=8, active=3, ffn_dim=20, dense_layers=[0], groups=4, active_groups=2, scale=2.5),
    ),
    "whole queries, values wider than keys": Model(
        **SMALL,
        latent=Latent(kv_rank=16, rope_dim=8, plain_dim=4, value_dim=24),
        experts=Experts(count=4, active=2, ffn_dim=16, shared=2, scale=1.5),
    ),
    "yarn that scales the scores, not normalised": Model(
        **SMALL | {"dim": 28, "heads": 3},  # a width that its heads do not divide into whole heads of their own
        latent=LATENT,
        rope=YARN,
        norm_eps=1e-5,
        experts=Experts(count=6, active=2, ffn_dim=20, dense_layers=[0, 1], groups=2, active_groups=1, normalise=False),
    ),
    "rotated by halves, tied": Model(
        **SMALL,
        tie_embeddings=True,
        latent=LATENT,
        rope=Rope(layout="half", theta=5e4),
        experts=Experts(count=5, active=5, ffn_dim=20),
    ),
    "yarn without mscale, dense only but for the last": Model(
        **SMALL,
        latent=LATENT,
        rope=Rope(scaling="yarn", factor=8.0, original_length=8),
        experts=Experts(count=4, active=1, ffn_dim=20, dense_layers=[0, 1], normalise=False),
    ),
}
