"""T5 and its version 1.1 against transformers' T5ForConditionalGeneration, and what an encoder brings to the facts of every family."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch
from parity import tokens, translate
from running import on_meta
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.attention_schema import AttentionConfig, Relative, Rope
from pretrain.config.model_schema import EncoderConfig, MlpConfig, Model, Norm
from pretrain.conventions import IGNORED
from pretrain.errors import CheckpointError, ConfigError
from pretrain.huggingface.export_model import export
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.open_model import read_checkpoint
from pretrain.models import build_network
from pretrain.models.encoder_decoder import DecodingCache
from pretrain.models.families import complete, family_of, family_of_hf
from pretrain.models.families.declare.weights import resolve
from pretrain.models.generate import Search
from pretrain.models.generate import translate as decode
from pretrain.models.positions import buckets_of
from pretrain.models.shape import flat, with_values

SMALL = Model(family="t5", dim=32, layers=2, heads=4, vocab_size=61)
V11 = {"tie_embeddings": False, "mlp": MlpConfig(activation="gelu_tanh", gated=True)}
CASES = {
    "version 1.0": SMALL,
    "version 1.1": dataclasses.replace(SMALL, **V11),
    "a gated MLP, tied": dataclasses.replace(SMALL, mlp=MlpConfig(activation="gelu_tanh", gated=True)),
    "tied, not scaled": dataclasses.replace(SMALL, logit_multiplier=1.0),
    "gated by silu": dataclasses.replace(SMALL, mlp=MlpConfig(activation="silu", gated=True), tie_embeddings=False),
    "exact gelu": dataclasses.replace(SMALL, mlp=MlpConfig(activation="gelu")),
    "more encoder": dataclasses.replace(SMALL, encoder=EncoderConfig(layers=3), layers=1),
    "more decoder": dataclasses.replace(SMALL, encoder=EncoderConfig(layers=1), layers=3, **V11),
    "wide heads": dataclasses.replace(SMALL, head_dim=24, ffn_dim=40),
    "few buckets": dataclasses.replace(SMALL, relative=Relative(buckets=8, max_distance=20), heads=1),
    "odd buckets": dataclasses.replace(SMALL, relative=Relative(buckets=14, max_distance=9)),
    "large eps": dataclasses.replace(SMALL, norm_eps=0.1, **V11),
}
COMPLETE = {name: complete(model, 64) for name, model in CASES.items()}
every_case = pytest.mark.parametrize("name", CASES)


def untied(theirs):
    """transformers builds a tied head whatever config.json says; a file with a head of its own unties it."""
    theirs.lm_head.weight = torch.nn.Parameter(theirs.shared.weight.detach().clone())


def written(theirs, model: Model) -> dict[str, torch.Tensor]:
    """The tensors that transformers would write: a shared one once."""
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"} | (
        {"lm_head.weight"} if model.tie_embeddings else set()
    )
    return {name: tensor for name, tensor in theirs.state_dict().items() if name not in copies}


@functools.cache
def both(name: str):
    """Our network and transformers' model with the same weights, drawn wide enough that every part matters."""
    import transformers

    model, family = COMPLETE[name], family_of("t5")
    fields = {k: v for k, v in family.to_hf(model).items() if k != "architectures"}
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**fields | {"pad_token_id": 0, "decoder_start_token_id": 0})
    ).eval()
    if not model.tie_embeddings:
        untied(theirs)
    generator = torch.Generator().manual_seed(3)
    for parameter in theirs.parameters():
        spread, centre = (0.2, 1.0) if parameter.dim() == 1 else (0.15, 0.0)
        parameter.data = centre + spread * torch.randn(parameter.shape, generator=generator)
    for stack in (theirs.encoder, theirs.decoder):
        stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.mul_(8)
    theirs.shared.weight.data.mul_(4)
    ours = build_network(model)
    ours.load_state_dict(translate("t5", model, written(theirs, model)), strict=True)
    return ours, theirs


def padded(model: Model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sources [3, 40] of 40, 7 and 1 real tokens, their lengths, and which positions are real."""
    lengths = torch.tensor([40, 7, 1])
    return tokens(model, 3, 40), lengths, (torch.arange(40) < lengths[:, None]).long()


@every_case
def test_logits_are_those_of_transformers_with_padding_and_without(name):
    ours, theirs = both(name)
    source, lengths, real = padded(ours.config)
    for length in (1, 2, 33):
        target = tokens(ours.config, 3, length)
        with torch.no_grad():
            expected = theirs(source, attention_mask=real, decoder_input_ids=target).logits
            got = ours(target, source, lengths)
            assert expected.std() > 0.1
            assert (got - expected).abs().max() <= 1e-5
            assert (ours(target, source) - theirs(source, decoder_input_ids=target).logits).abs().max() <= 1e-5


@every_case
def test_loss_and_every_gradient_are_those_of_transformers(name):
    ours, theirs = both(name)
    source, lengths, real = padded(ours.config)
    target, labels = tokens(ours.config, 3, 33), tokens(ours.config, 3, 33).flip(1)
    labels[1, 5:] = IGNORED
    ours.zero_grad()
    theirs.zero_grad()
    expected = theirs(source, attention_mask=real, decoder_input_ids=target, labels=labels).loss * (labels != IGNORED).sum()
    loss = ours(target, source, lengths, labels).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    wanted = translate("t5", ours.config, gradients)
    for parameter_name, parameter in ours.named_parameters():
        reference = wanted[parameter_name]
        assert reference.norm() > 0, parameter_name
        assert (parameter.grad - reference).norm() <= 1e-4 * reference.norm(), parameter_name


@every_case
def test_the_weight_map_names_every_tensor_on_both_sides_once_and_back_gives_the_same_bits(name):
    ours, theirs = both(name)
    weights, back = dict(ours.named_parameters()), {}
    for line in resolve(family_of("t5").weights, ours.config, list(weights)):
        tensors = line.layout.to_theirs([weights[n].detach() for n in line.ours], ours.config)
        assert not set(line.theirs) & set(back)
        back |= dict(zip(line.theirs, tensors, strict=True))
    expected = written(theirs, ours.config)
    assert set(back) == set(expected)
    assert all(torch.equal(back[n], expected[n]) for n in back)


@every_case
def test_a_model_comes_back_from_config_json_and_from_what_transformers_writes(name):
    model, family, (_, theirs) = COMPLETE[name], family_of("t5"), both(name)
    assert family.from_hf(family.to_hf(model)) == model
    for fields in (theirs.config.to_diff_dict(), theirs.config.to_dict()):
        fields = {**fields, "architectures": [family.architecture]}
        assert family_of_hf(fields) is family
        read = family.from_hf(fields)
        assert read.tie_embeddings  # transformers 5 always says so, and the file decides
        if family.own_head(read, ["lm_head.weight"] if not model.tie_embeddings else []):
            read = dataclasses.replace(read, tie_embeddings=False)
        assert read == with_values(model, {"encoder.decoder_start_id": 0})


@every_case
def test_a_cache_changes_no_logit(name):
    ours, _ = both(name)
    source, lengths, _ = padded(ours.config)
    target, cache = tokens(ours.config, 3, 30), DecodingCache(ours.config.layers, 30)
    with torch.no_grad():
        pieces = [ours(target[:, i : i + 1], source, lengths, cache=cache) for i in range(30)]
        whole = ours(target, source, lengths)
    assert (torch.cat(pieces, dim=1) - whole).abs().max() <= 1e-5


@every_case
def test_flops_are_those_that_torch_counts(name):
    model = COMPLETE[name]
    with torch.device("meta"):
        network = build_network(model)
        source, target = torch.zeros(3, 24, dtype=torch.long), torch.zeros(3, 32, dtype=torch.long)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            network(target, source).float().sum().backward()
    assert on_meta(model).flops_per_token(24, 32) * 3 * 32 == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("name", ["version 1.0", "version 1.1", "few buckets"])
def test_greedy_decoding_finds_what_transformers_generate_finds(name):
    ours, theirs = both(name)
    source = tokens(ours.config, 5, 12)
    lengths = torch.full((5,), 12)
    found = decode(ours, source, lengths, ours.config.layers, 0, 1, Search(max_ratio=0.0, max_extra=15))
    special = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "forced_eos_token_id": 1}
    expected = [row[1:].tolist() for row in theirs.generate(source, do_sample=False, num_beams=1, max_new_tokens=16, **special)]
    assert found == [row[: row.index(1)] for row in expected]
    assert len({tuple(row) for row in found}) > 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("buckets, longest", [(32, 128), (8, 20), (14, 9), (64, 1000), (5, 3)])
def test_buckets_of_distances_are_those_of_transformers(causal, buckets, longest):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-3000, 3001)
    expected = T5Attention._relative_position_bucket(distances, not causal, buckets, longest)
    assert torch.equal(buckets_of(distances, buckets, longest, causal), expected)
    assert 0 <= expected.min() and expected.max() < buckets


def test_initial_weights_have_the_spread_of_transformers():
    from transformers import T5Config, T5ForConditionalGeneration

    from pretrain.parallel.initialise import initialise

    model = complete(
        dataclasses.replace(
            SMALL,
            dim=256,
            heads=8,
            head_dim=32,
            ffn_dim=640,
            vocab_size=3000,
            relative=Relative(buckets=512, max_distance=1000),
        ),
        64,
    )
    fields = {k: v for k, v in family_of("t5").to_hf(model).items() if k != "architectures"}
    theirs = T5ForConditionalGeneration(T5Config(**fields))
    ours = build_network(model)
    initialise(ours, 5)
    expected = translate("t5", model, written(theirs, model))
    for name, parameter in ours.named_parameters():
        assert parameter.mean().item() == pytest.approx(
            expected[name].mean().item(), abs=0.1 * expected[name].std().item() + 1e-6
        )
        assert parameter.std().item() == pytest.approx(expected[name].std().item(), rel=0.05), name


@pytest.mark.parametrize(
    "model, problem",
    [
        (
            dataclasses.replace(SMALL, attention=AttentionConfig(bias=["query"])),
            "model.attention.bias=['query'] is not what model.family=t5 computes",
        ),
        (dataclasses.replace(SMALL, norm=Norm(kind="layer")), "model.norm.kind=layer is not what model.family=t5 computes"),
        (
            dataclasses.replace(SMALL, mlp=MlpConfig(activation="gelu", gated=True)),
            "has no exact one that is gated; use gelu_tanh",
        ),
        (dataclasses.replace(SMALL, positions="sinusoidal"), "model.positions=sinusoidal is not what model.family=t5 computes"),
        (
            dataclasses.replace(SMALL, encoder=EncoderConfig(share_embedding=False)),
            "model.encoder.share_embedding=False is not what model.family=t5 computes",
        ),
        (
            dataclasses.replace(SMALL, logit_multiplier=2.0),
            f"model.logit_multiplier=2.0: transformers has 1.0 or {32**-0.5}, which is model.dim ** -0.5, with such a head",
        ),
        (dataclasses.replace(SMALL, tie_embeddings=False, logit_multiplier=32**-0.5), ": transformers has only 1.0 with such a head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_t5_cannot_express_is_refused_by_name(model, problem):
    with pytest.raises(ConfigError) as error:
        family_of("t5").to_hf(complete(model, 64))
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "model, problem",
    [
        (
            Model(vocab_size=61, positions="relative"),
            "model.positions=relative is of an encoder-decoder; set model.encoder.layers",
        ),
        (Model(vocab_size=61, init="fan_in"), "model.init=fan_in is of an encoder-decoder"),
        (
            dataclasses.replace(SMALL, relative=Relative(max_distance=16)),
            "model.relative.max_distance=16 is within the 16 distances",
        ),
        (
            dataclasses.replace(SMALL, encoder=EncoderConfig(decoder_start_id=61)),
            "model.encoder.decoder_start_id=61 is no token of model.vocab_size=61",
        ),
        (
            dataclasses.replace(SMALL, positions="rope"),
            "model.positions=rope is not built for an encoder-decoder; legal: sinusoidal, relative",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_switches_that_cannot_go_together_are_refused(model, problem):
    with pytest.raises(ConfigError) as error:
        complete(model, 64)
    assert problem in str(error.value)


def config_json(**changes) -> dict:
    """t5-small's, as the hub has it in what matters, in small."""
    return {
        "architectures": ["T5ForConditionalGeneration"], "d_ff": 64, "d_kv": 8, "d_model": 32, "decoder_start_token_id": 0,
        "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06,
        "model_type": "t5", "n_positions": 512, "num_heads": 4, "num_layers": 2, "output_past": True, "pad_token_id": 0,
        "relative_attention_num_buckets": 32, "task_specific_params": {"summarization": {"num_beams": 4}}, "vocab_size": 61,
    } | changes  # fmt: skip


def test_the_config_json_of_the_hub_is_read():
    old = family_of_hf(config_json()).from_hf(config_json())
    assert (
        old.encoder.layers,
        old.layers,
        old.encoder.decoder_start_id,
        old.tie_embeddings,
        old.mlp.gated,
        old.mlp.activation,
    ) == (
        2,
        2,
        0,
        True,
        False,
        "relu",
    )
    new = family_of("t5").from_hf(config_json(
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=3, dense_act_fn="gelu_new", is_gated_act=True,
    ))  # fmt: skip
    assert (new.layers, new.tie_embeddings, new.logit_multiplier, new.mlp.gated, new.mlp.activation) == (
        3,
        False,
        1.0,
        True,
        "gelu_tanh",
    )


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"feed_forward_proj": "gated-gelu", "is_gated_act": False}, "contradict each other"),
        ({"feed_forward_proj": "relu", "dense_act_fn": "gelu_new"}, "contradict each other"),
        ({"feed_forward_proj": "tanh"}, "feed_forward_proj='tanh' is not supported"),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, "are not supported together"),
        ({"scale_decoder_outputs": "no"}, "scale_decoder_outputs='no' is not supported: expected true or false"),
        ({"d_kv": -1}, "config.json: d_kv=-1"),
        ({"num_layers": "6"}, "num_layers is missing or no whole number"),
        ({"num_layers": None}, "num_layers is missing or no whole number"),
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"tie_encoder_decoder": True}, "tie_encoder_decoder=True is not supported"),
        ({"relative_attention_max_distance": 3}, "max_distance=3 is within"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_json_that_is_not_computed_is_refused_by_name(changes, problem):
    fields = config_json(**changes)
    with pytest.raises(ConfigError) as error:
        family_of("t5").from_hf(fields)
    assert problem in str(error.value)


def test_relative_positions_serve_the_original_transformer_as_well():
    base = Model(
        family="transformer",
        dim=32,
        layers=2,
        heads=4,
        vocab_size=61,
        positions="relative",
        rope=Rope(),
        encoder=EncoderConfig(vocab_size=50),
    )
    model = complete(base, 64)
    network = build_network(model)
    assert flat(model)["relative.buckets"] == 32
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    source, target = tokens(with_values(model, {"vocab_size": 50}), 2, 9), tokens(model, 2, 9)
    with torch.no_grad():
        assert not torch.allclose(network(target, source), network(target, source.flip(1)))


# ---- conversion -------------------------------------------------------------------------------------------------------


def tensors_of(directory) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@every_case
def test_hugging_face_to_ours_and_back_is_bit_equal(name, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    ours, theirs = both(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    imported = import_model(tmp_path / "theirs", tmp_path / "ours", verify=True)
    assert imported.compared.difference <= 1e-5
    model, _, _ = read_checkpoint(tmp_path / "ours")
    assert model == with_values(ours.config, {"encoder.decoder_start_id": 0})
    done = export(tmp_path / "ours", tmp_path / "back", verify=True, shard_bytes=30_000)
    assert done.compared.difference <= 1e-5
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[n], tensor) for n, tensor in before.items())
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back").eval()
    source, target = tokens(model, 2, 17), tokens(model, 2, 9)
    with torch.no_grad():
        assert torch.equal(loaded(source, decoder_input_ids=target).logits, theirs(source, decoder_input_ids=target).logits)
    assert (loaded.config.decoder_start_token_id, loaded.config.pad_token_id) == (0, 0)


@pytest.mark.parametrize("head", [False, True])
def test_what_transformers_5_makes_of_a_head_that_is_not_tied_is_read(head, tmp_path):
    """It ties the head all the same, does not scale its logits, and writes no head: "lm_head.weight is missing" was said of it. Only a model
    that was read from a file with a head has one of its own, and the same config.json.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    fields = {name: value for name, value in config_json().items() if name not in ("architectures", "model_type")}
    theirs = T5ForConditionalGeneration(T5Config(**fields, tie_word_embeddings=False))
    if head:
        untied(theirs)
        theirs.lm_head.weight.data.normal_()
    theirs.save_pretrained(tmp_path / "theirs")
    said = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (said["tie_word_embeddings"], said["scale_decoder_outputs"]) == (True, False)
    assert ("lm_head.weight" in tensors_of(tmp_path / "theirs")) is head
    imported = import_model(tmp_path / "theirs", tmp_path / "ours", verify=True)
    assert imported.compared.difference <= 1e-10
    model, _, _ = read_checkpoint(tmp_path / "ours")
    assert (model.tie_embeddings, model.logit_multiplier) == (not head, 1.0)
    done = export(tmp_path / "ours", tmp_path / "back", verify=True)
    assert done.compared.difference <= 1e-10 and tensors_of(tmp_path / "back").keys() == tensors_of(tmp_path / "theirs").keys()
    assert any("transformers 4 scales the logits of every tied head" in note for note in done.notes) is not head


def test_files_that_hold_the_embedding_again_are_read_where_the_copies_are_equal(tmp_path):
    _, theirs = both("version 1.0")
    theirs.save_pretrained(tmp_path / "old")
    weights = load_file(tmp_path / "old" / "model.safetensors")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = {f"{stack}.embed_tokens.weight": weights["shared.weight"].clone() for stack in ("encoder", "decoder")}
    save_file(weights | copies | {unread: torch.zeros(32, 4)}, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    assert import_model(tmp_path / "old", tmp_path / "ours", verify=True).compared.difference <= 1e-5
    copies["encoder.embed_tokens.weight"][3, 3] += 1
    save_file(weights | copies, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"encoder.embed_tokens.weight differs from shared.weight, and config.json says"):
        import_model(tmp_path / "old", tmp_path / "again")


@pytest.mark.parametrize(
    "missing", ["lm_head.weight", "decoder.final_layer_norm.weight", "encoder.block.1.layer.1.DenseReluDense.wi_0.weight"]
)
def test_a_missing_tensor_is_named(missing, tmp_path):
    both("version 1.1")[1].save_pretrained(tmp_path / "theirs")
    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    del weights[missing]
    save_file(weights, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    config = tmp_path / "theirs" / "config.json"  # transformers 5 says that the head is tied
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=f"{missing} is missing"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
