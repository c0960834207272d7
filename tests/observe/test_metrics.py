"""Numbers of a run: written once, read back even after a crash, and shown to people."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import pty
import shutil
import tracemalloc
from pathlib import Path

import pytest
from running import tool

from pretrain.config.schema import Config
from pretrain.errors import DataError
from pretrain.observe.logs import ConsoleHandler
from pretrain.observe.metrics import METRICS_FILE, StepRecord, duration, known_records, read_metrics
from pretrain.observe.report import _smoothed, draw, summary
from pretrain.observe.sinks import Console, JsonLines, Sink, Sinks, TensorBoard, progress_line

ROOT = Path(__file__).resolve().parents[2]


def record(step: int, loss: float, **more) -> StepRecord:
    numbers = {"grad_norm": 0.5, "lr": 1e-3, "tokens_per_second": 12_345.0 + step, "seconds": 0.3, **more}
    return StepRecord(step, step * 4096, loss, **numbers)


def sinks_of(directory: Path, *sinks: Sink, step: int = 0, yours: tuple[Sink, ...] = ()) -> Sinks:
    return Sinks([JsonLines(), *sinks], yours, directory, Config(), step)


@pytest.fixture
def run(tmp_path) -> Path:
    sinks = sinks_of(tmp_path)
    for step in range(10, 60, 10):
        more = {"validation": {"books": 6.0 - step / 50, "code": 3.0}} if step in (20, 40) else {}
        sinks.write(record(step, 7.0 - step / 20, **more))
    sinks.close()
    return tmp_path


def test_records_are_read_back_as_they_were_written(run):
    assert [r["step"] for r in read_metrics(run)] == [10, 20, 30, 40, 50]
    assert read_metrics(run)[1] == record(20, 6.0, validation={"books": 5.6, "code": 3.0}).to_dict()


def test_what_a_run_logged_before_it_went_back_to_an_earlier_step_is_dropped(run):
    sinks = sinks_of(run)
    sinks.write(record(30, 1.25))
    sinks.write(record(40, 1.0))
    sinks.close()
    assert len((run / METRICS_FILE).read_text().splitlines()) == 7
    assert [(r["step"], r["loss"]) for r in read_metrics(run)] == [(10, 6.5), (20, 6.0), (30, 1.25), (40, 1.0)]


def test_tensorboard_shows_the_configuration_and_every_number_that_is_known(tmp_path):
    """CL-5: the configuration of each start stands beside the curves; `mfu` is a curve where the device's peak is known."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, rate in ((1, "1e-3"), (3, "2e-3")):
        (tmp_path / "config.yaml").write_text(f"optim:\n  lr: {rate}\n")
        sinks = sinks_of(tmp_path, TensorBoard(), step=first - 1)
        for step in (first, first + 1):
            sinks.write(record(step, 7.0 - step, mfu=None if step == 1 else 0.25))
        sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("config/text_summary")]
    assert shown == ["    optim:\n      lr: 1e-3", "    optim:\n      lr: 2e-3"]
    assert [event.step for event in events.Scalars("mfu")] == [2, 3, 4]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


def test_a_torn_last_line_is_passed_over(run):
    with (run / METRICS_FILE).open("a") as file:
        file.write(json.dumps(record(60, 4.0).to_dict())[:37])
    assert [r["step"] for r in read_metrics(run)] == [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe{}", b"null", b"{}", b"5", b"[1]", b'{"step": "60"}', b'{"step": null}', b'{"step": true}', b"[" * 100_000,
     b'{"step": 60, "loss": "4"}', b'{"step": 60, "validation": null}', b'{"step": 60, "validation": {"v": [1]}}', b'{"step": 60, "lr": NaN}'],
    ids=lambda line: line[:12].decode(errors="replace"),
)
def test_a_line_that_is_no_record_is_passed_over(run, line):
    """F4: whoever read the log of metrics failed with a traceback: UnicodeDecodeError, TypeError, KeyError or RecursionError."""
    with (run / METRICS_FILE).open("ab") as file:
        file.write(line + b"\n")
    assert [r["step"] for r in read_metrics(run)] == [10, 20, 30, 40, 50]
    assert [(r.step, r.loss) for r in known_records(run, 45)] == [(10, 6.5), (20, 6.0), (30, 5.5), (40, 5.0)]


def test_numbers_in_a_list_that_are_not_finite_are_null(tmp_path):
    """F4: a list with NaN, read back from the log, ended a run with "Out of range float values are not JSON compliant"."""
    sinks = sinks_of(tmp_path)
    sinks.write(record(1, 2.0, experts={"1": [math.nan, 2.0]}))
    sinks.close()
    assert read_metrics(tmp_path) == [record(1, 2.0, experts={"1": [None, 2.0]}).to_dict()]


def test_what_is_written_after_a_torn_line_is_not_lost(run):
    with (run / METRICS_FILE).open("a") as file:
        file.write(json.dumps(record(60, 4.0).to_dict())[:37])
    sinks = sinks_of(run)
    sinks.write(record(60, 3.5))
    sinks.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(run)][-1] == (60, 3.5)


def test_every_record_is_on_disk_as_soon_as_it_is_written(tmp_path):
    sinks = sinks_of(tmp_path)
    sinks.write(record(1, 2.0))
    assert read_metrics(tmp_path) == [record(1, 2.0).to_dict()]
    sinks.close()


@dataclasses.dataclass
class Server(Sink):
    """A sink of a user's, which cannot be hashed: its server refuses the first connections."""

    refusals: int
    said: list = dataclasses.field(default_factory=list)

    def open(self, directory, config, step):
        self.refusals -= 1
        if self.refusals >= 0:
            raise ConnectionError("refused")
        self.said.append("open")

    def write(self, record):
        self.said.append(record.step)

    def close(self):
        self.said.append("close")


def test_a_sink_that_could_not_be_opened_is_closed_and_opened_before_its_next_record(tmp_path, caplog):
    back, away = Server(2), Server(9)
    sinks = sinks_of(tmp_path, yours=(back, away))
    for step in (1, 2):
        sinks.write(record(step, 2.0))
    sinks.close()
    assert back.said == ["close", "close", "open", 2, "close"] and away.said == ["close"] * 3
    assert sum("the sink Server: is written again; lines that were lost: 2" in line for line in caplog.messages) == 1
    assert sum("the sink Server: could not be written to the end" in line for line in caplog.messages) == 1


def test_tensorboard_gets_the_same_numbers_with_nested_ones_by_path(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = sinks_of(tmp_path, TensorBoard())
    sinks.write(record(10, 2.5, validation={"books": 3.5}))
    sinks.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    scalars = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert scalars["loss"] == [(10, 2.5)]
    assert scalars["validation/books"] == [(10, 3.5)]
    assert scalars["tokens"] == [(10, 40960)]
    assert not {"step", "mfu"} & scalars.keys()


def test_a_step_on_the_console():
    line = progress_line(record(20, 3.14159, grad_norm=0.51234, lr=2e-4, tokens_per_second=12_365.0, seconds_left=3725), 1000)
    assert line == "step   20/1000  loss 3.1416  grad 0.512  lr 2.00e-04  12.4k tok/s  eta 1h02m"
    full = progress_line(
        record(1000, 3.0, mfu=0.4321, tokens_per_second=2.5e6, validation={"books": 2.0}, seconds_left=0), 1000
    )
    assert full == (
        "step 1000/1000  loss 3.0000  grad 0.500  lr 1.00e-03  2.5M tok/s  mfu 43.2%  validation books 2.0000  eta 0s"
    )


def shown(terminal: bool) -> str:
    """What a terminal, or a file, gets of a short run."""
    controller, stream = pty.openpty() if terminal else os.pipe()
    handler = ConsoleHandler(os.fdopen(stream, "w"))
    logger = logging.getLogger("pretrain")
    before, level = logger.handlers[:], logger.level
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    try:
        console = Console()
        console.steps = 40
        for step in (1, 10, 20, 30):
            console.write(record(step, 7.0 - step / 10, validation={"books": 3.0} if step == 20 else None))
        logging.getLogger("pretrain.test").warning("a warning")
        console.write(record(35, 3.5))
        console.close()
    finally:
        logger.handlers[:] = before
        logger.setLevel(level)
    handler.stream.close()
    text = b""
    with contextlib.suppress(OSError):  # a terminal whose other end is closed
        while part := os.read(controller, 10_000):
            text += part
    os.close(controller)
    return text.decode()


def test_one_line_is_renewed_on_a_terminal_and_what_was_evaluated_stays():
    stands = [line.split("\r\x1b[K") for line in shown(terminal=True).replace("\r\n", "\n").split("\n")[:-1]]
    assert [[part.split("  loss")[0] for part in line] for line in stands] == [
        ["step  1/40"],
        ["step 10/40", "step 20/40"],
        ["step 30/40", "a warning"],
        ["step 35/40"],
    ]


def test_elsewhere_every_line_is_plain():
    lines = shown(terminal=False).splitlines()
    assert len(lines) == 6 and not any("\x1b" in line or "\r" in line for line in lines)


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (90_061, "25h01m"),
        (math.inf, "-"),
        (math.nan, "-"),
    ],
)
def test_a_time_as_a_person_says_it(seconds, text):
    assert duration(seconds) == text


def test_a_summary_has_first_and_last_loss_the_last_validation_and_the_median_speed(run):
    assert summary(run).splitlines() == [
        "state              unknown",
        "steps              50",
        "tokens             204,800",
        "loss               6.5000 -> 4.5000 nats per token (steps 10 to 50)",
        "validation, books  5.2000 nats per token at step 40",
        "validation, code   3.0000 nats per token at step 40",
        "speed              12,375 tokens per second (median)",
        "starts             1",
        "time               15s",
    ]


def test_several_runs_are_compared_in_one_picture(run, tmp_path, capsys):
    """Newcomer: of two runs the last one was taken without a word."""
    other = shutil.copytree(run, tmp_path / "other")
    assert tool("report").main([str(run), str(other), "--output", str(tmp_path / "both.png")]) == 0
    said = capsys.readouterr().out
    assert f"{run}:\nstate  " in said and f"{other}:\nstate  " in said
    assert (tmp_path / "both.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    draw([run], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "both.png").read_bytes()


def test_a_name_with_dollars_is_no_formula(run, tmp_path):
    """matplotlib read what stands between two $ as TeX, and ended with ParseException."""
    named = shutil.copytree(run, tmp_path / "cost $x_^$")
    draw([named], tmp_path / "one.png")
    draw([named, run], tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 1000


def test_the_loss_curve_is_drawn(run, tmp_path):
    draw([run], tmp_path / "loss.png")
    content = (tmp_path / "loss.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")
    assert (width, height) == (864, 480)
    import numpy as np
    from matplotlib import image

    pixels = image.imread(tmp_path / "loss.png")[..., :3]
    for colour in ((0x3B, 0x6E, 0xA5), (0xD1, 0x66, 0x2F)):  # training and validation
        assert (np.abs(pixels - np.array(colour) / 255).max(axis=-1) < 0.02).sum() > 100


def test_a_long_curve_is_smoothed_in_time_and_memory_of_its_length():
    """Every window was a list of its own: 8 GB for 100,000 lines."""
    few = [float(i % 7) for i in range(45)]
    assert _smoothed(few)[:4] == pytest.approx([few[0], sum(few[:3]) / 3, sum(few[:5]) / 5, sum(few[1:6]) / 5])
    values = [math.sin(i / 900) + 3 for i in range(20_000)]
    tracemalloc.start()
    found = _smoothed(values)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    assert found[0] == values[0] and found[7_777] == pytest.approx(sum(values[6_777:8_778]) / 2_001, rel=1e-12)


def test_the_report_tool_prints_and_draws(run, capsys):
    assert tool("report").main([str(run), "--output", str(run / "curve.png")]) == 0
    printed = capsys.readouterr().out
    assert "6.5000 -> 4.5000 nats per token (steps 10 to 50)" in printed
    assert (run / "curve.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "content, problem", [(None, "missing"), ("", "no step was logged yet"), ('{"step": 1', "no step was logged yet")]
)
def test_a_run_without_numbers_is_named(tmp_path, capsys, content, problem):
    if content is not None:
        (tmp_path / METRICS_FILE).write_text(content)
    with pytest.raises(DataError, match=f"{METRICS_FILE}: {problem}"):
        summary(tmp_path)
    assert tool("report").main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / METRICS_FILE}: {problem}")
