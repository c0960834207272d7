"""What each rank does, and which one holds up the others: the table that the main rank writes, and the page that shows it."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_pool import RankProcess, start_ranks
from rich.console import Console
from running import run_main, run_main_with
from test_watch import now, shown, write_followed_run, write_status

from pretrain.distributed import roll_call
from pretrain.distributed.roll_call import roll
from pretrain.distributed.standing import Mark, Standing
from pretrain.observe import rank_file
from pretrain.observe.rank_file import RankFile
from pretrain.observe.watch import rank_parts
from pretrain.run import main
from pretrain.train.callbacks import Callback

HERE = os.uname().nodename


def work(seconds: float) -> None:
    """Keep a processor busy for these seconds of its time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


class Slow(Callback):
    """Holds up rank 1 after each step."""

    def evaluate(self, run, step):
        if run.mesh.ranks.rank == 1:
            time.sleep(0.4)
        return {}


def train_slowly(how: str, config_file: str, *overrides: str) -> int:
    """A run of two ranks in which rank 1 takes longer than rank 0: in a callback, in the forward pass, or not at all."""
    importlib.import_module("pretrain.distributed.roll_call").ROLL_SECONDS = 0.3
    if how == "forward" and os.environ["RANK"] == "1":
        from pretrain.parallel.strategy import Strategy

        real = Strategy._micro_step
        Strategy._micro_step = lambda *arguments: (work(0.1), real(*arguments))[1]
    return main(["--config", config_file, *overrides], callbacks=[Slow()] if how == "callback" else [])


@pytest.fixture
def started(tmp_path, config_file) -> Iterator[Callable[..., list[RankProcess]]]:
    """Start two ranks of which one is slow; what is left of them is killed at the end of the test."""
    ranks: list[RankProcess] = []

    def start(how: str, *overrides: str) -> list[RankProcess]:
        overrides = ("parallel.strategy=ddp", "data.workers=0", *overrides)
        ranks.extend(start_ranks(tmp_path, 2, train_slowly, how, str(config_file), *overrides))
        return ranks

    yield start
    for rank in ranks:
        rank.process.kill()


def seen(config_file: Path, condition: Callable[[str], bool], ranks: list[RankProcess], seconds: float = 90) -> str:
    """The page, as soon as it fulfils a condition."""
    run, text = config_file.parent / "runs" / "run", ""
    deadline = time.monotonic() + seconds
    while True:
        if (run / "ranks.json").is_file() and (run / "starts.jsonl").is_file():
            text = shown(run, 130)
            if condition(text):
                return text
        assert time.monotonic() < deadline, text + "".join(rank.printed() for rank in ranks)
        time.sleep(0.05)


def test_a_rank_that_is_slow_in_a_callback_is_named_with_what_it_does(started, config_file):
    ranks = started("callback", "run.steps=1000")
    file = config_file.parent / "runs" / "run" / "ranks.json"

    def is_named(text: str) -> bool:
        table = json.loads(file.read_text())
        own = [entry["own"] or 0 for entry in table["ranks"]]
        # The first steps of a busy machine are long on both.
        is_told_apart = own[1] > 0.4 and own[1] - own[0] > 0.3 and table["own_median"] == own[0]
        return is_told_apart and f"rank 1 ({HERE}) holds up the others" in text and "waiting for rank 1" in text

    text = seen(config_file, is_named, ranks)
    zero, one = (next(line for line in text.splitlines() if line.startswith(f"│    {rank}  ")) for rank in (0, 1))
    assert "waiting for rank 1" in zero and "callbacks of a step" in one


def test_a_rank_that_computes_for_longer_is_named_though_all_arrive_together(started, config_file):
    """The others wait for it inside the exchange of gradients, where they sleep."""
    ranks = started("forward", "run.steps=1000")
    said = f"rank 1 ({HERE}) holds up the others", "forward and backward"
    seen(config_file, lambda text: all(part in text for part in said), ranks)


def test_a_rank_that_is_stopped_does_not_answer_and_answers_again_when_it_goes_on(started, config_file):
    ranks = started("nothing", "run.steps=100000")
    seen(config_file, lambda text: "own work" in text and "forward and backward" in text, ranks)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    text = seen(config_file, lambda text: "no answer for" in text, ranks)
    line = next(line for line in text.splitlines() if "no answer for" in line)
    assert line.startswith("│    1  ") and "; last: " in line
    os.kill(ranks[1].pid, signal.SIGCONT)
    seen(config_file, lambda text: "no answer for" not in text, ranks)
    os.kill(ranks[0].pid, signal.SIGTERM)
    assert ranks[0].wait(60) == 0 and ranks[1].wait(60) == 0


def run_main_called_often(config_file: str, *overrides: str) -> tuple[int, str]:
    return run_main_with(roll_call, "ROLL_SECONDS", 0.05, config_file, *overrides)


def test_a_table_that_cannot_be_written_is_a_warning_and_the_run_goes_on(pool, config_file, tmp_path):
    (config_file.parent / "runs" / "run" / "ranks.json").mkdir(parents=True)
    results = pool.launch(2, run_main_called_often, str(config_file), "parallel.strategy=ddp")
    assert [code for code, _ in results] == [0, 0], results
    assert results[0][1].count("ranks.json: cannot be written: Is a directory; the run goes on") == 1
    status = json.loads((config_file.parent / "runs" / "run" / "status.json").read_text())
    assert status["state"] == "finished" and status["step"] == 20


def test_storage_that_hangs_holds_up_nobody_who_tells_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_file, "replace_text", lambda *arguments, **options: time.sleep(30))
    file = RankFile(tmp_path)
    begun = time.monotonic()
    for _ in range(100):
        file.put({"ranks": []})
    file.close(seconds=0.1)
    assert time.monotonic() - begun < 15
    file.put({"ranks": []})  # after the end nothing is taken


def test_a_run_of_one_process_has_no_table(pool, config_file):
    [(code, _)] = pool.launch(1, run_main, str(config_file), "run.steps=2")
    assert code == 0 and not (config_file.parent / "runs" / "run" / "ranks.json").exists()


# ---- the page -------------------------------------------------------------------------------------------------------------


def standing(rank: int, number: int = 40, name: str = "start of step 18", waiting: bool = True, **values) -> Standing:
    mark = Mark(number, name, waiting, exchanges=values.pop("exchanges", False), past=values.pop("past", False))
    return Standing(rank, f"node-{rank // 8}", came=True, mark=mark, **{"heard": 100.0, "step": 18, "own": 0.5, **values})


def text_of(table: dict, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    for part in rank_parts(table, width):
        console.print(part)
    return console.export_text()


def table_of(standings: list[Standing], back: float = 0.0) -> dict:
    return {"updated": now(back), **roll(standings, 100.0)}


def test_a_table_that_is_old_is_said_to_be():
    text = text_of(table_of([standing(0), standing(1, 39, own=9.0)], back=600))
    assert "2 ranks as they were 10m" in text and "nothing newer is known" in text and "holds up" not in text


def test_of_many_ranks_the_page_counts_phases_and_shows_the_worst():
    standings = [standing(rank) for rank in range(1000)]
    standings[500] = standing(500, 39, "callbacks of a step", False, own=2.0)
    standings[7].gone = True
    lines = text_of(table_of(standings)).splitlines()
    assert lines[0] == "1,000 ranks, 0.500 s of own work in a step (median)"
    assert lines[1].split() == ["998", "waiting", "for", "ranks", "7,", "500"]
    assert [line.split()[0] for line in lines[5:7]] == ["7", "500"] and "gone without a word" in lines[5]
    assert "rank 500 (node-62) holds up the others: it works 2.000 s for itself in a step" in " ".join(lines[-2:])
    assert len(lines) <= 12


@pytest.fixture
def run(tmp_path):
    return write_followed_run(tmp_path)


@pytest.mark.parametrize("state", ["running", "finished"])
def test_ranks_are_shown_while_a_run_lives(run, state):
    write_status(run, state=state, updated=now(), host="node-a", pid=17)
    (run / "ranks.json").write_text(json.dumps(table_of([standing(0), standing(1)])))
    assert ("2 ranks, 0.500 s of own work" in shown(run)) == (state == "running")


def test_a_start_is_shown_before_it_has_a_record(run):
    (run / "starts.jsonl").unlink()
    (run / "ranks.json").write_text(
        json.dumps(table_of([standing(0, 3, "construction of the model", False, step=0, own=None)] * 2))
    )
    text = shown(run)
    assert "starting" in text and text.count("construction of the model") == 2


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_page_fits_the_terminal_and_cuts_no_number(run, width):
    write_status(run, updated=now(), host="a-host-with-a-long-name.of-a-cluster.example", pid=1234567)
    standings = [standing(rank, own=0.1) for rank in range(8)]
    standings[3] = standing(3, 39, "callbacks of a step", False, own=1.25, step=123_456, seconds=4000)
    for one in standings:
        one.host = "a-host-with-a-long-name.of-a-cluster.example"
    (run / "ranks.json").write_text(json.dumps(table_of(standings)))
    text = shown(run, width)
    lines = text.splitlines()
    assert {len(line) for line in lines} == {width}
    row = next(line for line in lines if line.startswith("│    3  "))
    assert "123,456" in row and "callbacks of a step" in row and "1h06m" in row and "1.250 s" in row
    assert "step 100 of 200" in text and "50.0%" in text and "8.0000" in text and "gradient norm" in text
    assert len(lines) < 45
    low = shown(run, width, height=24)
    assert len(low.splitlines()) <= 24 and "4.0000 at step 100" in low and row in low.splitlines() and "last checkpoint" in low
