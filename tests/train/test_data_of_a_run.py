"""What a run reads: the same samples on any number of ranks, for every packing, mixture and ramp, and across changes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from running import (
    gradients,
    largest_gradient_difference,
    largest_relative_difference,
    losses,
    run_main,
    run_main_with,
    train,
    write_prepared,
)

from pretrain.data.preparation.prepare import prepare
from pretrain.data.shards.reader import PreparedData
from pretrain.data.shards.writer import ShardWriter
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.errors import TrainingError
from pretrain.observe.metrics import read_metrics
from pretrain.train.trainer import Trainer


@pytest.fixture(scope="module")
def other(tmp_path_factory, byte_tokenizer) -> Path:
    return write_prepared(tmp_path_factory.mktemp("other") / "more", byte_tokenizer, seed=5, documents=40)


def digests(run: Path) -> list[str]:
    return [record["batch"] for record in read_metrics(run)]


def set_data(config_file: Path, **keys: object) -> None:
    config = yaml.safe_load(config_file.read_text())
    config["data"] |= keys
    config["schedule"] = {"name": "constant"}  # so that a run's length decides nothing
    config["data"]["cache"] = {"dir": str(config_file.parent / "cache")}
    config_file.write_text(yaml.safe_dump(config))


def sources(prepared: Path, other: Path, **keys: object) -> list[dict]:
    return [{"path": str(prepared), "name": "a", "weight": 3}, {"path": str(other), "name": "b", "weight": 1, **keys}]


STAGES = [{"until_tokens": 3000, "weights": {"a": 1, "b": 1}}, {"weights": {"a": 1, "b": 5}}]
RAMP = "batch.ramp=[{until_tokens: 1000, sequences: 8}, {until_tokens: 2000, sequences: 12}]"


@pytest.mark.parametrize(
    "packing", [pytest.param("concatenate", marks=pytest.mark.slow), "best_fit", pytest.param("padded", marks=pytest.mark.slow)]
)
def test_resumed_on_other_numbers_of_ranks_a_run_sees_the_samples_of_a_straight_one(
    pool, config_file, prepared, other, packing
):
    mixed = [source | {"weight": None} for source in sources(prepared, other, max_epochs=1)]
    set_data(config_file, sources=mixed, stages=STAGES, packing=packing)
    shape = [
        "batch.sequences=24",
        "batch.micro_sequences=2",
        "run.steps=14",
        "batch.ramp=[{until_tokens: 4000, sequences: 12}]",
    ]
    masks = [
        *(["data.document_mask=true", "data.boundary_loss=false"] if packing != "padded" else []),
        "data.shuffle=shards",
        "data.shuffle_shards=1",
        "schedule.name=constant",
        "optim.lr=1e-3",
    ]
    train(pool, 1, config_file, *shape, *masks, "run.name=straight")
    run = config_file.parent / "runs" / "straight"
    train(pool, 2, config_file, *shape, *masks, "run.name=elastic", "run.steps=5", "parallel.strategy=ddp")
    train(pool, 3, config_file, *shape, *masks, "run.name=elastic", "run.steps=9", "parallel.strategy=fsdp", "data.workers=3")
    elastic = train(
        pool,
        4,
        config_file,
        *shape,
        *masks,
        "run.name=elastic",
        "parallel.strategy=ddp",
        "data.workers=0",
        "batch.micro_sequences=3",
    )
    assert digests(elastic) == digests(run)
    assert len(set(digests(run))) == 14
    assert largest_relative_difference(losses(elastic), losses(run)) < 2e-5
    assert [r["tokens"] for r in read_metrics(elastic)] == [r["tokens"] for r in read_metrics(run)]
    shares = read_metrics(run)[-1]["shares"]
    assert shares.keys() == {"a", "b"} and abs(sum(shares.values()) - 1) < 1e-12


def test_gradients_of_masked_packed_samples_are_equal_in_every_layout(pool, config_file):
    set_data(config_file, packing="best_fit", document_mask=True, sequence_length=250)
    keys = ["run.steps=1", "log.gradients_at=[1]"]
    single = gradients(train(pool, 1, config_file, *keys, "run.name=single"))
    for strategy, world_size in (("ddp", 2), ("fsdp", 2), ("fsdp", 4)):
        run = train(pool, world_size, config_file, *keys, f"run.name={strategy}{world_size}", f"parallel.strategy={strategy}")
        assert largest_gradient_difference(single, gradients(run)) < 5e-6
    unmasked = gradients(train(pool, 1, config_file, *keys, "run.name=open", "data.document_mask=false"))
    assert largest_gradient_difference(single, unmasked) < 5e-6  # one document a sample: 200 tokens in 250
    two = ["data.sequence_length=420"]
    masked = gradients(train(pool, 1, config_file, *keys, *two, "run.name=two"))
    unmasked = gradients(train(pool, 1, config_file, *keys, *two, "run.name=two-open", "data.document_mask=false"))
    assert largest_gradient_difference(masked, unmasked) > 1e-3


def test_a_ramp_keeps_the_order_of_the_samples_and_takes_its_sizes(pool, config_file):
    run = train(pool, 2, config_file, RAMP, "run.steps=8", "batch.micro_sequences=2", "parallel.strategy=ddp")
    assert [r["tokens"] // 32 for r in read_metrics(run)] == [8, 16, 24, 32, 44, 56, 68, 84]


def test_a_ramp_that_a_layout_cannot_divide_is_refused_by_its_stage(config_file):
    code, printed = run_main(str(config_file), "batch.ramp=[{until_tokens: 1000, sequences: 3}]")
    assert code == 2
    assert "batch.ramp.0.sequences=3 is not divisible by batch.micro_sequences=4 times 1 data-parallel ranks" in printed
    code, printed = run_main(
        str(config_file), "batch.ramp=[{until_tokens: 64, sequences: 4}, {until_tokens: 40, sequences: 8}]"
    )
    assert code == 2
    assert "batch.ramp.1.until_tokens=40 is not beyond the stage before it, 64" in printed


# ---- a mixture that changes on the way --------------------------------------------------------------------------------


def test_weights_and_sources_change_in_a_run_under_way_when_the_past_stays_as_it_was(pool, config_file, prepared, other):
    set_data(config_file, sources=sources(prepared, other))
    train(pool, 1, config_file, "run.steps=6")
    run = config_file.parent / "runs" / "run"
    set_data(config_file, sources=[sources(prepared, other)[0] | {"weight": 1}, sources(prepared, other)[1]])
    code, printed = run_main(str(config_file), "run.steps=10")
    assert code == 1
    assert "the share of data.sources.0 in part 0 of the mixture was 75.0000% and is 50.0000%" in printed
    assert "give data.stages a stage until_tokens=3072 with the old weights, then one with the new" in printed
    third = {"path": str(write_prepared(config_file.parent / "new", prepared / "tokenizer", 9, 50)), "name": "c", "weight": 0}
    set_data(
        config_file,
        sources=[*sources(prepared, other), third],
        stages=[{"until_tokens": 3072}, {"weights": {"a": 1, "c": 3}}],
    )
    before = digests(run)
    train(pool, 1, config_file, "run.steps=200")
    assert digests(run)[:6] == before
    shares = read_metrics(run)[-1]["shares"]
    since = {name: (share * 3200 - first * 96) / 3104 for (name, share), first in zip(shares.items(), (72, 24, 0))}
    assert abs(shares["c"] * 3200 / 3104 - 0.75) < 0.03
    assert shares["b"] * 3200 == pytest.approx(24, abs=6)
    assert since.keys() == {"a", "b", "c"}


def test_achieved_shares_are_within_half_a_percent_after_a_few_blocks(config_file, prepared, other):
    import torch

    from pretrain.config.load import load_config
    from pretrain.train.plan import make_plan

    set_data(config_file, sources=sources(prepared, other))
    plan = make_plan(load_config(config_file)[0], 1, torch.device("cpu"))
    for samples in (4096, 10_000, 100_000, 10**9):
        assert abs(plan.data.shares(samples)["a"] - 0.75) < 0.005


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.sources.0.weight=0"], None),
        (["data.stages=[{weights: {z: 1}}]"], "data.stages.0.weights: no source is called 'z'; they are called a, b"),
        (
            ["data.stages=[{until_tokens: 64}, {until_tokens: 32}]"],
            "data.stages.1.until_tokens=32 is not beyond the stage before",
        ),
        (["data.stages=[{}, {}]"], "only the last may have no end"),
        (["data.stages=[{until_tokens: 64}]"], "data.stages end at until_tokens=64, after 2 samples: run.steps at most 0"),
    ],
)
def test_stages_that_contradict_themselves_are_refused(config_file, prepared, other, overrides, message):
    set_data(config_file, sources=sources(prepared, other))
    if message is None:
        set_data(config_file, sources=[{"path": str(prepared), "weight": 0}])
        overrides, message = [], "data.sources: every weight is 0"
    code, printed = run_main(str(config_file), "--check", *overrides)
    assert code == 2 and message in printed, printed


def test_weights_that_weigh_nothing_and_sources_that_are_never_read_are_refused(config_file, prepared, other):
    one, two = sources(prepared, other)
    for given, more, message in (
        ([{"path": str(prepared), "weight": 3}], [], "data.sources.0.weight=3 has no effect: a weight compares a source with others, and there is one"),
        ([one, two | {"weight": 0}], [], "data.sources.1.weight: it is 0 and no stage of data.stages names it, so nothing of b is read; remove the source"),
        ([{"path": str(prepared), "name": "a"}, {"path": str(other), "name": "b"}], ["data.stages=[{weights: {a: 1}}]"], "data.sources.1.weight: it is 0 in every stage of data.stages, so nothing of b is read"),
    ):
        set_data(config_file, sources=given)
        code, printed = run_main(str(config_file), "--check", *more)
        assert code == 2 and message in printed, printed
    set_data(config_file, sources=[one, two | {"weight": 0}])
    assert run_main(str(config_file), "--check", "data.stages=[{until_tokens: 640}, {weights: {b: 1}}]")[0] == 0


def test_a_refusal_says_where_its_key_was_written_even_if_it_shows_no_value(config_file, prepared, other):
    set_data(config_file, sources=sources(prepared, other))
    _, printed = run_main(str(config_file), "--check", "data.stages=[{weights: {z: 1}}]")
    assert printed.splitlines()[-1].startswith("error: command line: data.stages.0.weights: no source is called 'z'")
    set_data(config_file, sources=[{"path": str(prepared), "weight": 0}])
    _, printed = run_main(str(config_file), "--check")
    line = config_file.read_text().splitlines().index("  sources:") + 1
    assert printed.splitlines()[-1].startswith(f"error: {config_file}:{line}: data.sources: every weight is 0")


def test_budgets_of_tokens_are_shares_and_the_end_of_the_data(config_file, prepared, other):
    budget = [{"path": str(prepared), "name": "a", "tokens": 7680}, {"path": str(other), "name": "b", "tokens": 2560}]
    set_data(config_file, sources=budget)
    assert run_main(str(config_file), "run.steps=20", "--check")[0] == 0
    code, printed = run_main(str(config_file), "run.steps=21", "--check")
    assert code == 2
    assert "run.steps=21 reads 10752 tokens, more than the 10240 of all data.sources[].tokens; run.steps at most 20" in printed
    set_data(config_file, sources=[budget[0], {"path": str(other), "name": "b"}])
    code, printed = run_main(str(config_file), "--check")
    assert code == 2 and "data.sources.1 has no tokens, but data.sources.0 has" in printed


def test_a_source_too_small_for_its_weight_is_repeated_as_often_as_it_may_and_then_left(config_file, prepared, other):
    set_data(config_file, sources=[{"path": str(other), "name": "b", "max_epochs": 2}])
    available = 2 * ((PreparedData.open(other).tokens - 1) // 32)
    code, printed = run_main(str(config_file), "run.steps=100", "--check")
    assert code == 2
    assert f"every source that is drawn has come data.sources[].max_epochs times, after {available} samples" in printed
    assert f"run.steps at most {available // 16}" in printed
    set_data(config_file, sources=sources(prepared, other, max_epochs=2))
    code, printed = run_main(str(config_file), "run.steps=200", "--check")
    assert code == 0
    shares = re.findall(r"^data     (\w): .*, (\d+\.\d)% of the run's samples$", printed, re.MULTILINE)
    assert "b: 249 samples of 32 tokens, 2.00 epochs" in printed and [name for name, _ in shares] == ["a", "b"]
    assert shares[1][1] == f"{100 * 2 * 249 / (200 * 16):.1f}" and sum(float(share) for _, share in shares) == pytest.approx(100)
    assert "tokens on: a 100.0%" in printed


# ---- what a change would do -------------------------------------------------------------------------------------------


def test_a_change_of_what_decides_the_order_is_an_error_until_it_is_accepted_by_name(pool, config_file, prepared):
    set_data(config_file)
    run = train(pool, 1, config_file, "run.steps=4")
    keys = ["run.steps=6", "data.seed=3", "data.packing=best_fit"]
    code, printed = run_main(str(config_file), *keys)
    assert code == 1
    assert "data.packing was concatenate and is best_fit (samples would be cut at other places" in printed
    assert "data.seed was 7 and is 3 (the next samples would come in another order" in printed
    assert "if you mean it, set run.accept_changes=[data.packing, data.seed]" in printed
    assert run_main(str(config_file), *keys, "run.accept_changes=[data.seed]")[0] == 1
    assert [json.loads(line)["step"] for line in (run / "starts.jsonl").read_text().splitlines()] == [0]
    code, printed = run_main(str(config_file), *keys, "run.accept_changes=[data.seed, data.packing]")
    assert code == 0 and "accepted data.packing was concatenate" in printed and "data.seed was 7 and is 3" in printed
    assert [r["step"] for r in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert [json.loads(line)["samples"] for line in (run / "starts.jsonl").read_text().splitlines()] == [0, 64]
    # From now on it is a run of this order.
    assert run_main(str(config_file), *keys, "run.steps=7")[0] == 0


def test_only_some_keys_can_be_accepted(config_file):
    code, printed = run_main(str(config_file), "run.accept_changes=[model.dim]")
    assert (
        code == 2
        and "run.accept_changes=model.dim: a change of this key cannot be accepted; choose from run.seed, run.steps" in printed
    )


def test_the_data_must_suffice_from_where_the_run_goes_on(pool, config_file, other):
    set_data(config_file, sources=[{"path": str(other), "name": "b", "max_epochs": 1}])  # 249 samples
    train(pool, 1, config_file, "run.steps=10", "batch.sequences=8")
    larger = ("batch.sequences=16", "run.accept_changes=[batch.sequences, run.steps]")
    code, printed = run_main(str(config_file), "run.steps=21", *larger)
    assert code == 2 and "after 249 samples: run.steps at most 20" in printed
    # From the start, 20 steps of 16 samples would be 320.
    assert run_main(str(config_file), "run.steps=20", *larger)[0] == 0


def test_an_accepted_change_that_came_to_nothing_leaves_the_checkpoint_as_it_was(pool, config_file):
    set_data(config_file)
    run = train(pool, 1, config_file, "run.steps=5")
    changed = ["data.seed=3", "run.accept_changes=[data.seed]", "run.steps=9", "checkpoint.every_seconds=0"]
    code, _ = run_main_with(Trainer, "fit", _die, str(config_file), *changed)
    assert code == 1
    assert run_main(str(config_file), "run.steps=6")[0] == 0
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4, 5, 6]


def _die(self, *arguments):
    raise TrainingError("the node is gone")


def test_sources_that_cannot_be_told_apart_are_refused(config_file, prepared, other):
    same = [{"path": str(prepared), "name": "a"}, {"path": str(prepared), "name": "b"}]
    set_data(config_file, sources=same)
    code, printed = run_main(str(config_file), "--check")
    assert code == 2 and "data.sources.0 and data.sources.1 are the same data" in printed
    set_data(
        config_file, sources=sources(prepared, other), validation=[{"path": str(p), "name": "v"} for p in (prepared, other)]
    )
    code, printed = run_main(str(config_file), "--check")
    assert code == 2 and "data.validation.1: two sources are called 'v'" in printed


# ---- text that is not prepared ----------------------------------------------------------------------------------------


@pytest.fixture
def text_config(config_file, tmp_path, byte_tokenizer) -> Path:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(3):
        lines = [f"line {n} of file {i}: " + "abcdefgh"[n % 8] * (n % 50) for n in range(120)]
        (texts / f"{i}.txt").write_text("\n".join(lines))
    text = {"input": [str(texts / "*.txt")], "documents": "line", "tokenizer": str(byte_tokenizer)}
    set_data(config_file, sources=[], text=text, cache={"dir": str(tmp_path / "cache")})
    return config_file


def test_text_is_prepared_once_and_read_like_any_prepared_data(pool, text_config, byte_tokenizer):
    ramp = "batch.ramp=[{until_tokens: 2000, sequences: 8}]"
    two = train(pool, 2, text_config, "parallel.strategy=ddp", ramp, "data.packing=best_fit", "run.steps=8")
    [kept] = (text_config.parent / "cache" / "text").glob("[!.]*")
    prepare([str(text_config.parent / "texts" / "*.txt")], byte_tokenizer, text_config.parent / "by-hand", text_mode="line")
    assert PreparedData.open(kept).fingerprint == PreparedData.open(text_config.parent / "by-hand").fingerprint
    by_hand = [f"data.sources=[{{path: {text_config.parent / 'by-hand'}}}]", "data.text.input=[]", "data.text.tokenizer=null"]
    one = train(
        pool,
        1,
        text_config,
        *by_hand,
        "data.text.documents=file",
        "run.name=by-hand",
        ramp,
        "data.packing=best_fit",
        "run.steps=8",
    )
    assert digests(one) == digests(two)
    made = kept.stat().st_mtime_ns
    code, printed = run_main(str(text_config), "--check", "data.packing=padded", "run.name=other")
    assert code == 0 and "data     text: " in printed
    assert [*kept.parent.glob("[!.]*")] == [kept] and kept.stat().st_mtime_ns == made


def test_text_is_read_exactly_after_a_resume_on_another_number_of_ranks(pool, text_config):
    straight = train(pool, 1, text_config, "run.name=straight")
    train(pool, 2, text_config, "run.name=cut", "parallel.strategy=ddp", "run.steps=7")
    cut = train(pool, 1, text_config, "run.name=cut")
    assert digests(cut) == digests(straight) and len(set(digests(straight))) == 20


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.text.input=[]", "give either input (files and globs) or dataset"),
        ("data.text.tokenizer=null", "data.text.tokenizer is missing"),
        ("data.text.input=[absent.txt]", "data.text: absent.txt"),
    ],
)
def test_text_that_cannot_be_prepared_is_refused_in_one_line(text_config, override, message):
    code, printed = run_main(str(text_config), "--check", override)
    assert code in (1, 2) and message in printed and printed.count("\n") == 1


def test_text_that_changed_is_refused_at_the_resume(pool, text_config):
    train(pool, 1, text_config, "run.steps=3")
    file = sorted(text_config.parent.glob("texts/*.txt"))[0]
    file.write_text(file.read_text() + "\nmore")
    code, printed = run_main(str(text_config), "run.steps=5")
    assert code == 1 and "data.sources.0 was" in printed


def test_a_step_without_any_target_is_refused(pool, config_file, prepared):
    empty = config_file.parent / "empty"
    tokenizer = load_tokenizer(prepared / "tokenizer")
    with ShardWriter.create(empty, tokenizer, 1000) as writer:
        writer.add(np.full(100, tokenizer.eod_id), np.ones(100, dtype=np.int64))
    set_data(config_file, sources=[{"path": str(empty)}], packing="padded")
    [(code, printed)] = pool.launch(1, run_main, str(config_file))
    # Padded samples know no data.boundary_loss, so that advice alone led to another error.
    assert code == 1 and "step 1: no target carries a loss" in printed and "; prepare documents of two tokens or more, or pack them" in printed


# ---- what is wrong is named, and what has no effect is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["data.document_mask=true"],
            "data.document_mask=true has no effect with data.packing=padded; set data.packing=concatenate or best_fit",
        ),
        (
            ["data.boundary_loss=false"],
            "data.boundary_loss=false has no effect with data.packing=padded; set data.packing=concatenate or best_fit",
        ),
    ],
)
def test_masks_of_padded_samples_are_refused(config_file, overrides, message):
    """Newcomer and house reviews: accepted, and without effect."""
    code, printed = run_main(str(config_file), "--check", "data.packing=padded", *overrides)
    assert code == 2 and message in printed and printed.count("\n") == 1
    assert run_main(str(config_file), "--check", "data.packing=padded")[0] == 0


def test_weights_that_no_stage_takes_are_refused(config_file, prepared, other):
    """Every stage has weights of its own: those of the sources would be unused without a word."""
    stages = ["data.stages=[{until_tokens: 320, weights: {a: 1}}, {weights: {b: 1}}]"]
    set_data(config_file, sources=sources(prepared, other))
    code, printed = run_main(str(config_file), "--check", *stages)
    assert (
        code == 2
        and "data.sources.0.weight=3 has no effect, because every stage of data.stages has weights of its own" in printed
    )
    assert run_main(str(config_file), "--check", "data.stages=[{until_tokens: 320}, {weights: {b: 1}}]")[0] == 0
    named = [source | {"weight": 0} for source in sources(prepared, other)]  # what is to be named in stages only
    set_data(config_file, sources=named)
    assert run_main(str(config_file), "--check", *stages)[0] == 0


def test_a_source_that_cannot_be_opened_is_named_by_its_place_in_the_list(config_file, prepared):
    """House review: the path alone says nothing of which key to change."""
    broken = config_file.parent / "nowhere"
    for keys, place in (
        (f"data.sources=[{{path: {prepared}}}, {{path: {broken}}}]", "data.sources.1"),
        (f"data.validation=[{{path: {broken}, name: v}}]", "data.validation.0"),
    ):
        code, printed = run_main(str(config_file), "--check", keys)
        assert code == 1 and printed == f"error: command line: {place}: {broken}: no such directory; prepare it with tools/prepare_data.py\n"


def test_epochs_are_counted_from_what_the_run_has_consumed(config_file):
    """Newcomer review, section 3: a run with another batch size before said twice as many."""
    keys = ["batch.sequences=8", "batch.micro_sequences=4", "log.every_steps=100"]
    assert run_main(str(config_file), *keys, "run.steps=60")[0] == 0
    accepted = "run.accept_changes=[batch.sequences, run.steps]"
    code, printed = run_main(str(config_file), *keys[1:], "batch.sequences=16", "run.steps=70", accepted)
    line = next(line for line in printed.splitlines() if line.startswith("data     ") and "epochs" in line)
    samples = int(re.search(r": ([\d,]+) samples of 32", line)[1].replace(",", ""))
    assert code == 0 and line.endswith(f", {(60 * 8 + 10 * 16) / samples:.2f} epochs")


def test_other_data_at_a_resume_are_named_by_both_paths(config_file, prepared, other):
    """House review 2.13: two hashes of 64 digits."""
    assert run_main(str(config_file), "run.steps=6")[0] == 0
    set_data(config_file, sources=[{"path": str(other)}])
    code, printed = run_main(str(config_file), "run.steps=12")
    assert code == 1
    assert re.search(rf"data\.sources\.0 was {prepared} \(sha256 \w{{12}}\) and is {other} \(sha256 \w{{12}}\)", printed)
    assert not re.search(r"\b[0-9a-f]{64}\b", printed)


def test_sources_and_validation_end_documents_with_the_same_token(config_file, tmp_path, byte_tokenizer):
    """D-D2: refused at the start, for validation too."""
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer([], tokenizer, "byte", special_tokens=["<|im_end|>"])
    base = write_prepared(tmp_path / "base", tokenizer, seed=1, documents=100)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|im_end|>"}))
    chat = write_prepared(tmp_path / "chat", tokenizer, seed=2, documents=100)
    for keys in (
        [f"data.sources=[{{path: {base}}}, {{path: {chat}}}]"],
        [f"data.sources=[{{path: {base}}}]", f"data.validation=[{{path: {chat}}}]"],
    ):
        code, printed = run_main(str(config_file), "--check", *keys)
        assert code == 1, printed
        assert (
            f"{base} and {chat} were prepared with one tokenizer but different end-of-document tokens, <|endoftext|> (256)"
            in printed
        )
