"""The table of what all ranks do, and the time that each works for itself: plain values, without a run."""

from __future__ import annotations

import json
import time

from pretrain.distributed import roll_call
from pretrain.distributed.monitor import Monitor
from pretrain.distributed.pace import Pace
from pretrain.distributed.roll_call import roll
from pretrain.distributed.standing import Mark, Standing


def work(seconds: float) -> None:
    """Keep a processor busy for these seconds of its time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def standing(rank: int, number: int = 40, name: str = "start of step 18", waiting: bool = True, **values) -> Standing:
    mark = Mark(number, name, waiting, exchanges=values.pop("exchanges", False), past=values.pop("past", False))
    return Standing(rank, f"node-{rank // 8}", came=True, mark=mark, **{"heard": 100.0, "step": 18, "own": 0.5, **values})


def test_phases_are_told_in_words_and_those_who_wait_say_for_whom():
    table = roll(
        [
            standing(0),
            standing(1, 39, "step 18: next batch", False, own=0.7),
            standing(2),
            standing(3, 39, "step 17: forward and backward", False, exchanges=True, idle=5.0),
            standing(4, 39, "optimizer of step 17", False),
            standing(5, 39, "loads of experts in step 17", False, past=True),
            standing(6, gone=True),
            standing(7, heard=90.0, own=None),
        ],
        101.0,
    )
    behind = "waiting for ranks 1, 3-6"
    assert [entry["phase"] for entry in table["ranks"]] == [
        behind,
        "waiting for data",
        behind,
        "forward and backward, where it waits for others",
        "optimizer",
        "end of the step",
        "gone without a word (killed?)",
        behind,
    ]
    assert table["phases"][behind] == 3 and table["awaited"] == "1, 3-6" and table["own_median"] == 0.5
    assert [entry["heard"] for entry in table["ranks"]] == [1.0] * 7 + [11.0]


def test_where_all_have_come_nobody_is_awaited():
    table = roll([standing(0), standing(1)], 100.0)
    assert table["awaited"] is None and table["phases"] == {"start of a step": 2}


def test_the_table_of_ten_thousand_ranks_is_small_and_has_the_ranks_to_look_at():
    standings = [standing(rank, own=0.5 + rank / 1e6, name=f"step 18: phase {rank}", waiting=False) for rank in range(10_000)]
    standings[77].gone, standings[78].own = True, 3.0
    begun = time.process_time()
    table = roll(standings, 100.0)
    assert time.process_time() - begun < 1.0
    assert len(json.dumps(table)) < 8_000 and len(table["ranks"]) == 16 and len(table["phases"]) == 12
    assert [entry["rank"] for entry in table["ranks"]][:3] == [77, 78, 9999]
    assert roll_call.interval(8) == 3.0 and roll_call.interval(10_000) == 100.0


def test_the_pace_leaves_out_what_a_rank_waited():
    pace = Pace()
    wait, exchange = Mark(1, "start of step 2", waiting=True), Mark(1, "forward", exchanges=True)
    begun = time.monotonic()
    for number in (1, 2, 3):
        if number == 3:
            in_a_step = (time.monotonic() - begun) / 2
        pace.begin_step(number)
        for mark in (wait, exchange):
            entered = pace.enter(mark)
            time.sleep(0.1)
            pace.leave(mark, entered)
        entered = pace.enter(exchange)
        work(0.05)
        pace.leave(exchange, entered)
        time.sleep(0.05)  # a callback: nobody else is waited for
    own = pace.own_seconds
    assert pace.step == 3 and 0.09 < own < in_a_step - 0.18  # a busy machine makes everything but the waits longer
    pace.begin_step(7)  # this is no time of one step
    assert pace.own_seconds == own


def test_calls_of_all_ranks_do_not_make_a_main_rank_busy_that_hangs():
    monitor = Monitor(0, 0, timeout_seconds=100.0)
    monitor._look(1000.0)
    spent = time.process_time()
    monitor.switchboard_seconds = lambda: time.process_time() - spent
    work(0.1)
    monitor._look(1001.0)
    assert monitor._active == 1000.0
    monitor.switchboard_seconds = lambda: 0.0
    monitor._look(1002.0)
    assert monitor._active == 1002.0
