"""No step is taken until every rank has the same configuration, data, code and versions as the main one."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from launch_pool import RankProcess, _free_port, start_ranks
from running import run_changed, write_prepared

from pretrain.config.schema import Config
from pretrain.config.written import flatten
from pretrain.distributed import agreement
from pretrain.distributed.agreement import MAY_DIFFER, code_hashes, difference, digest_of, machine_name, run_facts, versions

HERE = os.uname().nodename
ROOT = Path(__file__).resolve().parents[2]
REMEDY = "; start all nodes with the same command and files"


@pytest.fixture
def started(tmp_path, config_file) -> Iterator[Callable[..., list[RankProcess]]]:
    ranks: list[RankProcess] = []

    def start(one: dict[str, str], *overrides: str) -> list[RankProcess]:
        """Two ranks, of which rank 1 is another."""
        ranks.extend(start_ranks(tmp_path, 2, run_changed, {1: one}, str(config_file), *overrides))
        return ranks

    yield start
    for rank in ranks:
        rank.process.kill()


def refusal(ranks: list[RankProcess], config_file: Path) -> str:
    """The line that both ranks ended with, before any step, with exit code 2."""
    assert [rank.wait(60) for rank in ranks] == [2, 2], [rank.printed() for rank in ranks]
    lines = [line for rank in ranks for line in rank.printed().splitlines() if line.startswith("error: ")]
    assert len(lines) == 2 and lines[0] == lines[1], lines
    run = config_file.parent / "runs" / "run"
    assert not any((run / name).exists() for name in ("metrics.jsonl", "status.json", "checkpoints", "config.yaml", ".lock"))
    return lines[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("override", "key", "own", "main"),
    [
        ("optim.lr=0.01", "optim.lr", "0.01", "0.003"),
        ("data.seed=7000", "data.seed", "7000", "7"),
        pytest.param("run.steps=1", "run.steps", "1", "2", marks=pytest.mark.slow),
        pytest.param("model.dim=64", "model.dim", "64", "32", marks=pytest.mark.slow),
        ("run.name=other", "run.name", "other", "run"),
    ],
)
def test_a_rank_with_another_configuration_is_named_with_key_values_ranks_and_hosts(
    started, config_file, override, key, own, main
):
    """OP-5: another learning rate, seed, number of steps or model on node 2 was trained with, silently or to a time-out."""
    began = time.monotonic()
    line = refusal(started({"--": override}), config_file)
    assert time.monotonic() - began < 60
    assert line.startswith(f"rank 1 ({HERE}) has {key}={own}, rank 0 ({HERE}) {main}")
    assert line.endswith(REMEDY)


@pytest.mark.parametrize("key", ["sources", "validation"])
def test_a_rank_with_other_data_at_the_same_path_is_named(started, config_file, prepared, tmp_path, byte_tokenizer, key):
    """OP-5: other data on node 2 under the same name, as a folder on each node's own disk may be."""
    for folder, content in (("a", prepared), ("b", write_prepared(tmp_path / "new" / "train", byte_tokenizer, 5, 300))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data").symlink_to(content)
    ranks = start_ranks(
        tmp_path,
        2,
        run_changed,
        {0: {"cd": f"{tmp_path}/a"}, 1: {"cd": f"{tmp_path}/b"}},
        str(config_file),
        f"data.{key}=[{{path: data}}]",
    )
    line = refusal(ranks, config_file)
    assert line.startswith(f"rank 1 ({HERE}) has the content of data.{key}.0=")


def test_every_difference_is_in_the_log(started, config_file):
    """OP-5: the first difference is in the line, all of them are in the log."""
    line = refusal(started({"--": "optim.lr=0.01 optim.clip=0.5 loss.z_loss=0.1"}), config_file)
    assert f"has optim.lr=0.01, rank 0 ({HERE}) 0.003" not in line and "and 2 more differences, listed in the log" in line
    log = (config_file.parent / "runs" / "run" / "logs" / "rank-1.log").read_text()
    for part in ("optim.lr=0.01", "optim.clip=0.5", "loss.z_loss=0.1"):
        assert f"rank 1 ({HERE}) has {part}, rank 0 ({HERE}) " in log


def test_a_rank_with_another_version_is_named(started, config_file):
    """OP-5: versions of what computes."""
    changed = versions() | {"version of torch": "2.12.0"}
    line = refusal(started({"PATCH pretrain.distributed.agreement.versions": changed}), config_file)
    assert line == f"rank 1 ({HERE}) has version of torch=2.12.0, rank 0 ({HERE}) {versions()['version of torch']}{REMEDY}"


def test_a_rank_with_another_environment_variable_that_changes_numbers_is_named(started, config_file):
    """OP-5: what changes numbers besides."""
    line = refusal(started({"NVIDIA_TF32_OVERRIDE": "0"}), config_file)
    assert f"has the environment variable NVIDIA_TF32_OVERRIDE=0, rank 0 ({HERE}) null" in line


def test_a_cache_folder_and_a_kind_of_machine_may_differ_and_the_latter_is_said(started, tmp_path):
    """OP-5: the list of keys that may differ, and that machines may."""
    assert MAY_DIFFER == ("data.cache.dir",)
    changes = {"--": f"data.cache.dir={tmp_path}/cache", "PATCH pretrain.distributed.agreement.machine_name": "NVIDIA X1"}
    zero, one = started(changes | {"PATCH pretrain.train.session.machine_name": "NVIDIA X1"})
    assert zero.wait(60) == 0 and one.wait(20) == 0
    (line,) = [line for line in zero.printed().splitlines() if line.startswith("the machines differ: ")]
    assert line.endswith("on rank 0; NVIDIA X1 on rank 1: the slowest sets the pace, and last bits may differ between them")


def test_every_rank_says_which_gpu_it_has(monkeypatch):
    """It asked before it had chosen its own, and every rank of a host named the first one."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"the one of {device}")
    assert machine_name("cuda:3") == "the one of cuda:3"


def test_a_rank_with_other_code_is_named(tmp_path, config_file):
    """OP-5: a clone with one line changed on node 2."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "pretrain", clone / "pretrain", ignore=shutil.ignore_patterns("__pycache__"))
    changed = clone / "pretrain" / "optim" / "optimizer.py"
    before, after = 'group["lr"] = rate', 'group["lr"] = 10 * rate'
    assert before in changed.read_text()
    changed.write_text(changed.read_text().replace(before, after))
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, root / "pretrain" / "run.py", "--config", config_file, "parallel.strategy=ddp"],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, root in enumerate((ROOT, clone))
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], printed
    for text in printed:
        assert f"error: rank 1 ({HERE}) has the code of pretrain/optim/optimizer.py=" in text
        assert f", rank 0 ({HERE}) " in text and REMEDY in text


def test_a_link_of_an_editor_that_leads_nowhere_is_no_code(tmp_path, monkeypatch):
    """With .#trainer.py of Emacs in the package, no run of several ranks could start: FileNotFoundError."""
    (tmp_path / "trainer.py").write_text("")
    (tmp_path / ".#trainer.py").symlink_to("me@host.17:1")
    monkeypatch.setattr(agreement, "_PACKAGE", tmp_path)
    assert f"the code of {tmp_path.name}/trainer.py" in agreement.code_hashes()


# ---- facts ------------------------------------------------------------------------------------------------------------


def test_the_facts_hold_every_key_of_the_configuration_but_those_that_may_differ():
    """OP-5: every key is compared."""
    config = dataclasses.asdict(Config())
    facts = run_facts(config, "cpu", {})
    flat = flatten(config, complete=True)
    assert set(flat) - set(facts) == set(MAY_DIFFER)
    assert all(facts[key] == value for key, value in flat.items() if key not in MAY_DIFFER)
    assert facts["the code of pretrain/run.py"] == code_hashes()["the code of pretrain/run.py"]
    assert {"version of Python", "version of torch", "version of numpy"} <= set(facts)


def test_a_digest_changes_with_any_fact_and_with_nothing_else():
    facts = run_facts(dataclasses.asdict(Config()), "cpu", {})
    assert digest_of(facts) == digest_of(dict(reversed(facts.items())))
    for name in facts:
        assert digest_of(facts | {name: "changed"}) != digest_of(facts)


def test_a_fact_that_one_side_lacks_is_a_difference():
    line, everything = difference({"a": 1, "b": 2}, {"b": 3, "c": None}, "rank 1 (x)", "rank 0 (y)")
    assert line == f"rank 1 (x) has a=1, rank 0 (y) has none and 2 more differences, listed in the log{REMEDY}"
    assert everything[1:] == ["rank 1 (x) has b=2, rank 0 (y) 3", "rank 0 (y) has c=null, rank 1 (x) has none"]


def test_many_ranks_that_agree_exchange_one_hash_each(monkeypatch):
    """OP-5: agreement costs little at any size: no facts travel between ranks that agree."""
    from pretrain.distributed.channel import Channel
    from pretrain.distributed.joining import Meeting

    count, sent = 64, []
    real = Channel.send
    monkeypatch.setattr(
        Channel, "send", lambda self, kind, **values: (sent.append((kind, len(str(values)))), real(self, kind, **values))[1]
    )
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(count)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pretrain.distributed.joining._open", None)
    facts = {f"fact {i}": "x" * 100 for i in range(500)}
    began, results = time.monotonic(), {}

    def join(rank: int) -> None:
        meetings[rank].store = object()  # torch's has its own cost
        results[rank] = meetings[rank].join(facts, "a machine")

    meetings = []
    for rank in range(count):
        meetings.append(Meeting(rank, rank, count, 60, 60))
        monkeypatch.setattr("pretrain.distributed.joining._open", None)
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    seconds = time.monotonic() - began
    assert results == {rank: [] for rank in range(count)}
    assert meetings[5].hosts == [socket.gethostname()] * count
    kinds = [kind for kind, _ in sent]
    assert kinds.count("facts") == 1 and "want" not in kinds  # the main rank's, to its own switchboard
    assert sum(size for kind, size in sent if kind != "facts") < count * 3000
    assert seconds < 20
    for meeting in reversed(meetings):
        meeting.leave()
