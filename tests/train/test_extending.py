"""Code of one's own in a run: docs/extending.py as it stands there, early stopping, the best checkpoints, and what fails."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch_pool import RankProcess, start_ranks
from running import cut_after, run_main, some_slow, state_of, train

from pretrain.checkpoint.payload import Payload
from pretrain.config.data_schema import Data, ValidationSource
from pretrain.config.optim_schema import Optim
from pretrain.config.schema import Config, Translation, Validation
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from pretrain.evaluation.scores import Scorer
from pretrain.huggingface.open_model import open_model
from pretrain.observe.metrics import StepRecord, read_metrics
from pretrain.observe.sinks import Sink
from pretrain.run import main
from pretrain.train.callbacks import Callback, Callbacks, EarlyStopping, KeepBest, RunHandle, Watched
from pretrain.train.extensions import Extensions
from pretrain.train.multiple_choice import MultipleChoice, read_questions

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.append(str(DOCS))

import extending  # noqa: E402

METHODS = ("start", "evaluate", "on_record", "on_save", "close")
LOSSES = {1: 5.0, 2: 4.0, 3: 4.5, 4: 3.0, 5: 3.5, 6: 3.2, 7: 3.1, 8: 2.0}
SHORT = ("run.steps=8", "schedule={name: constant, warmup_steps: 0}", "log.every_steps=100", "checkpoint.keep_last=1")


class Given(Callback):
    """Numbers that a test chooses, under `evaluation/given`."""

    def __init__(self, losses: dict[int, float] = LOSSES) -> None:
        self.losses = losses

    def evaluate(self, run: RunHandle, step: int) -> dict[str, float]:
        return {"given": self.losses[step], "rising": float(step)}


class Failing(Callback):
    def __init__(self, method: str) -> None:
        setattr(self, method, self.fail)

    def fail(self, *arguments: object) -> dict[str, float]:
        raise ZeroDivisionError("a mistake of mine")


class Exiting(Callback):
    def on_record(self, run: RunHandle, record: StepRecord) -> None:
        sys.exit("the loss is low enough")


class OneRankFails(Callback):
    """Rank 1 fails while the other is in a sum."""

    def evaluate(self, run: RunHandle, step: int) -> dict[str, float]:
        if run.mesh.data_rank == 1:
            raise ZeroDivisionError("a mistake of mine")
        return {"sum": float(run.mesh.sum_over_data("sum of a callback", torch.ones(1, dtype=torch.float64)))}


class NoNumber(Callback):
    def evaluate(self, run: RunHandle, step: int) -> dict[str, str]:
        return {"quality": "high"}


class FailingSink(Sink):
    def write(self, record: StepRecord) -> None:
        if record.step == 1:
            raise ConnectionError("the server is away")
        if record.step == 2:
            raise KeyError("no such number")


GIVEN = "evaluation/given"
MADE = {
    "early": lambda patience=3: ([Given(), EarlyStopping(patience, GIVEN), KeepBest(2, GIVEN)], []),
    "patient": lambda: MADE["early"](4),
    "documented": lambda: (
        [extending.Counting(every_steps=2), KeepBest(count=2, metric="evaluation/counting")],
        [extending.CsvFile()],
    ),
    "one rank fails": lambda: ([OneRankFails()], []),
    "measured only": lambda: ([Given()], []),
    "later": lambda: ([Given(), KeepBest(1, GIVEN)], []),
    "worse": lambda: ([Given(dict.fromkeys(range(9), 6.0)), KeepBest(1, GIVEN)], []),
    "two of one folder": lambda: ([Given(), KeepBest(1, GIVEN), KeepBest(1, "loss")], []),
    "two folders": lambda: ([Given(), KeepBest(1, GIVEN), KeepBest(1, "evaluation/rising", folder="best-rising")], []),
    "no folder of its own": lambda: ([KeepBest(1, "loss", folder="checkpoints")], []),
    "failing sink": lambda: ([], [FailingSink()]),
    "no validation": lambda: ([KeepBest()], []),
    "no such source": lambda: ([EarlyStopping(2, "validation/x")], []),
    "a source without a name": lambda: ([KeepBest(1, "validation/web")], []),
    "no metric": lambda: ([EarlyStopping(2, "lr")], []),
    "no number": lambda: ([NoNumber()], []),
    "twice": lambda: ([Given(), Given()], []),
    "never measured": lambda: ([KeepBest(1, "evaluation/typo")], []),
    "one rank's own": lambda: ([Given()] if os.environ["RANK"] == "0" else [Failing("close")], []),
    "exit": lambda: ([Exiting()], []),
    **{method: lambda method=method: ([Failing(method)], []) for method in METHODS},
}


def run_extended(made: str, config_file: str, *overrides: str) -> tuple[int, str]:
    callbacks, sinks = MADE[made]()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["--config", config_file, *SHORT, *overrides], callbacks, sinks)
    return code, printed.getvalue()


def run_rank(made: str, config_file: str, *overrides: str) -> int:
    callbacks, sinks = MADE[made]()
    return main(["--config", config_file, *SHORT, *overrides], callbacks, sinks)


@pytest.fixture
def started(tmp_path, config_file) -> Iterator[Callable[..., list[RankProcess]]]:
    """Two ranks in processes of their own, for what ends a process."""
    ranks: list[RankProcess] = []

    def start(made: str, *overrides: str) -> list[RankProcess]:
        ranks.extend(start_ranks(tmp_path, 2, run_rank, made, str(config_file), *overrides))
        return ranks

    yield start
    for rank in ranks:
        rank.process.kill()


def test_a_validation_source_without_a_name_is_watched_by_the_name_of_its_records(pool, config_file, prepared):
    """Only names in the configuration were known: "choose one of validation, validation/None"."""
    (prepared.parent / "web").symlink_to(prepared)
    checked = (f"data.validation=[{{path: {prepared.parent / 'web'}}}]", "validation.every_steps=4", "log.tensorboard=true")
    [(code, printed)] = pool.launch(1, run_extended, "a source without a name", str(config_file), *checked)
    assert code == 0, printed
    run = config_file.parent / "runs" / "run"
    losses = {record["step"]: record["validation"]["web"] for record in read_metrics(run) if "validation" in record}
    assert kept(run) == [f"step-{min(losses, key=losses.get):08d}"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert b"validation/web" in board.summary_metadata["_hparams_/experiment"].plugin_data.content


def kept(run: Path, folder: str = "best") -> list[str]:
    return sorted(path.name for path in (run / folder).iterdir())


def status(run: Path) -> tuple[str, int, str | None]:
    found = json.loads((run / "status.json").read_text())
    return found["state"], found["step"], found["reason"]


def test_the_documented_script_measures_the_same_on_two_sharded_ranks_and_writes_every_number(pool, config_file):
    code = [
        found
        for found, _ in pool.launch(
            2, run_extended, "documented", str(config_file), "parallel.strategy=fsdp", "parallel.shard=2"
        )
    ]
    run = config_file.parent / "runs" / "run"
    assert code == [0, 0]
    records = {record["step"]: record for record in read_metrics(run)}
    assert sorted(records) == [1, 2, 4, 6, 8] and "evaluation" not in records[1]
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    assert {(int(step), float(value)) for step, name, value in rows if name == "evaluation/counting"} == {
        (step, record["evaluation"]["counting"]) for step, record in records.items() if step > 1
    }
    counting = {step: record["evaluation"]["counting"] for step, record in records.items() if step > 1}
    assert kept(run) == sorted(f"step-{step:08d}" for step in sorted(counting, key=counting.get)[:2])
    # What one process finds with the weights of the end, on the ids of both ranks.
    model = open_model(run / "checkpoints" / "step-00000008")
    ids_BT = (torch.arange(33)[None] + torch.tensor([[0], [1]])) % 256
    with torch.no_grad():
        losses_B = model.network(tokens_BT=ids_BT[:, :-1], targets_BT=ids_BT[:, 1:])
    assert float(losses_B.sum()) / 64 == pytest.approx(counting[8], rel=1e-5)


def test_the_page_shows_the_script():
    page, script = (DOCS / "extending.md").read_text(), (DOCS / "extending.py").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    [other] = [block for block in blocks if block not in script]
    assert len(blocks) == 4 and "MultipleChoice(" in other
    compile(other, "extending.md", "exec")


def test_a_run_ends_early_keeps_its_best_checkpoints_and_stops_again_when_it_is_repeated(pool, config_file):
    [(code, printed)] = pool.launch(1, run_extended, "early", str(config_file))
    run, reason = config_file.parent / "runs" / "run", "evaluation/given has not improved on 3 in 3 measurements"
    assert code == 0 and f"stopped at step 7: {run} ({reason})" in printed
    assert status(run) == ("stopped", 7, reason)
    # Step 4 was saved because it is the best, step 7 because it is the last.
    assert kept(run) == ["step-00000004", "step-00000007"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000007"]
    [(code, printed)] = pool.launch(1, run_extended, "early", str(config_file))
    assert code == 0 and status(run) == ("stopped", 7, reason) and len(read_metrics(run)) == 7
    # A larger patience goes on, from what was logged.
    [(code, printed)] = pool.launch(1, run_extended, "patient", str(config_file))
    assert code == 0 and status(run) == ("finished", 8, None)
    assert kept(run) == ["step-00000004", "step-00000008"]


def test_a_kept_checkpoint_is_whole_and_outlives_the_original(pool, config_file):
    [(code, printed)] = pool.launch(1, run_extended, "early", str(config_file))
    run = config_file.parent / "runs" / "run"
    assert code == 0
    straight = train(pool, 1, config_file, *SHORT, "run.name=straight", "checkpoint.keep_last=0", "checkpoint.every_steps=4")
    ours, theirs = state_of_best(run, 4), state_of(straight, 4)
    assert ours.keys() == theirs.keys() and all((ours[name] == value).all() for name, value in theirs.items())
    [(code, printed)] = pool.launch(
        1, run_main, str(config_file), *SHORT, "run.name=next", f"run.init_from={run}/best/step-00000004"
    )
    assert code == 0, printed


def state_of_best(run: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = run / "best" / f"step-{step:08d}"
    return Payload(checkpoint).read_all("model.") | Payload(checkpoint).read_all("optim.")


def test_an_interrupted_run_stops_early_where_a_straight_one_does(pool, config_file):
    [(code, _)] = pool.launch(1, run_extended, "early", str(config_file), "checkpoint.keep_last=0", "checkpoint.every_steps=5")
    run = config_file.parent / "runs" / "run"
    assert code == 0
    parts = cut_after(run, 5)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (parts / "metrics.jsonl").write_text("".join(lines[:6]))  # killed after step 6
    (parts / "identity.json").write_bytes((run / "identity.json").read_bytes())
    (code, printed) = pool.launch(1, run_extended, "early", str(config_file), "run.name=parts")[0]
    assert code == 0 and status(parts)[:2] == ("stopped", 7), printed
    assert [r["loss"] for r in read_metrics(parts)] == [r["loss"] for r in read_metrics(run)]


@pytest.mark.parametrize("method", some_slow(METHODS, ["start", "on_record", "close"]))
def test_a_mistake_in_a_callback_ends_the_run_on_all_ranks_with_a_line(pool, config_file, method):
    results = pool.launch(2, run_extended, method, str(config_file), "run.steps=2", "parallel.strategy=ddp")
    line = f"the callback Failing.{method}: ZeroDivisionError: a mistake of mine; the traceback is in this rank's log"
    assert [code for code, _ in results] == [1, 1] and line in results[0][1], results
    assert "Traceback" not in results[0][1] + results[1][1]
    run = config_file.parent / "runs" / "run"
    log = (run / "logs" / "rank-0.log").read_text()
    assert "ZeroDivisionError: a mistake of mine" in log and "Traceback" in log
    assert status(run)[0] == "failed"


def test_a_callback_that_leaves_the_process_takes_no_rank_with_it(pool, config_file):
    results = pool.launch(2, run_extended, "exit", str(config_file), "run.steps=2", "parallel.strategy=ddp")
    line = "the callback Exiting.on_record called sys.exit; call run.stop(reason), which ends the run in order on all ranks"
    assert [code for code, _ in results] == [1, 1] and line in results[0][1], results
    assert status(config_file.parent / "runs" / "run")[0] == "failed"


def test_a_rank_that_fails_alone_while_the_others_sum_ends_the_run_with_its_line(started):
    zero, one = started("one rank fails", "parallel.strategy=ddp")
    assert one.wait(60) == 1 and zero.wait(60) == 1
    line = "rank 1: the callback OneRankFails.evaluate: ZeroDivisionError: a mistake of mine"
    assert line in one.printed() and line in zero.printed(), zero.printed()
    assert "Traceback" not in zero.printed() + one.printed()


def test_steps_without_a_checkpoint_do_not_count_among_the_best(pool, config_file):
    """A callback that is added to a run later would otherwise keep nothing that is worse than what is gone."""
    [(code, _)] = pool.launch(1, run_extended, "measured only", str(config_file), "run.steps=4")
    run = config_file.parent / "runs" / "run"
    assert code == 0
    lines = [json.loads(line) | {"evaluation": {"given": 0.1}} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    [(code, printed)] = pool.launch(1, run_extended, "later", str(config_file), "run.steps=6")
    assert code == 0 and "steps [1] were among the best, but their checkpoints are gone" in printed
    assert kept(run) == ["step-00000006"]


def test_the_best_stays_the_best_without_the_log_of_metrics(pool, config_file):
    """e17: KeepBest knew the values of its copies from metrics.jsonl alone, and removed the best one for a worse one."""
    [(code, _)] = pool.launch(1, run_extended, "later", str(config_file), "run.steps=5")
    run = config_file.parent / "runs" / "run"
    assert code == 0 and kept(run) == ["step-00000004"]
    measured = run / "best" / "step-00000004" / "measured.json"
    assert json.loads(measured.read_text()) == {"metric": GIVEN, "value": 3.0}
    (run / "metrics.jsonl").unlink()
    [(code, printed)] = pool.launch(1, run_extended, "later", str(config_file), "run.steps=6")
    assert code == 0 and kept(run) == ["step-00000004"] and "unknown" not in printed
    measured.unlink()  # a copy of an earlier version of the program
    (run / "metrics.jsonl").unlink()
    [(code, printed)] = pool.launch(1, run_extended, "later", str(config_file), "run.steps=7")
    line = f"KeepBest: {GIVEN} of steps [4] in {run / 'best'} is unknown, so they stay there and do not count"
    assert code == 0 and line in printed and kept(run) == ["step-00000004", "step-00000007"]


def test_copies_of_a_time_line_that_the_run_has_left_are_set_aside(pool, config_file):
    """The best of the left line stayed in best/, and counted as the run's best where metrics.jsonl did not say otherwise."""
    keep = ("checkpoint.keep_last=0", "checkpoint.every_steps=2")
    [(code, printed)] = pool.launch(1, run_extended, "later", str(config_file), *keep, "run.steps=5")
    run = config_file.parent / "runs" / "run"
    assert code == 0 and kept(run) == ["step-00000004"], printed
    back = f"run.resume={run / 'checkpoints' / 'step-00000002'}"
    [(code, printed)] = pool.launch(1, run_extended, "worse", str(config_file), *keep, "run.steps=4", back)
    line = f"KeepBest: the run has left the time line of {run / 'best' / 'step-00000004'}; set aside as abandoned-step-00000004"
    assert code == 0 and line in printed and kept(run) == ["abandoned-step-00000004", "step-00000002"]
    (run / "metrics.jsonl").unlink()
    [(code, printed)] = pool.launch(1, run_extended, "worse", str(config_file), *keep, "run.steps=6")
    assert code == 0 and "left the time line" not in printed and kept(run) == ["abandoned-step-00000004", "step-00000002"]


def test_two_that_keep_the_best_have_a_folder_each(pool, config_file):
    """They removed each other's copies."""
    run = config_file.parent / "runs" / "run"
    [(code, printed)] = pool.launch(1, run_extended, "two folders", str(config_file), "run.steps=6")
    assert code == 0 and (kept(run), kept(run, "best-rising")) == (["step-00000004"], ["step-00000001"]), printed
    for made, line in (
        ("two of one folder", "two KeepBest keep their checkpoints in best/; give one another folder=best-NAME"),
        ("no folder of its own", "KeepBest: folder=checkpoints must be a name that begins with best"),
    ):
        [(code, printed)] = pool.launch(1, run_refused, made, str(config_file), f"run.name={made.replace(' ', '-')}")
        assert code == 2 and line in printed, printed


def run_refused(made: str, *arguments: str) -> tuple[int, str]:
    """A run whose callbacks may be refused when they are made, as in a script."""
    try:
        return run_extended(made, *arguments)
    except ConfigError as error:
        return error.exit_code, str(error)


def test_a_sink_that_fails_is_warned_of_and_the_run_goes_on(pool, config_file):
    [(code, printed)] = pool.launch(1, run_extended, "failing sink", str(config_file), "log.every_steps=1")
    assert code == 0 and "the sink FailingSink: cannot be written: the server is away; the run goes on" in printed
    assert "the sink FailingSink: is written again; lines that were lost: 2" in printed


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ("no validation", "the metric validation cannot be watched in this run; choose one of loss, evaluation/NAME"),
        ("no such source", "the metric validation/x cannot be watched in this run; choose one of loss"),
        ("no metric", "the metric lr cannot be watched in this run"),
        ("no number", "the callback NoNumber.evaluate returned 'high' under 'quality', which is no number: ValueError: could not"),
        ("twice", "two callbacks measure 'given'; give one of the numbers another name"),
    ],
)
def test_what_is_never_logged_or_no_number_is_refused(pool, config_file, made, line):
    [(code, printed)] = pool.launch(1, run_extended, made, str(config_file))
    assert code == 2 and line in printed and "Traceback" not in printed


class Misnamed(Callback):
    def on_recrod(self, run: RunHandle, record: StepRecord) -> None:
        raise AssertionError("never called")


class OfAnotherLibrary(Callback):
    def on_train_end(self, run: RunHandle) -> None:
        raise AssertionError("never called")


class Evaluates(Callback):
    def evalute(self, run: RunHandle, step: int) -> dict[str, float]:
        raise AssertionError("never called")


class SinkWithoutWrite(Sink):
    def wirte(self, record: StepRecord) -> None:
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("callbacks", "sinks", "says"),
    [
        (None, [], "main(callbacks=None) is not a list; write callbacks=[...]"),
        (Given(), [], "is not a list; write callbacks=[...]"),
        ([Given], [], "main(callbacks=[...]): Given is a class; write Given(...), which makes one"),
        ([FailingSink()], [], "is not a Callback; derive its class from Callback of pretrain.train.callbacks"),
        ([], [Given()], "is not a Sink; derive its class from Sink of pretrain.observe.sinks"),
        ([Misnamed()], [], "Misnamed.on_recrod is never called by a run; the nearest that it calls is on_record"),
        ([OfAnotherLibrary()], [], "OfAnotherLibrary.on_train_end is never called by a run; it calls start, evaluate, on_record"),
        ([Evaluates()], [], "Evaluates would do nothing in a run: define one of start, evaluate, on_record, on_save, close (it has evalute)"),
        ([], [SinkWithoutWrite()], "SinkWithoutWrite would do nothing in a run: define write (it has wirte)"),
    ],
)
def test_what_a_run_would_never_call_is_refused_before_it_starts(config_file, callbacks, sinks, says):
    """A misspelled method was ignored, a class was `type.start: TypeError`, and None a traceback."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["--config", str(config_file), "--check"], callbacks, sinks)
    assert code == 2 and says in printed.getvalue() and printed.getvalue().count("\n") == 1
    assert not (config_file.parent / "runs").exists()


def test_what_is_no_method_may_have_any_name():
    class Flagged(Given):
        on_gpu = False
        on_time = property(lambda self: True)

    assert len(Extensions([Flagged()]).callbacks) == 1


class Returning(Callback):
    def __init__(self, value: object) -> None:
        self.value = value

    def evaluate(self, run: RunHandle, step: int) -> object:
        return self.value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3.0, "the callback Returning.evaluate returned 3.0; return numbers by name, such as {'accuracy': 0.5}, or {}"),
        ({3: 1.0}, "returned a number under 3; its name must be a str that is not empty"),
        ({"": 1.0}, "returned a number under ''; its name must be a str that is not empty"),
        ({"a": torch.ones(2)}, "returned tensor([1., 1.]) under 'a', which is no number: "),
        ({"a": 1.0, "b": None}, "returned None under 'b', which is no number: TypeError: "),
    ],
)
def test_what_evaluate_returns_is_named_if_it_is_no_number_by_name(value, says):
    """A name that is no str was a traceback of metrics.py on the main rank alone, after the step was saved."""
    run = SimpleNamespace(mesh=SimpleNamespace(ranks=SimpleNamespace(world_size=1, rank=0)))
    called = Callbacks([Returning(value)], run)
    assert called.evaluate(1) == {} and says in str(called.problem) and isinstance(called.problem, ConfigError)
    assert Callbacks([Returning({"a": torch.ones(()), "b": True})], run).evaluate(1) == {"a": 1.0, "b": 1.0}


def test_every_number_of_validation_and_translation_can_be_watched():
    """e34: ema_validation/v and translation/v/bleu were refused as never logged, though they are."""
    config = Config(
        data=Data(validation=[ValidationSource(name="v"), ValidationSource(name="w")]),
        optim=Optim(ema_decay=0.9),
        validation=Validation(translation=Translation(every_steps=1)),
    )
    scores = {"bleu": 20.0, "chrf": 40.0, "cer": 5.0, "wer": 6.0}
    losses = {"v": 2.0, "w": 4.0}
    record = StepRecord(
        1, 1, loss=5.0, validation=losses, ema_validation=losses, bits_per_byte=losses, translation={"v": scores, "w": scores}
    )
    for metric, value in (
        ("loss", 5.0),
        ("validation", 3.0),
        ("ema_validation", 3.0),
        ("ema_validation/v", 2.0),
        ("bits_per_byte/w", 4.0),
        ("translation/w/chrf", 40.0),
    ):
        watched = Watched(metric, "min")
        watched.check(config)
        assert watched.of(record) == value
    for metric in ("translation", "translation/v", "ema_validation/x", "evaluation/"):
        with pytest.raises(ConfigError, match=f"the metric {metric} cannot be watched in this run; choose one of validation, "):
            Watched(metric, "min").check(config)


def test_a_metric_that_nobody_measured_is_said_at_the_end(pool, config_file):
    [(code, printed)] = pool.launch(1, run_extended, "never measured", str(config_file), "run.steps=2")
    assert code == 0 and "KeepBest did nothing: no record of this start has evaluation/typo" in printed


def test_ranks_with_other_callbacks_are_refused_before_the_first_step(pool, config_file):
    results = pool.launch(2, run_extended, "one rank's own", str(config_file), "parallel.strategy=ddp")
    assert [code for code, _ in results] == [2, 2], results
    assert "callback 0" in results[0][1] and "Given" in results[0][1] and "Failing" in results[0][1]
    assert not (config_file.parent / "runs" / "run" / "metrics.jsonl").exists()


# ---- multiple choice ----------------------------------------------------------------------------------------------------


def write_questions(folder: Path) -> Path:
    """Questions of letters, with choices of several lengths."""
    words = ["abc", "bcda", "aab", "cabb", "dd", "bca"]
    lines = [
        {
            "question": " ".join(words[i : i + 2]),
            "choices": [words[(i + k) % 6] * (1 + k % 2) for k in range(2 + i % 3)],
            "answer": i % 2,
        }
        for i in range(5)
    ]
    (folder / "letters.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "letters.jsonl"


def run_multiple_choice(file: str, config_file: str, *overrides: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["--config", config_file, *overrides], callbacks=[MultipleChoice(file, every_steps=4)])
    return code, printed.getvalue()


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ()),
        (2, ("parallel.strategy=fsdp",)),
        (2, ("parallel.strategy=fsdp", "parallel.pipeline=2")),
        (2, ("parallel.strategy=fsdp", "parallel.tensor=2")),
    ],
    ids=["one process", "FSDP2", "pipeline", "tensor"],
)
def test_choices_are_those_of_the_saved_model_under_any_layout(pool, config_file, tmp_path, ranks, layout):
    file = write_questions(tmp_path)
    results = pool.launch(
        ranks,
        run_multiple_choice,
        str(file),
        str(config_file),
        *SHORT,
        "checkpoint.every_steps=4",
        "checkpoint.keep_last=0",
        *layout,
    )
    assert all(code == 0 for code, _ in results), results
    run = config_file.parent / "runs" / "run"
    measured = {r["step"]: r["evaluation"] for r in read_metrics(run) if "evaluation" in r}
    assert list(measured) == [4, 8]
    for step, numbers in measured.items():
        opened = open_model(run / "checkpoints" / f"step-{step:08d}")
        right = mean_right = chance = 0.0
        questions = [json.loads(line) for line in file.read_text().splitlines()]
        for question in questions:
            context = [opened.tokenizer.eod_id, *opened.tokenizer.encode(question["question"])]
            choices = [opened.tokenizer.encode(" " + choice) for choice in question["choices"]]
            scores = [value for value, _ in Scorer(opened, 32).log_likelihoods([(context, choice) for choice in choices])]
            means = [value / len(choice) for value, choice in zip(scores, choices)]
            right += scores.index(max(scores)) == question["answer"]
            mean_right += means.index(max(means)) == question["answer"]
            chance += 1 / len(choices)
        expected = [right / 5, mean_right / 5, (right / 5 - chance / 5) / (1 - chance / 5)]
        assert list(numbers.values()) == pytest.approx(expected) and list(numbers) == [
            "letters",
            "letters mean",
            "letters centred",
        ]


def test_a_question_may_have_any_line_separator_of_unicode_in_it(byte_tokenizer, tmp_path):
    """Its line was cut there, and was no object."""
    line = json.dumps({"question": "a\u2028b\u0085c", "choices": ["b", "c"], "answer": 0}, ensure_ascii=False)
    (tmp_path / "letters.jsonl").write_text(f"{line}\r\n{line}\n", encoding="utf-8")
    assert len(read_questions(tmp_path / "letters.jsonl", load_tokenizer(byte_tokenizer), 0)) == 2


def test_multiple_choice_of_every_0_steps_is_an_error_of_one_line(config_file):
    """e19: it was a ZeroDivisionError after the first step."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["--config", str(config_file), *SHORT], callbacks=[MultipleChoice("letters.jsonl", every_steps=0)])
    assert code == 2 and "error: MultipleChoice: every_steps=0 must be at least 1\n" in printed.getvalue()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "a", "choices": ["b"], "answer": 0}', "letters.jsonl:1: no object"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "letters.jsonl:1: no object"),
        ('{"question": "a", "choices": "bc", "answer": 0}', "letters.jsonl:1: no object"),
        ('{"question": "a", "choices": {"b": 1, "c": 2}, "answer": 0}', "letters.jsonl:1: no object"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 0.5}', "letters.jsonl:1: no object"),
        ('{"question": "a", "choices": ["b", "c"], "answer": true}', "letters.jsonl:1: no object"),
        ('{"question": "a", "choices": ["b", "\\ud800"], "answer": 0}', "letters.jsonl:1: the text holds a lone surrogate"),
        ("", "has no question in it"),
        pytest.param(json.dumps({"question": "a" * 99, "choices": ["b", "c"], "answer": 0}), "more than data.sequence_length=32", id="too long"),
    ],
)
def test_questions_that_cannot_be_asked_are_errors_of_one_line(config_file, tmp_path, text, says):
    (tmp_path / "letters.jsonl").write_text(text)
    code, printed = run_multiple_choice(
        str(tmp_path / "letters.jsonl"), str(config_file), "run.steps=1", "schedule.warmup_steps=0"
    )
    assert code != 0 and says in printed and "Traceback" not in printed
