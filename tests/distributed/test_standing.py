"""The sentences about ranks, made of plain values."""

from pretrain.distributed.standing import Mark, Standing, awaited, culprits, describe, hung, listing, numbers, verdict

STEP = "step 17: forward and backward"
REPORT = {"name": "start of step 18", "number": 40, "waiting": True, "timed_out": True, "seconds": 600, "reason": "Timed out"}


def standing(rank: int, number: int = 40, name: str = "start of step 18", waiting: bool = True, **values) -> Standing:
    return Standing(rank, f"host{rank // 8}", 100 + rank, came=True, mark=Mark(number, name, waiting), seconds=12.0, **values)


def test_runs_of_ranks_are_shortened():
    assert numbers([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
    assert numbers(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more stretches"


def test_a_thousand_ranks_are_one_readable_line():
    """OP-6.2: a sentence stays one, however many ranks it is about."""
    missing = [Standing(rank) for rank in range(1, 1000)]
    assert listing(missing) == "ranks 1-999 are missing"
    late = [standing(rank, 39, STEP, waiting=False) for rank in range(8, 1000)]
    line = listing(late)
    assert line.startswith(f"rank 8 (host1) has been in '{STEP}' for 12 s; rank 9 (host1) has been in") and len(line) < 300
    assert line.endswith("; 989 more like them (ranks 11-999)")


def test_what_is_known_of_a_rank():
    assert describe(Standing(2)) == "rank 2 is missing"
    assert (
        describe(standing(2, gone=True))
        == "rank 2 (host0) is gone without a word (killed?), last seen waiting at 'start of step 18'"
    )
    assert describe(standing(2, left="disk full")) == "rank 2 (host0) has ended: disk full"
    assert describe(standing(2, left="rank 2 (host0) has optim.lr=1")) == "rank 2 (host0) has optim.lr=1"
    assert "does not answer (stopped, or its host or network is down), last seen in" in describe(
        standing(2, 39, STEP, False, silent=True)
    )


def test_those_who_have_come_are_not_awaited():
    ranks = [standing(0), standing(1, 39, STEP, False), standing(2, silent=True), standing(3, gone=True)]
    assert [s.rank for s in awaited(ranks, 40)] == [1, 2, 3]


def test_the_surest_cause_is_blamed():
    """T-D7: a rank that waits, or whose own connection broke off because of another's, is not to blame."""
    waiting, broken = standing(0, broken=True), standing(1, broken=True)
    late, silent = standing(2, 39, STEP, False), standing(3, silent=True)
    gone, failed = standing(4, gone=True), standing(5, left="disk full", left_alone=True)
    mark = Mark(40, "start of step 18", True)
    everyone = [waiting, broken, late, silent, gone, failed]
    for expected in (failed, gone, silent, late):
        assert culprits(everyone, mark) == [expected]
        everyone.remove(expected)
    assert culprits(everyone, mark) == []
    assert verdict(everyone, REPORT, None) == (
        "'start of step 18' failed between ranks that are all there: Timed out; look at the network between the hosts"
    )
    # In one part of a step, those that notice nothing are the ones to look at.
    part = [standing(0, 40, STEP, False, broken=True), standing(1, 40, STEP, False)]
    assert [s.rank for s in culprits(part, Mark(40, STEP, False))] == [1]


def test_a_verdict_names_operation_limit_rank_host_and_log():
    """T-D7: the line that every rank ends with."""
    line = verdict([standing(0, broken=True), standing(1, 39, STEP, False)], REPORT, "runs/x/logs")
    assert line == (
        "'start of step 18' was not reached by every rank within 600 s (parallel.timeout_seconds): rank 1 (host0) has been in "
        f"'{STEP}' for 12 s; look at runs/x/logs/rank-1.log"
    )


def test_a_run_hangs_only_if_nobody_who_is_waited_for_does_anything():
    """T-D7: never end a run that is merely slow."""
    waits = standing(0, idle=300.0)
    busy, idle = standing(1, 39, STEP, False, idle=0.5), standing(2, 39, STEP, False, idle=61.0)
    assert hung([waits, busy, idle], 60) == []
    assert hung([waits, idle], 60) == [idle]
    assert hung([waits, idle, standing(3, 39, STEP, False, silent=True, unheard=12.0)], 60) != []
    assert hung([waits, idle, standing(3, 39, STEP, False, silent=True, unheard=3.0)], 60) == []  # held up, perhaps
    assert hung([waits, standing(1, idle=300.0)], 60) == []  # all at one operation: the network may come back
    # The rank that was waited for has come, and has gone on to the next operation before the others answered.
    assert hung([waits, standing(1, 41, "tensors of a checkpoint")], 60) == []
