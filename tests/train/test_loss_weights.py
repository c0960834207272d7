"""`data.sources[].loss_weight`: the objective weighs sources, and what is reported as the loss does not."""

from __future__ import annotations

import pytest
from running import gradients, largest_gradient_difference, run_main, some_slow, train, write_prepared

from pretrain.observe.metrics import read_metrics

SHORT = ("run.steps=1", "schedule={name: constant, warmup_steps: 0}", "log.gradients_at=[1]")
LAYOUTS = {
    "ddp": (2, "parallel.strategy=ddp"),
    "fsdp": (2, "parallel.strategy=fsdp"),
    "hsdp": (4, "parallel.strategy=fsdp", "parallel.replicate=2"),
    "tensor": (2, "parallel.strategy=fsdp", "parallel.tensor=2"),
    "context": (2, "parallel.strategy=fsdp", "parallel.context=2"),
    "ring": (2, "parallel.strategy=fsdp", "parallel.context=2", "parallel.context_method=ring"),
    "pipeline": (2, "parallel.strategy=fsdp", "parallel.pipeline=2", "batch.micro_sequences=2"),
    "compiled": (1, "parallel.compile=blocks"),
}
MODELS = {"plain": (), "a token ahead": ("model.family=custom", "model.predict_ahead=1")}


@pytest.fixture
def sources(prepared, byte_tokenizer, tmp_path):
    other = write_prepared(tmp_path / "other", byte_tokenizer, seed=3, documents=60)

    def sources(first: float, second: float) -> str:
        return f"data.sources=[{{path: {prepared}, name: a, loss_weight: {first}}}, {{path: {other}, name: b, loss_weight: {second}}}]"

    return sources


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_gradient_is_the_weighted_sum_of_the_sources_gradients(pool, config_file, sources, model):
    parts = []
    for name, weights in (("a", (1, 0)), ("b", (0, 1)), ("both", (0.3, 2.5))):
        run = train(pool, 1, config_file, *SHORT, *model, sources(*weights), f"run.name={name}")
        parts.append((gradients(run), read_metrics(run)[0]))
    (a, of_a), (b, of_b), (both, record) = parts
    expected = {name: 0.3 * a[name] + 2.5 * b[name] for name in a}
    assert largest_gradient_difference(both, expected) < 5e-6
    assert record["loss"] == of_a["loss"] == of_b["loss"] and record["source_loss"] == of_a["source_loss"]
    assert record["objective"] == pytest.approx(0.3 * of_a["objective"] + 2.5 * of_b["objective"], rel=1e-6)


@pytest.mark.parametrize("layout", some_slow(LAYOUTS, ["hsdp", "ddp", "compiled", "context", "fsdp"]))
def test_layouts_weigh_alike(pool, trained_run, config_file, sources, layout):
    model = ("batch.micro_sequences=2",)
    one = train(pool, 1, config_file, *SHORT, *model, sources(0.3, 2.5), "run.name=one")
    ranks, *overrides = LAYOUTS[layout]
    other = train(pool, ranks, config_file, *SHORT, *model, sources(0.3, 2.5), *overrides)
    assert largest_gradient_difference(gradients(other), gradients(one)) < 5e-6


def test_another_weight_at_a_resume_needs_consent(pool, config_file, sources):
    train(pool, 1, config_file, *SHORT, sources(1, 1))
    longer = (*SHORT, "run.steps=2", sources(1, 0.5))
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *longer)
    assert code == 1 and "data.loss_weight.1" in printed and "would have other weights" in printed
    train(pool, 1, config_file, *longer, "run.accept_changes=[data.loss_weight]")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.sources.0.loss_weight=2"], "there is one"),
        (["BOTH"], "the weight of every source is 0"),
        (["BOTH1", "model={family: t5, dim: 32, layers: 2, heads: 4, head_dim: 8, ffn_dim: 64}", "data.objective=span_corruption"], "only our decoders"),
    ],
)  # fmt: skip
def test_weights_without_effect_are_refused(pool, config_file, sources, overrides, said):
    given = {"BOTH": sources(0, 0), "BOTH1": sources(1, 2)}
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *(given.get(word, word) for word in overrides))
    assert code in (1, 2) and said in printed and "Traceback" not in printed
