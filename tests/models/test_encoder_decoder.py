"""The encoder-decoder is torch's Transformer, in value and gradient; what is padded or cached changes nothing."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from pretrain.config.model_schema import EncoderConfig, Model, Norm
from pretrain.config.schema import Loss
from pretrain.conventions import IGNORED
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.encoder_decoder import DecodingCache, EncoderDecoder, sinusoids
from pretrain.models.families import complete
from pretrain.parallel.blocks import recompute_blocks

SOURCES, TARGETS = 29, 31


def model_of(placement: str = "post", **changes) -> Model:
    encoder = EncoderConfig(**{"layers": 2, "vocab_size": SOURCES, **changes.pop("encoder", {})})
    values = {
        "family": "transformer", "dim": 32, "layers": 3, "encoder": encoder, "heads": 4, "ffn_dim": 48, "vocab_size": TARGETS,
        "norm": Norm(placement=placement), **changes,
    }  # fmt: skip
    return complete(Model(**values), 64)


def network_of(model: Model) -> EncoderDecoder:
    network = build_network(model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        spread, centre = (0.2, 1.0) if "norm" in name and name.endswith("weight") else (0.2, 0.0)
        parameter.data = centre + spread * torch.randn(parameter.shape, generator=generator)
    return network


def batch_of(model: Model) -> dict[str, torch.Tensor]:
    """Three pairs of different lengths, padded."""
    generator = torch.Generator().manual_seed(2)
    sources = model.encoder.vocab_size or model.vocab_size
    targets_BT = torch.randint(model.vocab_size, (3, 7), generator=generator)
    targets_BT[1, 4:], targets_BT[2, 6:] = IGNORED, IGNORED
    return {
        "source_BS": torch.randint(sources, (3, 9), generator=generator),
        "source_lengths_B": torch.tensor([9, 5, 1]),
        "tokens_BT": torch.randint(model.vocab_size, (3, 7), generator=generator),
        "targets_BT": targets_BT,
    }


def torchs(network: EncoderDecoder) -> torch.nn.Transformer:
    """torch.nn.Transformer with the weights of ours."""
    model, post = network.config, network.config.norm.placement == "post"
    shape = {"d_model": model.dim, "nhead": model.heads, "dim_feedforward": model.ffn_dim, "dropout": 0.0, "batch_first": True}
    options = {**shape, "norm_first": not post, "layer_norm_eps": model.norm_eps}
    norms = [None if post else torch.nn.LayerNorm(model.dim, model.norm_eps) for _ in range(2)]
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(**options), model.encoder.layers, norms[0], enable_nested_tensor=False
    )
    decoder = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(**options), model.layers, norms[1])
    theirs = torch.nn.Transformer(**shape, custom_encoder=encoder, custom_decoder=decoder)
    state = {}
    for side in ("encoder", "decoder"):
        for i, layer in enumerate(getattr(network, side).values()):
            sublayers = [
                ("self_attn", layer.attention, layer.attention_norm),
                ("multihead_attn", layer.cross, layer.cross_norm),
            ]
            sublayers = [s for s in sublayers if s[1] is not None]
            place = f"{side}.layers.{i}."
            for name, attention, _ in sublayers:
                projections = attention.query, attention.key, attention.value
                state[f"{place}{name}.in_proj_weight"] = torch.cat([p.weight for p in projections])
                state[f"{place}{name}.in_proj_bias"] = torch.cat([p.bias for p in projections])
                state |= {f"{place}{name}.out_proj.{k}": v for k, v in attention.output.named_parameters()}
            norms = [s[2] for s in sublayers] + [layer.mlp_norm]
            state |= {f"{place}norm{n}.{k}": v for n, norm in enumerate(norms, 1) for k, v in norm.named_parameters()}
            state |= {f"{place}linear1.{k}": v for k, v in layer.mlp.up.named_parameters()}
            state |= {f"{place}linear2.{k}": v for k, v in layer.mlp.down.named_parameters()}
    if not post:
        state |= {f"encoder.norm.{k}": v for k, v in network.encoder_norm.named_parameters()}
        state |= {f"decoder.norm.{k}": v for k, v in network.norm.named_parameters()}
    theirs.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=True)
    return theirs


def their_logits(theirs, network: EncoderDecoder, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    def embedded(table, ids):
        return table(ids) * network.config.dim**0.5 + sinusoids(0, ids.shape[1], network.config.dim, ids.device)

    source_BS, tokens_BT = batch["source_BS"], batch["tokens_BT"]
    padding = torch.arange(source_BS.shape[1]) >= batch["source_lengths_B"][:, None]
    causal = torch.nn.Transformer.generate_square_subsequent_mask(tokens_BT.shape[1])
    source = embedded(network.embedding if network.source_embedding is None else network.source_embedding, source_BS)
    hidden = theirs(
        source, embedded(network.embedding, tokens_BT), tgt_mask=causal, src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )  # fmt: skip
    head = network.embedding.weight if network.config.tie_embeddings else network.output.weight
    return F.linear(hidden, head)


CASES = {
    "post": model_of("post"),
    "pre": model_of("pre"),
    "post, one table for all": model_of("post", encoder={"vocab_size": None, "share_embedding": True}),
    "pre, own head": model_of("pre", tie_embeddings=False),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_torchs_transformer(name):
    network = network_of(CASES[name])
    batch = batch_of(CASES[name])
    theirs = torchs(network)
    targets = batch.pop("targets_BT")
    logits = network(**batch)
    reference = their_logits(theirs, network, batch)
    assert (logits - reference).abs().max() <= 1e-5
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
    shared = {id(p): p.grad.clone() for p in network.parameters()}
    network.zero_grad(set_to_none=True)
    F.cross_entropy(reference.flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
    # Tables and head are the same tensors on both sides; what is torch's own is compared block by block.
    for parameter in (p for p in network.parameters() if p.grad is not None):
        assert relative(shared[id(parameter)], parameter.grad) <= 1e-4
    compared = 0
    for side in ("encoder", "decoder"):
        for ours, other in zip(getattr(network, side).values(), getattr(theirs, side).layers):
            pairs = [
                (ours.attention.output.weight, other.self_attn.out_proj.weight), (ours.mlp.up.weight, other.linear1.weight),
                (ours.mlp.down.bias, other.linear2.bias), (ours.attention_norm.weight, other.norm1.weight),
            ]  # fmt: skip
            for module, fused in [(ours.attention, other.self_attn)] + (
                [(ours.cross, other.multihead_attn)] if ours.cross is not None else []
            ):
                grads = torch.cat([shared[id(p.weight)] for p in (module.query, module.key, module.value)])
                assert relative(grads, fused.in_proj_weight.grad) <= 1e-4
                compared += 1
            for mine, their in pairs:
                assert relative(shared[id(mine)], their.grad) <= 1e-4
                compared += 1
    assert compared == 2 * 5 + 3 * 6


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", CASES)
def test_padding_changes_no_loss_and_no_gradient(name):
    network, batch = network_of(CASES[name]), batch_of(CASES[name])
    together = network(**batch)
    together.sum().backward()
    gradients = {n: p.grad for n, p in network.named_parameters()}
    network.zero_grad(set_to_none=True)
    alone = []
    for i, (length, width) in enumerate(zip((9, 5, 1), (7, 4, 6))):
        one = {n: t[i : i + 1] for n, t in batch.items()}
        one |= {"source_BS": one["source_BS"][:, :length]} | {n: one[n][:, :width] for n in ("tokens_BT", "targets_BT")}
        alone.append(network(**one))
        alone[-1].sum().backward()
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=0)
    for n, p in network.named_parameters():
        # The gradient of keys' biases is zero but for rounding: softmax does not see them.
        assert float((gradients[n] - p.grad).norm()) <= 1e-5 * float(p.grad.norm()) + 1e-5, n


@pytest.mark.parametrize("name", CASES)
def test_decoding_token_by_token_with_a_cache_gives_the_same_logits(name):
    network, batch = network_of(CASES[name]), batch_of(CASES[name])
    del batch["targets_BT"]
    with torch.no_grad():
        whole = network(**batch)
        cache = DecodingCache(network.config.layers, 7)
        tokens = batch["tokens_BT"]
        first = network(**{**batch, "tokens_BT": tokens[:, :1]}, cache=cache)
        order = torch.tensor([2, 0, 1])  # the state can be reordered in between
        cache.select(order)
        rest = [network(tokens_BT=tokens[order, t : t + 1], cache=cache) for t in range(1, 7)]
    steps = torch.cat([first[order], *rest], dim=1)
    assert (steps - whole[order]).abs().max() <= 1e-5


def test_label_smoothing_is_in_the_loss_that_is_trained_and_not_in_validation():
    batch, network = batch_of(CASES["pre"]), build_network(CASES["pre"], Loss(label_smoothing=0.1))
    network.load_state_dict(network_of(CASES["pre"]).state_dict())
    trained = network(**batch)
    with torch.no_grad():
        plain = network(**batch)
    logits = network(**{n: t for n, t in batch.items() if n != "targets_BT"})
    for smoothing, losses in ((0.1, trained), (0.0, plain)):
        expected = [F.cross_entropy(x, t, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
                    for x, t in zip(logits, batch["targets_BT"])]  # fmt: skip
        torch.testing.assert_close(losses, torch.stack(expected))


def test_dropout_is_a_function_of_the_samples_key_and_nothing_else():
    model = dataclasses.replace(CASES["pre"], dropout=0.3, attention_dropout=0.3)
    network, batch = network_of(model), batch_of(model)
    keys = torch.tensor([11, 12, 13])
    dropped = network(**batch, keys_B=keys)
    torch.rand(5)
    assert torch.equal(network(**batch, keys_B=keys), dropped)
    assert not torch.isclose(network(**batch), dropped).any()
    assert not torch.isclose(network(**batch, keys_B=keys + 3), dropped).any()
    reverse = {n: t.flip(0) for n, t in batch.items()}
    torch.testing.assert_close(network(**reverse, keys_B=keys.flip(0)).flip(0), dropped, rtol=1e-5, atol=0)
    one = {n: t[1:2] for n, t in batch.items()} | {"source_BS": batch["source_BS"][1:2, :5]}
    torch.testing.assert_close(network(**one, keys_B=keys[1:2]), dropped[1:2], rtol=1e-5, atol=0)
    grads = []
    for recompute in (False, True):
        if recompute:
            recompute_blocks(network)
            assert torch.equal(network(**batch, keys_B=keys), dropped)
        network.zero_grad()
        network(**batch, keys_B=keys).sum().backward()
        grads.append([p.grad.clone() for p in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize(("changes", "message"), [
    ({"positions": "rope"}, "model.positions=rope is not built for an encoder-decoder"),
    ({"encoder": {"share_embedding": True}}, "model.encoder.share_embedding=true with model.encoder.vocab_size=29 and model.vocab_size=31"),
    ({"norm": Norm(placement="sandwich")}, "model.norm.placement=sandwich is not built"),
])  # fmt: skip
def test_what_is_not_built_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_of(**changes)


def test_no_family_of_transformers_takes_an_encoder():
    from pretrain.models.families import family_of

    with pytest.raises(ConfigError, match="model.family=transformer is no model of transformers'"):
        family_of("transformer").to_hf(CASES["pre"])
