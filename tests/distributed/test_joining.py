"""How processes find each other, and the one line with which each problem of it ends."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from launch_pool import RankProcess, start_ranks
from running import run_changed
from test_lost_ranks import wait_until

from pretrain.distributed import channel as channel_file
from pretrain.distributed import joining, ranks
from pretrain.distributed import switchboard as switchboard_file
from pretrain.distributed.channel import PROTOCOL, VANISHED_SECONDS, Channel, hello, listen
from pretrain.distributed.inquiries import Inquiries
from pretrain.distributed.joining import Meeting
from pretrain.distributed.launcher import launched_ranks
from pretrain.distributed.monitor import Monitor
from pretrain.distributed.ranks import LAZY_RANKS, connect_lazily
from pretrain.distributed.standing import Standing
from pretrain.distributed.switchboard import Switchboard
from pretrain.errors import LaunchError
from pretrain.storage import allow_open_files

HERE = os.uname().nodename


@pytest.fixture
def started(tmp_path, config_file) -> Iterator[Callable[..., list[RankProcess]]]:
    """Start ranks of which some are changed; what is left of them is killed at the end of the test."""
    ranks: list[RankProcess] = []

    def start(changes: dict, *overrides: str, world_size: int = 2, only: tuple[int, ...] | None = None):
        ranks.extend(start_ranks(tmp_path, world_size, run_changed, changes, str(config_file), *overrides, only=only))
        return ranks

    yield start
    for rank in ranks:
        rank.process.kill()


def line_of(rank: RankProcess) -> str:
    """The one line that a rank ended with."""
    assert "Traceback" not in rank.printed(), rank.printed()
    (line,) = [line for line in rank.printed().splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


# ---- what a launcher says of ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "5"}, "RANK=5 is not in 0..1, the ranks of WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK=-1 is not in 0..1"),
        ({"RANK": "x"}, "RANK=x is not an integer"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be at least 1: it is the number of processes"),
        ({"LOCAL_RANK": "-2"}, "LOCAL_RANK=-2 is not in 0..1, the processes of a host with WORLD_SIZE=2"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 is not in 0..0, the processes of a host with LOCAL_WORLD_SIZE=1"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK=one is not an integer"),
        ({"WORLD_SIZE": None}, "the launcher set RANK, LOCAL_RANK but not WORLD_SIZE"),
        ({"RANK": None, "WORLD_SIZE": None}, "the launcher set LOCAL_RANK but not RANK, WORLD_SIZE"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be_are_refused_by_name(variables, said):
    """T-D8: RANK, LOCAL_RANK and WORLD_SIZE are checked before anything waits for anyone."""
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"} | variables
    with pytest.raises(LaunchError) as caught:
        launched_ranks({name: value for name, value in environ.items() if value is not None})
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MASTER_ADDR": None}, "the launcher set WORLD_SIZE=2 but not MASTER_ADDR; set it to the host of rank 0"),
        ({"MASTER_PORT": None}, "the launcher set WORLD_SIZE=2 but not MASTER_PORT"),
        pytest.param({"MASTER_PORT": "abc"}, "MASTER_PORT=abc is not a port", marks=pytest.mark.slow),
        pytest.param({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port", marks=pytest.mark.slow),
        ({"RANK": "5"}, "RANK=5 is not in 0..1"),
    ],
)
def test_a_wrong_variable_is_one_line_at_once_and_exit_code_2(started, variables, said):
    """T-D8: no MASTER_ADDR, a MASTER_PORT that is no number, a RANK out of range."""
    [rank] = started({1: variables}, only=(1,))
    assert rank.wait(30) == 2
    assert said in line_of(rank)


# ---- waiting ----------------------------------------------------------------------------------------------------------


def test_a_process_that_never_comes_is_named_while_the_others_wait_and_in_the_end(started):
    """T-D8, OP-5: nobody comes; a line says for whom, from the start on, and the limit is the configuration's."""
    zero, one = started({}, "parallel.join_seconds=6", world_size=3, only=(0, 1))
    began = time.monotonic()
    assert zero.wait(60) == 2 and one.wait(20) == 2
    assert time.monotonic() - began < 40
    waits = [line for line in zero.printed().splitlines() if "waiting up to" in line]
    assert 2 <= len(waits) <= 4, waits  # at 0.5, 1, 2 and 4 s: saying so is no reason to wait longer
    assert re.fullmatch(
        r"2 of 3 processes are here, rank 2 is missing; waiting up to [0-6] s more \(parallel.join_seconds\)", waits[-1]
    )
    line = line_of(zero)
    assert line == (
        "the processes of the run did not meet within 6 s (parallel.join_seconds): 2 of 3 processes are here, rank 2 is missing; "
        "start every process of the run, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
    )
    assert line_of(one) == f"rank 0 ({HERE}) has ended: {line}"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1", r"nobody listens at 127.0.0.1:\d+ \(MASTER_ADDR:MASTER_PORT\)"),
        ("no-such-host.invalid", r"MASTER_ADDR=no-such-host.invalid cannot be resolved \(.*\)"),
    ],
)
def test_a_rank_that_does_not_find_the_main_rank_says_so_and_ends_in_time(started, address, said):
    """T-D8: a wrong or unresolvable MASTER_ADDR, and nobody listening, within parallel.join_seconds."""
    [rank] = started({1: {"MASTER_ADDR": address, "LOCAL_RANK": "0"}}, "parallel.join_seconds=3", only=(1,))
    assert rank.wait(60) == 2
    assert re.search(f"^rank 1 waits for rank 0: {said}; up to 3 s", rank.printed(), re.MULTILINE)
    assert re.fullmatch(
        rf"the processes of the run did not meet within 3 s \(parallel.join_seconds\): {said}; start rank 0, and set "
        "MASTER_ADDR to its host",
        line_of(rank),
    )


def test_a_main_rank_that_is_not_at_master_addr_says_so(started):
    """T-D8: MASTER_ADDR names another host than that of rank 0."""
    [rank] = started({0: {"MASTER_ADDR": "192.0.2.1"}}, "parallel.join_seconds=2", only=(0,))
    assert rank.wait(60) == 2
    assert f"MASTER_ADDR=192.0.2.1 is not an address of {HERE}, where rank 0 runs; set it to that host" in line_of(rank)


@pytest.mark.parametrize("talks", [False, True])
def test_a_port_that_another_program_has_is_named_by_every_rank(started, talks):
    """T-D8, OP-5: a busy MASTER_PORT: rank 0 at once, the others within parallel.join_seconds."""
    import threading

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])

        def serve() -> None:
            while True:
                connection, _ = server.accept()
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

        if talks:
            threading.Thread(target=serve, daemon=True).start()
        changes = {rank: {"MASTER_PORT": port, "LOCAL_RANK": "0"} for rank in (0, 1)}
        zero, one = started(changes, "parallel.join_seconds=3")
        assert zero.wait(60) == 2 and one.wait(60) == 2
    assert line_of(zero) == (
        f"rank 0: port {port} of {HERE} (MASTER_PORT) is taken by another program or another run; set MASTER_PORT to a free port on "
        "all nodes"
    )
    assert f"127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT)" in line_of(one)


# ---- contradictions ---------------------------------------------------------------------------------------------------


def test_a_rank_that_was_given_twice_is_named(started):
    """T-D8: the same RANK for two processes."""
    ranks = started({1: {"RANK": "0", "sleep": "2"}, 2: {"RANK": "1", "sleep": "3"}}, world_size=3)
    # The second "rank 0" finds the port taken; the second rank 1 never gets that far.
    assert ranks[1].wait(60) == 2 and "(MASTER_PORT) is taken" in line_of(ranks[1])
    ranks[0].process.kill()


def test_two_processes_with_one_rank_end_the_start_for_all(started):
    """T-D8: the same RANK for two processes, of which neither is the main one."""
    ranks = started({2: {"RANK": "1"}}, world_size=3)
    for rank in ranks:
        assert rank.wait(60) == 2
        assert re.search(rf"RANK=1 was given to two processes: \d+ on {HERE} and \d+ on {HERE}; give each", line_of(rank))


def test_another_world_size_on_another_node_is_named_by_all(started):
    """T-D8, OP-5: NODES=2 here and 3 there."""
    zero, one = started({1: {"WORLD_SIZE": "3", "LOCAL_RANK": "0"}})
    assert zero.wait(60) == 2 and one.wait(60) == 2
    assert line_of(zero) == line_of(one)
    assert line_of(zero).startswith(f"rank 1 ({HERE}) has WORLD_SIZE=3, rank 0 ({HERE}) 2; start all nodes with")


@pytest.mark.parametrize(("bad", "other"), [(1, 0), (0, 1)])
@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("optim.rl=1", 2, "command line: unknown key optim.rl"),
        ("data.sources.0.path=/nowhere", 1, "/nowhere"),
    ],
    ids=["configuration", "data"],
)
def test_a_rank_that_fails_before_it_joins_ends_the_others_with_its_line(started, bad, other, override, code, said):
    """OP-5, T-D8: a YAML error or missing data on one node: the others do not wait for it."""
    changes = {bad: {"--": override, "LOCAL_RANK": "0"}, other: {"LOCAL_RANK": "0"}}
    ranks = started(changes, "parallel.join_seconds=60")
    began = time.monotonic()
    assert [ranks[bad].wait(60), ranks[other].wait(60)] == [code, code]
    assert time.monotonic() - began < 40
    assert said in line_of(ranks[bad])
    named, _, told = line_of(ranks[other]).partition(" has ended: ")
    # The rank itself also says where its configuration names the data: that may differ from node to node.
    assert named == f"rank {bad} ({HERE})" and said in told and line_of(ranks[bad]).endswith(told)
    assert (told == line_of(ranks[bad])) == (code == 2)


def test_a_rank_that_dies_while_the_others_wait_is_named(started):
    """T-D8: a process that is killed before all have met."""
    zero, one = started({}, "parallel.join_seconds=60", world_size=3, only=(0, 1))
    deadline = time.monotonic() + 60
    while "2 of 3 processes are here" not in zero.printed():
        assert time.monotonic() < deadline, zero.printed()
        time.sleep(0.05)
    one.process.kill()
    assert zero.wait(20) == 1
    assert line_of(zero).startswith(f"rank 1 ({HERE}) is gone without a word (killed?)")


def test_a_late_rank_is_waited_for_and_the_run_goes_on(started):
    """T-D8: nothing is refused that is merely late."""
    zero, one = started({1: {"sleep": "3"}}, "parallel.join_seconds=60")
    assert zero.wait(90) == 0 and one.wait(20) == 0
    assert "1 of 2 processes are here, rank 1 is missing; waiting up to 59 s more" in zero.printed()
    assert "finished at step 2" in zero.printed()


@pytest.mark.parametrize("data", [
    b"[" * 200_000 + b"\n",
    b"[" * 5_000 + b"\n",
    b'{"kind":"hello","protocol":"pretrain 1","token":"","rank":1e999,"world_size":2,"host":"x","process":1}\n',
    b'{"kind":"hello","protocol":"pretrain 1","token":"","rank":-1,"world_size":2,"host":"x","process":1}\n',
    b'{"kind":"hello","protocol":"pretrain 1","token":"","rank":1,"world_size":2,"host":"' + b"x" * 60_000 + b'","process":1}\n',
], ids=["long", "nested", "infinite", "negative", "long name"])  # fmt: skip
def test_a_strangers_line_does_not_end_the_switchboard(caplog, data):
    """F8: RecursionError and OverflowError ended its thread; then the wrong rank was blamed for a hang."""
    switchboard = Switchboard(2, 0)
    switchboard.start()
    try:
        with socket.create_connection(("localhost", switchboard.port)) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(data)
                assert stranger.recv(1) == b""
        assert switchboard.is_alive() and not caplog.records
        rank = Channel(socket.create_connection(("localhost", switchboard.port)))
        assert hello(rank, 1, 2, switchboard.token)[0]["kind"] == "welcome"
        rank.close()
    finally:
        switchboard.close()


def test_closing_the_switchboard_raises_nothing_where_its_thread_has_ended_already():
    """A run that had finished ended in a BrokenPipeError: its thread saw the flag and closed, before the main thread had sent the wake-up."""
    switchboard = Switchboard(2, 0)
    switchboard.start()
    for _ in range(2):
        switchboard.close()
        assert not switchboard.is_alive()


def test_a_connection_that_comes_back_late_ends_nothing():
    """F14: the switchboard was looked for once; the end that this rank then expected was never taken back.

    What came with its answer was dropped: that a rank has left, say.
    """
    switchboard = Switchboard(2, 0)
    switchboard.start()
    monitor, tries = Monitor(1, 1, 60.0), []

    def connect() -> tuple[Channel, list[dict]]:
        tries.append(1)
        if len(tries) in (2, 3):
            raise ConnectionRefusedError
        channel = Channel(socket.create_connection(("localhost", switchboard.port)))
        hello(channel, 1, 2, switchboard.token)
        return channel, [{"kind": "digest", "digest": f"try {len(tries)}"}]

    try:
        monitor.start()
        first, _ = connect()
        switchboard.went = True  # all ranks have joined
        monitor.attach(first, [], connect)
        first.connection.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + 20
        while time.monotonic() < end and (len(tries) < 4 or monitor._channel is None or monitor._doom is not None):
            time.sleep(0.05)
        assert len(tries) == 4 and monitor._doom is None
        assert monitor.news.get(timeout=20) == {"kind": "digest", "digest": "try 4"}
        monitor.send("bye")
        assert switchboard.everyone_left.wait(20)
    finally:
        monitor.close()
        switchboard.close()


def test_what_a_rank_should_not_say_is_logged_and_what_a_stranger_says_is_not(caplog):
    """A mistake of our own in what ranks tell each other must not look as if a rank had been killed."""
    switchboard = Switchboard(2, 0)
    switchboard.start()
    try:
        with socket.create_connection(("localhost", switchboard.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(1) == b""
        assert not caplog.records
        rank = Channel(socket.create_connection(("localhost", switchboard.port)))
        assert hello(rank, 1, 2, switchboard.token)[0]["kind"] == "welcome"
        rank.send("ready")  # without the machine that it should name
        with pytest.raises(OSError):
            while rank.receive():
                pass
        [record] = caplog.records
        assert "rank 1 sent a message that cannot be understood" in record.getMessage() and "machine" in caplog.text
    finally:
        switchboard.close()


def test_a_host_that_vanishes_is_noticed_before_a_collective_has_waited_for_ten_minutes():
    """Keep-alive gave up after 21 minutes, and data that was under way after a quarter of an hour."""
    server = listen(0)
    channel = Channel(socket.create_connection(("localhost", server.getsockname()[1])))
    idle, every, count, limit = (
        channel.connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    )
    assert idle + every * count == VANISHED_SECONDS == limit / 1000 == 120
    channel.close()
    server.close()


def test_all_start_when_a_rank_that_was_silent_for_a_moment_answers_again():
    """The last rank became ready while another one had not answered for three seconds: nobody looked again, and all waited for ever."""
    switchboard = Switchboard(3, 0)
    switchboard.start()
    ranks = [Channel(socket.create_connection(("localhost", switchboard.port))) for _ in range(3)]
    try:
        for number, rank in enumerate(ranks):
            hello(rank, number, 3, switchboard.token)
        ranks[0].send("facts", digest="1", facts={}, torch=None)
        for rank in ranks[:2]:
            rank.send("ready", machine="a")
        ranks[0].send("ask", number=0)
        calls = [message for rank in ranks for message in _until(rank, "call")]
        for rank in (0, 2):  # rank 1 does not answer
            ranks[rank].send("at", mark=WHERE, seconds=0.0, idle=0.0, step=None, own="", call=calls[rank]["call"])
        assert "rank 1" in _until(ranks[0], "awaited")[0]["late"]  # 3 seconds later
        ranks[2].send("ready", machine="a")
        ranks[1].send("at", mark=WHERE, seconds=0.0, idle=0.0, step=None, own="", call=calls[1]["call"])
        for rank in ranks:
            assert len(_until(rank, "go")[0]["hosts"]) == 3
    finally:
        for rank in ranks:
            rank.close()
        switchboard.close()


def _run_as_many(config_file: str) -> int:
    """A run that counts its three ranks as many. It fails unless they are connected when they need it."""
    ranks.LAZY_RANKS = 3
    code = run_changed({}, config_file, "parallel.shard=3", "parallel.strategy=fsdp", "checkpoint.every_steps=1")
    return code if os.environ.get("TORCH_GLOO_LAZY_INIT") == "1" else 100


def test_many_ranks_connect_when_they_need_it_and_few_at_once(tmp_path, config_file, monkeypatch):
    """Gloo connected every rank with every other one in each group: 1,024 ranks would need two million connections before they start."""
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    connect_lazily(LAZY_RANKS - 1)
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    processes = start_ranks(tmp_path, 3, _run_as_many, str(config_file))
    assert [rank.wait(120) for rank in processes] == [0, 0, 0], processes[0].printed()
    assert len(list(tmp_path.rglob("step-00000002/manifest.json"))) == 1


def test_a_process_may_open_as_many_connections_as_the_run_has_ranks():
    """Only the main rank raised the limit, and every rank has connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        allow_open_files(2624)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(2624, before[1]), before[1])
        allow_open_files(1056)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(2624, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ---- thousands of ranks -----------------------------------------------------------------------------------------------


@pytest.fixture
def connected() -> Iterator[Callable[..., tuple[Switchboard, list[Channel]]]]:
    """A switchboard for `world_size` ranks, of which `count` are connected."""
    with contextlib.ExitStack() as end:

        def connect(world_size: int, count: int) -> tuple[Switchboard, list[Channel]]:
            switchboard = Switchboard(world_size, 0)
            switchboard.start()
            end.callback(switchboard.close)
            ranks = []
            for number in range(count):
                ranks.append(Channel(socket.create_connection(("localhost", switchboard.port))))
                end.callback(ranks[-1].close)
                hello(ranks[-1], number, world_size, switchboard.token)
            return switchboard, ranks

        yield connect


WHERE = {"name": "work", "number": 0, "waiting": False, "device": False, "storage": False, "exchanges": False}


def _serve(ranks: list[Channel], seconds: float) -> list[list[dict]]:
    """Answer every call for a while, and return what each rank heard besides."""
    heard: list[list[dict]] = [[] for _ in ranks]
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for rank in select.select(ranks, [], [], left)[0]:
            for message in rank.receive():
                if message["kind"] == "call":
                    rank.send("at", mark=WHERE, seconds=0.0, idle=0.0, step=0, own=None, call=message["call"])
                else:
                    heard[ranks.index(rank)].append(message)
    return heard


@pytest.mark.parametrize(("kind", "values", "work", "answer"), [
    ("ask", {"number": 0}, "listing", "awaited"),
    ("stuck", {"line": "told to stop", "number": 0, "idle": 60.0}, "hung", "heard"),
])  # fmt: skip
def test_what_many_ranks_ask_at_the_same_time_is_concluded_once(connected, monkeypatch, kind, values, work, answer):
    """Each answer was computed for itself, from all ranks: 28 s of the switchboard for 4,096 ranks that waited for the start."""
    real, calls = getattr(switchboard_file, work), []
    monkeypatch.setattr(switchboard_file, work, lambda *arguments: calls.append(1) or real(*arguments))
    _, ranks = connected(500, 40)  # called every half second
    for rank in ranks[1:]:
        rank.send(kind, **values)
    heard = _serve(ranks, 1.2)
    assert 1 <= len(calls) <= 3
    answers = [message for messages in heard for message in messages if message["kind"] == answer]
    assert len(answers) == 39
    if kind == "ask":
        assert answers[-1]["late"].startswith(f"ranks 40-499 are missing; rank 0 ({HERE}) has been in 'work' for 0 s")
        assert answers[-1]["came"] == 40 and answers[-1]["some_absent"] and answers[-1]["main_is_busy"]


def test_a_collective_that_fails_on_all_ranks_is_judged_once():
    """Each report was looked at in each turn, over all ranks."""
    switchboard = Switchboard(100, 0)
    report = {"name": "start of step 2", "number": 3, "waiting": True, "timed_out": True, "seconds": 600, "reason": "Timed out"}
    for standing in switchboard._standings:
        switchboard._on_broken(standing, report)
    assert len(switchboard._inquiries.times()) == 1
    switchboard.server.close()


def test_the_first_of_many_ranks_that_fail_alike_ends_the_others(connected):
    """All ranks told all others: 16.8 million messages of 4,096 ranks whose loss was not finite."""
    switchboard, ranks = connected(4, 4)
    switchboard.went = True
    for number in (1, 2):
        ranks[number].send("left", line="the loss is not finite", alone=True, error="TrainingError", traceback=False)
    ranks[1].close()
    [heard] = _serve([ranks[3]], 0.3)
    [left] = [message for message in heard if message["kind"] == "left"]
    assert left["line"].endswith("has ended: the loss is not finite") and left["error"] == "LostRankError"


def test_what_all_ranks_are_told_is_written_once(connected, monkeypatch):
    """The hosts of 4,096 ranks were written 4,096 times."""
    written = []

    def dumps(message: dict) -> str:
        written.append(message["kind"])
        return json.dumps(message)

    monkeypatch.setattr(channel_file, "json", SimpleNamespace(dumps=dumps, loads=json.loads))
    _, ranks = connected(3, 3)
    ranks[0].send("facts", digest="1", facts={}, torch=None)
    for rank in ranks:
        rank.send("ready", machine="a")
    assert [len(_until(rank, "go")[0]["hosts"]) for rank in ranks] == [3, 3, 3]
    assert written.count("go") == 1


def test_a_rank_that_did_not_wait_for_its_welcome_is_not_taken_for_dead(connected):
    """The switchboard was busy for longer than the rank waited: the connection that the rank had given up ended the start of all."""
    switchboard, (zero,) = connected(3, 1)
    given_up = Channel(socket.create_connection(("localhost", switchboard.port)))
    me = {"rank": 1, "world_size": 3, "host": socket.gethostname(), "process": os.getpid()}
    given_up.send("hello", protocol=PROTOCOL, token="", **me)
    given_up.close()
    time.sleep(0.2)
    rank = Channel(socket.create_connection(("localhost", switchboard.port)))
    hello(rank, 1, 3, switchboard.token)
    heard = _serve([zero, rank], 0.3)
    rank.close()
    assert [message["kind"] for messages in heard for message in messages if message["kind"] in ("left", "gone")] == []


def test_a_rank_that_does_not_come_back_before_the_start_ends_it(connected, monkeypatch):
    monkeypatch.setattr(switchboard_file, "RETURN_SECONDS", 0.3)
    _, ranks = connected(3, 2)
    began = time.monotonic()
    ranks[1].close()
    [left] = _until(ranks[0], "left")
    assert left["line"] == f"rank 1 ({HERE}) is gone without a word (killed?)" and left["error"] == "LostRankError"
    assert 0.3 <= time.monotonic() - began < 2


def test_a_rank_that_comes_back_before_the_start_starts_with_the_others(connected):
    """What it had said, or was told meanwhile, may be lost with its connection."""
    switchboard, (zero,) = connected(2, 1)
    monitor = Monitor(1, 1, 60.0)

    def connect() -> tuple[Channel, list[dict]]:
        channel = Channel(socket.create_connection(("localhost", switchboard.port)))
        return channel, hello(channel, 1, 2, switchboard.token)

    try:
        monitor.start()
        first, said = connect()
        first.connection.shutdown(socket.SHUT_RDWR)
        monitor.attach(first, said, connect)
        monitor.request("ready", machine="a")
        zero.send("facts", digest="1", facts={}, torch=None)
        zero.send("ready", machine="a")
        assert len(_until(zero, "go")[0]["hosts"]) == 2
        monitor._channel.connection.shutdown(socket.SHUT_RDWR)  # perhaps before it heard the go
        gone = [monitor.news.get(timeout=5)["kind"] for _ in range(3)]
        while gone.count("welcome") < 3:
            gone.append(monitor.news.get(timeout=5)["kind"])
        while gone[-1] != "go":
            gone.append(monitor.news.get(timeout=5)["kind"])
    finally:
        monitor.close()


def test_a_rank_that_is_called_with_its_welcome_answers(connected):
    """The answer was thrown away, and the rank counted as silent as long as others asked."""
    switchboard, (zero,) = connected(2, 1)
    monitor, channel = Monitor(1, 1, 60.0), Channel(socket.create_connection(("localhost", switchboard.port)))
    try:
        monitor.start()
        said = hello(channel, 1, 2, switchboard.token)
        monitor.attach(channel, [*said, {"kind": "call", "call": 0}], None)
        wait_until(lambda: switchboard._standings[1].mark is not None)
    finally:
        monitor.close()


def test_a_rank_whose_answer_was_lost_is_called_again_as_long_as_others_ask():
    """Questions that overlapped kept one call open, and so the start from coming."""
    standings, calls = [Standing(0), Standing(1), Standing(2)], []
    inquiries = Inquiries(standings, {0, 1, 2}, calls.append)
    for _ in range(3):
        inquiries.ask("who?", 1, lambda askers: None)
        inquiries._next = 0.0
        inquiries.take_turn()
    assert calls == [1, 2, 3]


def test_hundreds_of_ranks_that_vanish_at_once_do_not_end_the_switchboard(connected):
    """To tell the others of one failed at the next, and so on: the thread ended by its depth, and nobody heard a verdict."""
    count = 400
    switchboard, ranks = connected(count + 1, count + 1)
    switchboard.went = True
    for rank in ranks[1:]:
        rank.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rank.close()
    wait_until(lambda: not switchboard.is_alive() or len(switchboard._channels) == 1, 20)
    report = {"name": "sum", "number": 1, "waiting": True, "timed_out": False, "seconds": 5, "reason": "x"}
    ranks[0].send("broken", **report)
    assert "gone without a word" in _until(ranks[0], "verdict")[0]["line"]


def test_ranks_that_come_back_before_the_start_are_no_news(connected):
    """Each was told to all, whom nobody had told that it was gone: a thousand of them took longer than they had to come back."""
    switchboard, ranks = connected(4, 4)
    for number in (1, 2):
        ranks[number].close()
        ranks[number] = Channel(socket.create_connection(("localhost", switchboard.port)))
        hello(ranks[number], number, 4, switchboard.token)
    heard = _serve([ranks[0], ranks[3]], 0.3)
    assert [message["kind"] for messages in heard for message in messages] == []


def test_a_rank_that_comes_back_does_not_make_the_others_forget_who_has_failed(connected):
    switchboard, ranks = connected(4, 4)
    switchboard.went = True
    ranks[2].close()
    _until(ranks[3], "gone")
    ranks[1].send("left", line="the loss is not finite", alone=True, error="TrainingError", traceback=False)
    _until(ranks[3], "left")
    again = Channel(socket.create_connection(("localhost", switchboard.port)))
    hello(again, 2, 4, switchboard.token)
    assert [message["kind"] for message in _serve([ranks[3]], 0.3)[0]] == ["back", "left"]
    again.close()


def test_a_process_in_place_of_one_that_is_gone_is_told_so(connected):
    switchboard, ranks = connected(3, 2)
    ranks[1].close()
    time.sleep(0.1)
    other = Channel(socket.create_connection(("localhost", switchboard.port)))
    other.send("hello", protocol=PROTOCOL, token="", rank=1, world_size=3, host=socket.gethostname(), process=1)
    assert _until(other, "refused")[0]["line"] == f"rank 1 ({HERE}) is gone without a word (killed?)"
    other.close()


def test_a_main_rank_that_answers_late_is_waited_for(monkeypatch):
    """A rank waited 10 s, closed its connection and came again, while thousands came to a main rank that still imported."""
    for name in ("SEND_SECONDS", "_SEND_SECONDS"):
        monkeypatch.setattr(channel_file, name, 0.2, raising=False)
    with listen(0) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        meeting = Meeting(1, 1, 2, 5.0, 5.0)
        try:
            connection, _ = server.accept()
            time.sleep(0.6)
            Channel(connection).send("welcome", digest=None, found={})
            assert meeting._attached.wait(2.0)
        finally:
            meeting.close()
            connection.close()


def test_a_main_rank_that_may_open_too_few_files_says_so_at_once_to_all(monkeypatch):
    """The ranks that it could not take waited for ten minutes, and took it for another program."""
    monkeypatch.setattr(joining, "allow_open_files", lambda wanted: 1024)
    monkeypatch.setattr(joining, "TELL_SECONDS", 1.0)
    with listen(0) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    meeting = Meeting(0, 0, 400, 5.0, 5.0)
    line = f"rank 0 ({HERE}) may open 1024 files, and needs 1712 to be connected with 400 ranks; raise the hard limit of every host"
    try:
        with pytest.raises(LaunchError, match=re.escape(line)) as caught, meeting.doing("plan of the run"):
            pytest.fail("it goes on")
        rank = Channel(socket.create_connection(("localhost", port)))
        hello(rank, 1, 400, "")
    finally:
        meeting.leave(caught.value)
    assert line in _until(rank, "left")[0]["line"]
    rank.close()
    for world_size in (2, 170):
        assert joining._problem_of_files(1024, world_size) is None
    assert joining._problem_of_files(resource.RLIM_INFINITY, 10_000) is None


def test_a_main_rank_that_has_no_file_left_for_a_connection_says_so(connected, caplog):
    """It tried again without a pause, and without a word."""

    def accept() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    switchboard, _ = connected(3, 0)
    switchboard.close()
    ear, switchboard.server = SimpleNamespace(sent=b""), SimpleNamespace(accept=accept)
    ear.write = lambda data: setattr(ear, "sent", ear.sent + data)
    switchboard._channels = {1: ear}
    for _ in range(2):
        switchboard._accept()
    [line] = ear.sent.splitlines()
    said = f"rank 0 ({HERE}) cannot take the connection of another rank: Too many open files; raise the limit with ulimit -n"
    assert json.loads(line) == {"kind": "left", "line": said, "error": "LaunchError"}
    switchboard.went, switchboard._is_full = True, False  # a rank comes back to a run that goes on
    for _ in range(2):
        switchboard._accept()
    assert [record.getMessage() for record in caplog.records] == [said]


def _until(rank: Channel, kind: str) -> list[dict]:
    """The first message of a kind. Raises OSError when none comes."""
    while True:
        if found := [message for message in rank.receive() if message["kind"] == kind]:
            return found[:1]
