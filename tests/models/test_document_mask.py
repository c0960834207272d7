"""Documents in one sequence know nothing of each other, with either back end."""

from __future__ import annotations

import copy
import dataclasses
from unittest.mock import patch

import parity
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import SMALL, pair, shape, tokens
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from pretrain.config.schema import Model
from pretrain.config.written import NO_IDENTITY
from pretrain.conventions import IGNORED
from pretrain.errors import ConfigError
from pretrain.models import attention
from pretrain.models.decoder import Decoder
from pretrain.models.families import complete
from pretrain.models.masks import attention_backend, attention_mask, document_numbers, document_positions
from pretrain.models.positions import rotary_tables
from pretrain.parallel.blocks import compile_blocks, recompute_blocks

NAMES = ["plain", "tied", "one key-value head", "grouped queries", "wide heads", "odd sizes"]
BACKENDS = ["sdpa", "flex"]
LENGTHS = [5, 1, 17, 9, 1, 8]  # of documents; 41 positions
PADDING = -1

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def ours(name: str, backend: str = "sdpa") -> Decoder:
    """Our decoder with the weights of `pair(name)`; gradients are its own."""
    model = copy.deepcopy(pair(name)[0])
    model.config = dataclasses.replace(model.config, attention_backend=backend)
    return model


def labels(lengths: list[int]) -> torch.Tensor:
    """One sequence of documents of these lengths, [1, T]."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def pieces(lengths: list[int]) -> list[slice]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for length, end in zip(lengths, ends)]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


many_labels = st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 150)), min_size=1, max_size=6)
splits = st.lists(st.integers(1, 12), min_size=2, max_size=5)

# ---- numbers, positions, masks -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.lists(many_labels, min_size=1, max_size=2))
def test_numbers_and_positions_are_those_of_a_walk_along_the_labels(rows):
    length = min(sum(n for _, n in row) for row in rows)
    documents = torch.tensor([[label for label, n in row for _ in range(n)][:length] for row in rows])
    numbers, positions = [], []
    for row in documents.tolist():
        number, position = 0, 0
        numbers.append([])
        positions.append([])
        for t, label in enumerate(row):
            begins = t > 0 and label != row[t - 1]
            number, position = number + begins, 0 if begins or t == 0 else position + 1
            numbers[-1].append(number)
            positions[-1].append(position)
    got = document_numbers(documents)
    assert got.tolist() == numbers
    assert document_positions(got).tolist() == positions


@settings(deadline=None, max_examples=50)
@given(
    st.lists(many_labels, min_size=1, max_size=2),
    st.sampled_from([None, 1, 128, 256, 257]),
    st.sampled_from([0, 1, 2, 100, 128, 129, 255, 256, 300]),
)
def test_the_block_mask_is_the_one_that_torch_makes_from_every_pair(rows, length, window):
    length = min([length or 900, *(sum(n for _, n in row) for row in rows)])
    documents = torch.tensor([[label for label, n in row for _ in range(n)][:length] for row in rows])
    numbers = document_numbers(documents)
    dense = attention_mask(length, documents.device, "sdpa", numbers, window)
    t = torch.arange(length)
    near = (t[:, None] >= t) & ((t[:, None] - t < window) if window else True)
    assert torch.equal(dense[:, 0], (numbers[:, :, None] == numbers[:, None, :]) & near)
    ours = attention_mask(length, documents.device, "flex", numbers, window)
    theirs = create_block_mask(lambda b, h, q, k: dense[b, 0, q, k], len(rows), None, length, length, device="cpu")
    assert ours.shape == theirs.shape and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        for field in (f"{name}_num_blocks", f"{name}_indices"):
            one, other = getattr(ours, field), getattr(theirs, field)
            assert one.dtype == other.dtype and torch.equal(one, other), field


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotary_tables_start_anew_in_each_document(backend):
    model = ours("wide heads", backend)
    documents = torch.cat((labels(LENGTHS), labels([20, 21])))
    with torch.no_grad():
        specs = [block.spec for block in model.layers.values()]
        tables = model._begin(torch.zeros_like(documents), documents, None, None, specs)[1][0][0]
    reference = rotary_tables(model.config, torch.arange(41), 41)
    for table, whole in zip(tables, reference):
        assert table.shape == (2, 1, 41, model.config.head_dim)
        for row, lengths in enumerate((LENGTHS, [20, 21])):
            for piece in pieces(lengths):
                assert torch.equal(table[row, 0, piece], whole[: piece.stop - piece.start])
    assert not torch.equal(tables[0][0, 0], reference[0])


# ---- without masks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_without_documents_the_causal_kernel_is_used_as_ever(backend):
    model, ids = ours("grouped queries", backend), tokens(SMALL, 2, 30)
    calls = []
    kernel = F.scaled_dot_product_attention
    with patch.object(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or kernel(*a, **k)):
        logits = model(ids)
    assert calls == [{"attn_mask": None, "is_causal": True, "scale": 8**-0.5, "enable_gqa": True}] * 2
    assert torch.equal(logits, pair("grouped queries")[0](ids))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_one_document_is_a_sequence_without_mask(name, backend):
    model, ids = ours(name, backend), tokens(shape(name), 2, 40)
    with torch.no_grad():
        assert (model(ids, None, torch.full_like(ids, 3)) - model(ids)).abs().max() <= 1e-5


# ---- packed and alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_have_the_logits_that_transformers_gives_each_alone(name, backend):
    model, theirs = ours(name, backend), pair(name)[1]
    ids = tokens(shape(name), 1, sum(LENGTHS))
    with torch.no_grad():
        packed, unmasked = model(ids, None, labels(LENGTHS)), model(ids)
        for index, piece in enumerate(pieces(LENGTHS)):
            assert (packed[:, piece] - theirs(ids[:, piece]).logits).abs().max() <= 1e-5
            assert (packed[:, piece] - model(ids[:, piece])).abs().max() <= 1e-5
            if index:  # what the mask is for
                assert (unmasked[:, piece] - packed[:, piece]).abs().max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_of_packed_documents_are_the_sums_over_each_alone_in_transformers(name):
    model, theirs = ours(name), copy.deepcopy(pair(name)[1])
    ids, targets = tokens(shape(name), 1, 41), tokens(shape(name), 1, 42)[:, 1:]
    loss = model(ids, targets, labels(LENGTHS)).sum()
    loss.backward()
    expected = sum(
        F.cross_entropy(theirs(ids[:, piece]).logits[0], targets[0, piece], reduction="sum") for piece in pieces(LENGTHS)
    )
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted = parity.translate("llama", shape(name), {n: p.grad for n, p in theirs.named_parameters()})
    for our_name, reference in wanted.items():
        assert (model.get_parameter(our_name).grad - reference).norm() <= 1e-4 * reference.norm(), our_name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["plain", "grouped queries"])
def test_packing_costs_bf16_less_than_bf16_itself_does(name, backend):
    """The difference that packing makes, in 2-norm: below what rounding to bf16 alone does to the same logits."""
    model, ids = ours(name, backend), tokens(shape(name), 1, sum(LENGTHS))
    with torch.no_grad():
        exact = torch.cat([model(ids[:, piece]) for piece in pieces(LENGTHS)], dim=1)
        model.embedding.compute_dtype = torch.bfloat16
        alone = torch.cat([model(ids[:, piece]) for piece in pieces(LENGTHS)], dim=1)
        packed = model(ids, None, labels(LENGTHS))
    assert packed.dtype == torch.bfloat16
    assert (packed.float() - alone.float()).norm() < (alone.float() - exact).norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_that_span_blocks_of_attention_are_kept_apart_too(backend):
    lengths = [100, 300, 3, 109, 88]  # the blocks of FlexAttention are of 128
    model, ids = ours("grouped queries", backend), tokens(SMALL, 1, sum(lengths))
    with torch.no_grad():
        packed = model(ids, None, labels(lengths))
        for piece in pieces(lengths):
            assert (packed[:, piece] - model(ids[:, piece])).abs().max() <= 1e-5


# ---- one document changes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=15)
@given(lengths=splits, data=st.data())
def test_other_tokens_in_a_document_change_no_logit_and_no_loss_of_another(backend, lengths, data):
    model = ours("grouped queries", backend)
    changed = data.draw(st.integers(0, len(lengths) - 1))
    documents, ids = labels(lengths), tokens(SMALL, 1, sum(lengths))
    others = torch.where(documents == changed, (ids + data.draw(st.integers(1, 60))) % SMALL.vocab_size, ids)
    targets = torch.where(documents == changed, IGNORED, tokens(SMALL, 1, sum(lengths) + 1)[:, 1:])
    kept = documents[0] != changed
    with torch.no_grad():
        one, two = model(ids, None, documents), model(others, None, documents)
        assert torch.equal(one[:, kept], two[:, kept])
        assert not torch.equal(one[:, ~kept], two[:, ~kept])
        assert torch.equal(model(ids, targets, documents), model(others, targets, documents))


@settings(deadline=None, max_examples=15)
@given(lengths=splits, data=st.data())
def test_other_tokens_in_a_document_change_no_gradient_that_another_contributes(lengths, data):
    model = ours("grouped queries")
    changed = data.draw(st.integers(0, len(lengths) - 1))
    documents, ids = labels(lengths), tokens(SMALL, 1, sum(lengths))
    others = torch.where(documents == changed, (ids + data.draw(st.integers(1, 60))) % SMALL.vocab_size, ids)
    targets = torch.where(documents == changed, IGNORED, tokens(SMALL, 1, sum(lengths) + 1)[:, 1:])
    found = []
    for tokens_BT in (ids, others):
        model(tokens_BT, targets, documents).sum().backward()
        found.append(gradients(model))
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


@settings(deadline=None, max_examples=15)
@given(lengths=splits, data=st.data())
def test_a_longer_or_shorter_document_changes_nothing_in_another(lengths, data):
    model = ours("grouped queries")
    changed = data.draw(st.integers(0, len(lengths) - 1))
    resized = [*lengths]
    resized[changed] = data.draw(st.integers(1, 12))
    texts = [tokens(SMALL, 1, 40 + i)[0] for i in range(len(lengths))]
    found = []
    for sizes in (lengths, resized):
        ids = torch.cat([text[:size] for text, size in zip(texts, sizes)])[None]
        documents = labels(sizes)
        targets = torch.where(documents == changed, IGNORED, (ids * 7 + 1) % SMALL.vocab_size)
        loss = model(ids, targets, documents).sum()
        loss.backward()
        with torch.no_grad():
            found.append((loss.item(), gradients(model), model(ids, None, documents)[:, documents[0] != changed]))
    (one_loss, one, one_logits), (two_loss, two, two_logits) = found
    assert one_loss == pytest.approx(two_loss, rel=1e-6)
    assert (one_logits - two_logits).abs().max() <= 1e-5
    # The norm of all gradients together, because a query's own is zero up to rounding where the document is a single token.
    largest = torch.stack([gradient.norm() for gradient in one.values()]).norm()
    for name, gradient in one.items():
        assert (gradient - two[name]).norm() <= 1e-6 * largest, name


def test_without_the_mask_a_document_does_change_what_another_contributes():
    model, documents = ours("grouped queries"), labels([10, 10])
    ids = tokens(SMALL, 1, 20)
    others = torch.where(documents == 0, (ids + 1) % SMALL.vocab_size, ids)
    targets = torch.where(documents == 0, IGNORED, ids)
    losses = [model(t, targets).item() for t in (ids, others)]
    assert abs(losses[0] - losses[1]) > 1e-2


# ---- padding, and what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_padding_gives_finite_numbers_and_changes_nothing(compute):
    model = ours("grouped queries")
    model.embedding.compute_dtype = compute
    ids = tokens(SMALL, 3, 24)
    documents = torch.cat((labels([9, 15]), torch.full((2, 24), PADDING)))
    documents[0, 20:] = PADDING
    documents[2, 0] = 0
    targets = torch.where(documents == PADDING, IGNORED, ids.roll(-1, 1))
    losses = model(ids, targets, documents)
    losses.sum().backward()
    padded = gradients(model)
    assert torch.isfinite(losses).all() and all(torch.isfinite(g).all() for g in padded.values())
    assert losses[1] == 0
    model(ids[:1, :20], targets[:1, :20], documents[:1, :20]).sum().backward()
    model(ids[2:, :1], targets[2:, :1]).sum().backward()
    tolerance = 1e-6 if compute is torch.float32 else 1e-2
    for name, gradient in gradients(model).items():
        assert (padded[name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_of_one_token_each_attend_to_themselves_only(backend):
    model, ids = ours("grouped queries", backend), tokens(SMALL, 1, 12)
    with torch.no_grad():
        packed = model(ids, None, torch.arange(12)[None])
        assert (packed[0] - model(ids.T)[:, 0]).abs().max() <= 1e-5


def test_flex_refuses_to_train_where_it_has_no_backward_pass():
    ids = tokens(SMALL, 1, 8)
    with pytest.raises(
        ConfigError, match="model.attention_backend=flex cannot train on run.device=cpu.*use sdpa or auto"
    ) as caught:
        ours("plain", "flex")(ids, None, labels([4, 4]))
    assert "\n" not in str(caught.value)


def test_auto_takes_flex_on_cuda_and_sdpa_elsewhere():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    model = complete(Model(dim=64, heads=4, vocab_size=9))
    narrow = dataclasses.replace(model, head_dim=8)
    assert attention_backend(model, cuda, True) == "flex"
    assert attention_backend(narrow, cuda, True) == "sdpa"
    assert attention_backend(model, cpu, True) == attention_backend(model, cpu, False) == "sdpa"
    assert attention_backend(dataclasses.replace(model, attention_backend="flex"), cpu, False) == "flex"
    assert attention_backend(dataclasses.replace(model, attention_backend="sdpa"), cuda, True) == "sdpa"
    dropping = dataclasses.replace(model, attention_dropout=0.1)
    assert attention_backend(dropping, cuda, True) == "sdpa"
    with pytest.raises(ConfigError, match="model.attention_backend=flex drops no weights, as model.attention_dropout=0.1 asks; use sdpa or auto"):
        attention_backend(dataclasses.replace(dropping, attention_backend="flex"), cuda, True)
    for backend in ("auto", "flex"):  # evaluation drops nothing
        assert attention_backend(dataclasses.replace(dropping, attention_backend=backend), cuda, False) == "flex"
    with pytest.raises(ConfigError, match="model.attention_backend=flex needs model.head_dim of at least 16, and it is 8"):
        attention_backend(dataclasses.replace(narrow, attention_backend="flex"), cuda, True)


def test_documents_of_another_shape_than_the_tokens_are_not_broadcast():
    with pytest.raises(ValueError, match=r"documents are \(1, 8\), tokens \(2, 8\)"):
        ours("plain")(tokens(SMALL, 2, 8), None, labels([4, 4]))


def test_the_back_end_is_no_part_of_what_a_run_is():
    assert "attention_backend" in NO_IDENTITY


# ---- with what is around it --------------------------------------------------------------------------------------------


def test_the_mask_is_made_once_per_forward_and_recomputed_blocks_give_bit_equal_gradients():
    model = ours("odd sizes")  # of 3 blocks
    ids = tokens(shape("odd sizes"), 2, 42)
    documents = torch.cat((labels(LENGTHS), labels([30, 11])))
    found = []
    with patch.object(model, "make_mask", wraps=attention_mask) as made:
        for recompute in (False, True):
            if recompute:
                recompute_blocks(model)
            loss = model(ids[:, :-1], ids[:, 1:], documents).sum()
            loss.backward()
            found.append({"loss": loss.detach()} | gradients(model))
    assert made.call_count == 2
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def compiled(name: str, backend: str, compiler: str, recompute: bool = False) -> Decoder:
    torch._dynamo.reset()
    model = ours(name, backend)
    if recompute:
        recompute_blocks(model)
    compile_blocks(model, compiler)
    return model


def check_compiled_blocks(compiler: str) -> None:
    graphs = torch._dynamo.utils.counters["stats"]
    model, eager = compiled("grouped queries", "sdpa", compiler), ours("grouped queries")
    recomputed, flex = compiled("grouped queries", "sdpa", compiler, True), compiled("grouped queries", "flex", compiler)
    before = graphs["unique_graphs"]
    for seed in range(3):  # other documents are no other graph
        ids = tokens(SMALL, 2, 151).roll(seed)
        documents = torch.cat((labels([5 + seed, 145 - seed]), labels([150 - 3 * seed, *[1] * (3 * seed)])))
        for both in ((model, eager), (recomputed, eager)):
            found = []
            for each in both:
                each.zero_grad()
                each(ids[:, :-1], ids[:, 1:], documents).sum().backward()
                found.append(gradients(each))
            for name, gradient in found[0].items():
                assert (gradient - found[1][name]).norm() <= 5e-6 * gradient.norm(), name
        with torch.no_grad():
            assert (flex(ids[:, :-1], None, documents) - eager(ids[:, :-1], None, documents)).abs().max() <= 1e-5
    assert graphs["unique_graphs"] == before + 3  # one of each back end for all layers, and one with recomputation


def test_blocks_are_captured_whole_with_either_mask_and_once_for_all_documents():
    check_compiled_blocks("aot_eager")


@pytest.mark.slow
def test_compiled_blocks_compute_the_same_with_either_mask():
    """python -m pytest tests/models/test_document_mask.py -m slow"""
    check_compiled_blocks("inductor")


@pytest.mark.slow
def test_flex_compiled_by_itself_is_compiled_once_for_all_documents():
    """As on CUDA in blocks that are not compiled; python -m pytest tests/models/test_document_mask.py -m slow"""
    torch._dynamo.reset()
    model, eager = ours("grouped queries", "flex"), ours("grouped queries")
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    with torch.no_grad(), patch.object(attention, "flex_attention", attention._compiled_flex(trains=False)):
        for seed in range(3):
            ids = tokens(SMALL, 2, 300).roll(seed)
            documents = torch.cat((labels([150 + seed, 150 - seed]), labels([300])))
            assert (model(ids, None, documents) - eager(ids, None, documents)).abs().max() <= 1e-5
    assert graphs["unique_graphs"] == before + 1
