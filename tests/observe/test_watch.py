"""The terminal page of a run under way."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
from rich.console import Console
from running import tool
from test_report_page import write_run

from pretrain.errors import DataError
from pretrain.observe import followed_log
from pretrain.observe.followed_log import FollowedLog
from pretrain.observe.metrics import METRICS_FILE, read_metrics
from pretrain.observe.watch import MOST_LOGS, page


def shown(run, width: int = 100, height: int | None = None) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    console.print(page(run, width, height))
    return console.export_text()


def write_status(run, **values) -> None:
    (run / "status.json").write_text(
        json.dumps({"state": "running", "step": 100, "reason": None, "checkpoint": None, **values})
    )


def now(back: float = 0.0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - back))


def write_followed_run(folder: Path) -> Path:
    """A run of 200 steps that has made 100."""
    run = write_run(folder)
    text = (run / "starts.jsonl").read_text()
    more = {"run": {"steps": 200}, "parallel": {"strategy": "ddp"}}
    lines = [json.loads(line) for line in text.splitlines()]
    (run / "starts.jsonl").write_text("".join(json.dumps(line | {"config": line["config"] | more}) + "\n" for line in lines))
    return run


@pytest.fixture
def run(tmp_path):
    return write_followed_run(tmp_path)


def test_the_page_says_how_far_a_run_is_and_how_it_does(run):
    write_status(run, updated=now(), host="node-a", pid=17)
    text = shown(run)
    assert "running" in text and "is it still alive" not in text
    assert "step 100 of 200" in text and "50.0%" in text
    assert "8.0000" in text and "tokens/s" in text and "10.0%" in text  # the loss, the wait for data
    assert "4.0000 at step 100" in text and "2 ranks (ddp), main rank on node-a, process 17; start 2" in text
    assert any(bar in text for bar in "▁▂▃▄▅▆▇█")


@pytest.mark.parametrize("config", [{}, {"config": None}, {"config": {"run": {"steps": "7"}, "parallel": {"strategy": "ddp"}}}])
def test_a_start_without_its_configuration_is_named(run, config):
    (run / "starts.jsonl").write_text(json.dumps({"step": 0} | config) + "\n")
    with pytest.raises(DataError, match=r"starts\.jsonl: the last start has no configuration"):
        shown(run)


def test_a_name_with_brackets_is_shown_as_it_is(run):
    write_status(run, updated=now())
    named = run.rename(run.parent / "exp[red] lr[=3e-4]")
    assert "exp[red] lr[=3e-4]" in shown(named, 160).replace("\n", "")


def test_a_run_that_is_silent_is_doubted(run):
    write_status(run, updated=now(back=3600))
    assert "nothing was written for 1h00m: is it still alive?" in shown(run)
    write_status(run, updated=now(back=59))
    assert "alive" not in shown(run)
    write_status(run, state="failed", reason="rank 1 is gone", updated=now(back=3600))
    text = shown(run)
    assert "failed: rank 1 is gone" in text and "alive" not in text


def test_warnings_of_all_ranks_are_shown_in_order_of_time(run):
    write_status(run, updated=now())
    (run / "logs").mkdir()
    for rank, lines in {
        0: [
            "2026-11-23 10:00:02,000 WARNING rank 0 pretrain.x: waiting 10 s at 'start of step 17': rank 1",
            "2026-11-23 10:00:01,000 INFO rank 0 pretrain.x: no",
        ],
        1: ["2026-11-23 10:00:01,000 ERROR rank 1 pretrain.x: a [bold]shard[/bold] is damaged", "  Traceback"],
    }.items():
        (run / "logs" / f"rank-{rank}.log").write_text("\n".join(lines) + "\n")
    text = shown(run, 120)
    assert (
        text.index("rank 1 a [bold]shard[/bold] is damaged") < text.index("rank 0 waiting 10 s at")
        and " no" not in text.split("damaged")[1]
    )


def test_of_many_logs_those_are_read_that_were_written_last(run, monkeypatch):
    write_status(run, updated=now())
    (run / "logs").mkdir()
    for rank in range(200):
        log = run / "logs" / f"rank-{rank}.log"
        log.write_text(f"2026-11-23 10:00:00,{rank:03} WARNING rank {rank} pretrain.x: from rank {rank}\n")
        os.utime(log, (1e9 + (rank + 50) % 200, 1e9 + (rank + 50) % 200))  # rank 149 was the last one
    read, own = [], Path.open
    monkeypatch.setattr(Path, "open", lambda self, *mode, **more: (read.append(self.name), own(self, *mode, **more))[1])
    text = shown(run, 120)
    assert [f"from rank {rank}" in text for rank in (143, 144, 149, 150, 199)] == [False, True, True, False, False]
    assert len([name for name in read if name.startswith("rank-")]) == MOST_LOGS


def test_a_run_that_has_logged_nothing_yet_is_shown_and_a_folder_without_a_run_is_an_error(run, tmp_path, capsys):
    (run / "metrics.jsonl").unlink()
    (run / "status.json").unlink()
    assert "starting" in shown(run) and "step 0 of 200" in shown(run)
    assert tool("watch").main([str(run), "--once"]) == 0 and "starting" in capsys.readouterr().out
    with pytest.raises(DataError, match="no run has started there"):
        page(tmp_path, 80)


def test_a_time_between_looks_has_no_effect_on_one_look(run, capsys):
    with pytest.raises(SystemExit):
        tool("watch").main([str(run), "--once", "--seconds", "5"])
    assert "--seconds has no effect with --once" in capsys.readouterr().err


def test_a_followed_log_holds_what_all_of_it_says_and_reads_only_what_was_added(tmp_path, monkeypatch):
    """Each look read all lines again: of a run with 100,000, a page every 2 s took more than a core."""
    file, draw = tmp_path / METRICS_FILE, random.Random(7)
    log, step, parsed = FollowedLog(file), 0, []
    own = followed_log.record_of
    monkeypatch.setattr(followed_log, "record_of", lambda line: (parsed.append(line), own(line))[1])
    log.look()
    for number in range(300):
        step = max(0, step - draw.choice([0] * 9 + [7])) + 1
        loss = None if number % 17 == 0 else draw.random()
        record = {"step": step, "tokens": step, "loss": loss, **({"validation": {"a": loss}} if number % 11 == 0 else {})}
        line = (json.dumps(record) if number % 13 else '{"step": 3, "tok').encode() + b"\n"
        for part in (line[:9], line[9:]):  # a look may come while a line is half written
            with file.open("ab") as written:
                written.write(part)
            log.look()
        known = read_metrics(tmp_path)
        assert list(log.steps) == [r["step"] for r in known] and log.last == (known[-1] if known else None)
        assert log.newest("validation") == next(
            ({"step": r["step"], "validation": r["validation"]} for r in reversed(known) if "validation" in r), None
        )
    assert len(parsed) == 300
    file.write_text('{"step": 1, "tokens": 2}\n')  # shorter: the run was begun anew
    log.look()
    assert list(log.steps) == [1] and log.newest("validation") is None


def test_a_number_beyond_all_floats_is_no_record(run):
    """The log of metrics with such a line ended the page with an OverflowError."""
    write_status(run, updated=now())
    before = shown(run)
    with (run / METRICS_FILE).open("a") as file:
        file.write('{"step": 1' + 400 * "0" + ', "tokens": 1}\n')
    assert "step 100 of 200" in shown(run) and shown(run).count("\n") == before.count("\n")
