"""A key that does nothing where it is set is refused, with its place and what would give it an effect."""

from __future__ import annotations

import pytest
from running import run_main, train

from pretrain.config.keys import check_effects, keys_of
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.observe.metrics import read_metrics


def refused(*overrides: str, resolved: dict[str, object] | None = None) -> str:
    config, _ = load_config(None, list(overrides))
    with pytest.raises(ConfigError) as caught:
        check_effects(config, resolved)
    return str(caught.value)


def notes(*overrides: str, resolved: dict[str, object] | None = None) -> list[str]:
    return check_effects(load_config(None, list(overrides))[0], resolved)


@pytest.mark.parametrize(("overrides", "message"), [
    (["schedule={name: constant, min_ratio: 0.5}"], "schedule.min_ratio=0.5 has no effect with schedule.name=constant; set schedule.name=cosine or "),
    (["schedule={name: inverse_sqrt, min_ratio: 0.5}"], "schedule.name=inverse_sqrt"),
    (["schedule.stages=[{steps: 15, ratio: 0.5}]"], "schedule.stages=[{steps: 15, ratio: 0.5, shape: linear, tokens: null, by_tokens: null}] has no effect with schedule.name=cosine"),
    (["schedule.decay_steps=3"], "schedule.decay_steps=3 has no effect with schedule.name=cosine; set schedule.name=wsd"),
    (["parallel={strategy: fsdp, ddp: {bucket_mb: 5}}"], "parallel.ddp.bucket_mb=5.0 has no effect with parallel.strategy=fsdp"),
    (["parallel={strategy: single, grad_sync: every}"], "parallel.grad_sync=every has no effect with parallel.strategy=single"),
    (["parallel.strategy=single", "precision.reduce=bf16"], "precision.reduce=bf16"),
    (["parallel={strategy: single, backend: gloo}"], "parallel.backend=gloo"),
    (["parallel={strategy: ddp, offload: true}"], "parallel.offload=true has no effect with parallel.strategy=ddp; set parallel.strategy=fsdp"),
    (["parallel={strategy: ddp, reshard_after_forward: never}"], "or set parallel.reshard_after_forward=always"),
    (["loss.predict_ahead_weight=0.5"], "without model.predict_ahead; set model.predict_ahead, or set loss.predict_ahead_weight=0.3"),
    (["validation.translation.beam=4"], "without validation.translation.every_steps"),
    (["validation.sequences=3"], "without data.validation"),
    (["validation.every_steps=5"], "without data.validation"),
    (["batch.tokens=4096"], "without data.pairs"),
    (["data.pairs=x", "batch={tokens: 4096, sequences: 4}"], "batch.sequences=4 has no effect with data.pairs; remove data.pairs, or set batch.sequences="),
    (["model.family=hf", "loss.chunk_mb=4"], "loss.chunk_mb=4 has no effect with model.family=hf; change model.family"),
    (["checkpoint={keep_last: 0, keep_every_steps: 100}"], "checkpoint.keep_last=0"),
])  # fmt: skip
def test_a_key_without_effect_is_refused_with_what_would_give_it_one(overrides, message):
    """Settings that were accepted and ignored (review of the house, section 3)."""
    assert message in refused(*overrides)


def test_the_place_of_the_key_is_named(config_file):
    config_file.write_text(config_file.read_text() + "loss:\n  predict_ahead_weight: 0.5\n")
    code, printed = run_main(str(config_file))
    line = len(config_file.read_text().splitlines())
    assert code == 2 and printed.startswith(f"error: {config_file}:{line}: loss.predict_ahead_weight=0.5 has no effect")
    code, printed = run_main(str(config_file), "--print-config")
    assert code == 2 and "loss.predict_ahead_weight=0.5 has no effect" in printed


def test_what_auto_takes_the_effect_from_is_said_and_not_refused(pool, config_file):
    options = ("parallel.grad_sync=every", "parallel.ddp.bucket_mb=5")
    assert notes(*options) == [] == notes(*options, resolved={"parallel.strategy": "ddp"})
    assert len(notes(*options, resolved={"parallel.strategy": "single"})) == 2
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *options, "run.steps=1", "schedule.warmup_steps=0")
    assert code == 0
    assert "note     parallel.grad_sync=every has no effect with parallel.strategy=single (the choice of auto)" in printed


def test_a_run_that_is_shorter_than_its_warmup_warms_up_to_its_end_and_says_so(pool, config_file):
    rates = [r["lr"] for r in read_metrics(train(pool, 1, config_file, "run.steps=4", "schedule.warmup_steps=2000"))]
    assert rates == pytest.approx([3e-3 / 4 * step for step in (1, 2, 3, 4)])
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", "run.steps=4", "schedule.warmup_steps=2000")
    assert code == 0 and "note     schedule.warmup_steps=2000 is above run.steps=4: 4 steps of warmup" in printed
    wsd = "schedule={name: wsd, warmup_steps: 20, decay_steps: 60}"
    rates = [r["lr"] for r in read_metrics(train(pool, 1, config_file, "run.name=wsd", "run.steps=8", wsd))]
    assert rates[1] == pytest.approx(3e-3) and rates[-1] == pytest.approx(3e-4)


def test_a_default_is_never_refused():
    assert check_effects(Config()) == []
    assert all(key.value == key.default for key in keys_of(Config()))
