"""Gradients under document masks are those of the single process in every layout."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from running import largest_gradient_difference

SEQUENCES, LENGTH = 4, 48


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets and documents of the whole batch; the number of targets differs from rank to rank."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(61, (SEQUENCES, LENGTH + 1), generator=generator)
    documents = (torch.rand(SEQUENCES, LENGTH, generator=generator) < 0.1).cumsum(dim=1)
    documents[0, 40:] = -1
    return ids[:, :-1], torch.where(documents == -1, -100, ids[:, 1:]), documents


def dense_flex(q, k, v, block_mask, scale, enable_gqa):
    """What FlexAttention would compute, with a backward pass on CPU, from nothing but the block mask that it is given."""
    from torch.nn import functional as F
    from torch.nn.attention.flex_attention import create_mask

    length = q.shape[2]
    rule = create_mask(block_mask.mask_mod, q.shape[0], None, length, length, device="cpu")
    assert block_mask.shape == (q.shape[0], 1, length, length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=rule, scale=scale, enable_gqa=enable_gqa)


def masked_gradients(config_file: str, backend: str, masked: bool, *overrides: str) -> dict[str, torch.Tensor]:
    """Whole gradients of the batch's summed loss, of which this rank computes its share."""
    from torch.distributed.tensor import DTensor

    from pretrain.config.load import load_config
    from pretrain.distributed import ranks as distributed
    from pretrain.distributed.mesh import Mesh
    from pretrain.models import attention, decoder, network_without_values
    from pretrain.models.decoder import Decoder, count_parameters
    from pretrain.parallel.layout import plan_layout
    from pretrain.parallel.strategy import Strategy
    from pretrain.train.resolve import resolve

    torch._dynamo.reset()
    config = resolve(
        load_config(
            config_file, ["run.device=cpu", "batch.sequences=4", "batch.micro_sequences=2", "model.vocab_size=61", *overrides]
        )[0]
    )
    _, _, world_size = distributed.launched_ranks()
    layout = plan_layout(config, world_size, count_parameters(network_without_values(config)), None)
    ranks = distributed.start(config, alone=layout.strategy == "single")
    mesh = Mesh(layout.axes, ranks)
    strategy = Strategy(layout.strategy, config, mesh)
    with torch.device("meta"):
        model = Decoder(config.model)
    strategy.place(model)
    share = SEQUENCES // mesh.data_size
    tokens, targets, documents = (x[mesh.data_rank * share :][:share] for x in batch())
    with (
        patch.object(decoder, "attention_backend", lambda *_, **__: backend),
        patch.object(attention, "flex_attention", dense_flex),
        strategy.data_axes.micro_step(last=True),
    ):
        losses = strategy._call(tokens, targets, documents if masked else None)
        losses.sum().backward()
    strategy.data_axes.finish_step()
    found = {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()}
    ranks.barrier("compared")
    return {name: gradient.clone() for name, gradient in found.items()}


LAYOUTS = {
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "fsdp, recomputed blocks": ("parallel.strategy=fsdp", "parallel.activation_checkpointing=full"),
}


@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_have_the_masked_gradients_of_one(pool, config_file, layout, tied):
    tie = f"model.tie_embeddings={tied}"
    [single] = pool.launch(1, masked_gradients, str(config_file), "sdpa", True, tie)
    for rank in pool.launch(2, masked_gradients, str(config_file), "sdpa", True, tie, *LAYOUTS[layout]):
        assert largest_gradient_difference(rank, single) <= 5e-6


@pytest.mark.parametrize("options", [(), ("parallel.activation_checkpointing=full",)])
def test_block_masks_pass_through_sharded_blocks_unharmed(pool, config_file, options):
    """FSDP2 takes the inputs of a block apart and puts them together again; FlexAttention itself has no backward pass here."""
    [single] = pool.launch(1, masked_gradients, str(config_file), "sdpa", True)
    [flex] = pool.launch(1, masked_gradients, str(config_file), "flex", True, *options)
    assert largest_gradient_difference(flex, single) <= 5e-6
    for rank in pool.launch(2, masked_gradients, str(config_file), "flex", True, "parallel.strategy=fsdp", *options):
        assert largest_gradient_difference(rank, single) <= 5e-6


def test_bf16_gives_masked_gradients_that_are_equal_under_ddp_and_fsdp(pool, config_file):
    bf16 = ("precision.compute=bf16",)
    ddp = pool.launch(2, masked_gradients, str(config_file), "sdpa", True, "parallel.strategy=ddp", *bf16)[0]
    fsdp = pool.launch(2, masked_gradients, str(config_file), "sdpa", True, "parallel.strategy=fsdp", *bf16)[0]
    assert largest_gradient_difference(fsdp, ddp) <= 5e-6


def test_the_mask_moves_the_gradients_in_this_batch(pool, config_file):
    [masked] = pool.launch(1, masked_gradients, str(config_file), "sdpa", True)
    [causal] = pool.launch(1, masked_gradients, str(config_file), "sdpa", False)
    assert largest_gradient_difference(masked, causal) > 1e-2
