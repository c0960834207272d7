"""Numbers of a run elsewhere: the trackers' own files and formats, one entry over all restarts, and networks that fail."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import urllib.request
from pathlib import Path

import pytest

from pretrain.config.data_schema import Source
from pretrain.config.log_schema import Log, MlflowLog, PrometheusLog, TrackioLog, WandbLog
from pretrain.config.schema import Config
from pretrain.config.written import flatten
from pretrain.errors import ConfigError
from pretrain.observe import trackers
from pretrain.observe.background import InBackground, Tracker, arrived_step, kept_id
from pretrain.observe.metrics import StepRecord
from pretrain.observe.prometheus import Prometheus
from pretrain.observe.sinks import JsonLines, Sinks
from pretrain.observe.trackers import MlFlow, Trackio, WeightsAndBiases, check_trackers, own_sinks

SAMPLES = {"The capital of France is": " Paris,\nwhich", 'a "b" <c>': " é"}
ROWS = [[2, prompt, text] for prompt, text in SAMPLES.items()]


def config_of(**log) -> Config:
    config = Config(log=Log(tensorboard=False, **log))
    config.run.steps = 4
    return config


def starts(sink: type[Tracker], run: Path, config: Config, steps: list[tuple[int, int]], failed: bool = False) -> None:
    """Starts of a run, each logging the steps `first` to `last`."""
    for first, last in steps:
        sinks = Sinks([], [InBackground(sink())], run, config, first - 1)
        for step in range(first, last + 1):
            evaluated = {"validation": {"books": 4.0}, "samples": SAMPLES} if step == 2 else {}
            sinks.write(StepRecord(step, step * 64, 5.0 - step, grad_norm=0.5, **evaluated))
        sinks.close(failed)


def test_trackers_are_told_no_password_and_no_signature():
    """They were sent the URLs of data as they are written."""
    config = config_of()
    config.data.sources = [Source(path="s3://me:secret@host/web/train?sig=A/B"), Source(path="data/a?b")]
    sent = trackers._without_secrets(dataclasses.asdict(config))
    assert [source["path"] for source in sent["data"]["sources"]] == ["s3://host/web/train", "data/a?b"]
    config.data.sources = []
    assert flatten(trackers._without_secrets(dataclasses.asdict(config))) == flatten(dataclasses.asdict(config))


def wandb_records(file: Path) -> list:
    """The records of a .wandb file. `finish` returns a moment before its process has written the last of them."""
    deadline = time.monotonic() + 30
    while not (found := parsed_records(file.read_bytes())) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{file} has no end after 30 s"
        time.sleep(0.05)
    return found


def parsed_records(content: bytes) -> list:
    """A header, then blocks of 32 KiB as LevelDB's log has them (leveldb, doc/log_format.md). A record that is not there as a whole is left out."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, found, whole = 7, [], b""
    assert content[:4] in (b":W&B", b"")
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4) and place <= len(content):  # the last part of a record
            found.append(Record.FromString(whole))
            whole = b""
    return found


def test_a_run_of_weights_and_biases_goes_on_after_a_restart(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    config = config_of(wandb=WandbLog(project="tests", entity="team", group="sizes", offline=True, tags=["small"]))
    starts(WeightsAndBiases, tmp_path / "run", make(tmp_path / "run", config), [(1, 2), (2, 4)])
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.parent.name)
    assert len(files) == 2 and kept_id(tmp_path / "run", "wandb") is not None
    histories, ids, codes, about = [], set(), [], set()
    for file in files:
        records = wandb_records(file)
        ids |= {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
        about |= {
            (run.project, run.entity, run.run_group, *run.tags)
            for record in records
            if record.WhichOneof("record_type") == "run"
            for run in [record.run]
        }
        codes += [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                histories.append((items["step"], items["loss"], items.get("validation/books")))
    assert ids == {kept_id(tmp_path / "run", "wandb")}
    assert histories == [(1, 4.0, None), (2, 3.0, 4.0), (2, 3.0, 4.0), (3, 2.0, None), (4, 1.0, None)]
    assert about == {("tests", "team", "sizes", "small")}
    assert [sample_table(file) for file in files] == [{"columns": ["step", "prompt", "continuation"], "data": ROWS}] * 2
    assert codes == [1, 0]  # asked to stop before its last step, then finished


def test_a_start_with_no_step_left_leaves_the_entry_finished(tmp_path, monkeypatch):
    """Weights & Biases went by the lines of this start: the entry of a finished run became a preempted one with exit code 1."""
    said = []

    class Run:
        resumed, summary, config = True, {"step": 4}, types.SimpleNamespace(update=lambda *_, **options: None)

        def define_metric(self, *_, **options):
            pass

        def log(self, numbers):
            said.append(numbers["step"])

        def mark_preempting(self):
            said.append("preempting")

        def finish(self, exit_code):
            said.append(exit_code)

    fake = types.ModuleType("wandb")
    fake.init, fake.Settings = lambda **options: Run(), lambda **options: None
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = make(tmp_path / "run", config_of(wandb=WandbLog(project="tests")))
    starts(WeightsAndBiases, tmp_path / "run", config, [(5, 4)])
    assert said == [0]
    starts(WeightsAndBiases, tmp_path / "run", config, [(4, 3), (4, 4)])  # stopped before its last step, then finished
    assert said == [0, "preempting", 1, 4, 0]


def sample_table(file: Path) -> dict:
    """The table that the history of a .wandb file names, from the files that are uploaded with it."""
    histories = [record.history for record in wandb_records(file) if record.WhichOneof("record_type") == "history"]
    items = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item} for history in histories
    ]
    [found] = [line for line in items if any(name.startswith("samples") for name in line)]
    entry = found.get("samples") or {name.partition("/")[2]: value for name, value in found.items() if "samples/" in name}
    assert found["step"] == 2 and entry["_type"] == "table-file" and (entry["nrows"], entry["ncols"]) == (2, 3)
    return json.loads((file.parent / "files" / entry["path"]).read_text(encoding="utf-8"))


def histories_of(file: Path) -> list[int]:
    found = [record.history for record in wandb_records(file) if record.WhichOneof("record_type") == "history"]
    return [json.loads(item.value_json) for history in found for item in history.item if "step" in (item.key, *item.nested_key)]


KILLED = """
import os, sys, time
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_trackers import config_of
from pretrain.config.log_schema import WandbLog
from pretrain.observe.background import InBackground
from pretrain.observe.metrics import StepRecord
from pretrain.observe.sinks import JsonLines, Sinks
from pretrain.observe.trackers import WeightsAndBiases
sinks = Sinks([JsonLines()], [kept := InBackground(WeightsAndBiases())], Path(sys.argv[1]), config_of(wandb=WandbLog(project="p", offline=True)), 0)
for step in (1, 2, 3):
    sinks.write(StepRecord(step, step * 64, 5.0 - step))
while kept._waiting or not kept._is_open:
    time.sleep(0.05)
os.kill(os.getpid(), 9)
"""


def test_lines_of_a_start_that_was_killed_are_in_weights_and_biases_all_the_same(tmp_path, monkeypatch):
    """It keeps what it is given in buffers, and its own process ends with ours."""
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    run, config = tmp_path / "run", config_of(wandb=WandbLog(project="p", offline=True))
    run.mkdir()
    done = subprocess.run([sys.executable, "-c", KILLED, run, Path(__file__).parent, Path(__file__).parents[2]])
    assert done.returncode == -signal.SIGKILL and len((run / "metrics.jsonl").read_text().splitlines()) == 3
    starts(WeightsAndBiases, run, config, [(4, 4)])
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.parent.name)
    assert len(files) == 2 and histories_of(files[1]) == [1, 2, 3, 4] and arrived_step(run, "wandb") == 4


class Kept(Tracker):
    """A tracker that remembers the steps it was given."""

    tracker = "kept"

    def __init__(self, steps: list[int], is_immediate: bool) -> None:
        self.steps, self.is_immediate = steps, is_immediate

    def write(self, record):
        self.steps.append(record.step)


@pytest.mark.parametrize("is_immediate", [True, False])
def test_a_start_sends_what_is_not_known_to_have_arrived_and_nothing_else(tmp_path, is_immediate):
    def start(first: int, last: int, closes: bool = True) -> list[int]:
        steps: list[int] = []
        sink = InBackground(Kept(steps, is_immediate))
        sinks = Sinks([JsonLines()], [sink], tmp_path, config_of(), first - 1)
        for step in range(first, last + 1):
            sinks.write(StepRecord(step, step, 1.0))
        if closes:
            sinks.close()
        while len(steps) < last + 1 - first:
            time.sleep(0.01)
        time.sleep(0.1)
        return steps

    assert start(1, 3) == [1, 2, 3] and arrived_step(tmp_path, "kept") == 3
    assert start(4, 5, closes=False) == [4, 5] and arrived_step(tmp_path, "kept") == (5 if is_immediate else 3)
    assert start(6, 6) == ([6] if is_immediate else [4, 5, 6])
    assert start(4, 4, closes=False) == [4]  # it went back to step 3
    assert start(5, 6) == ([5, 6] if is_immediate else [4, 5, 6])
    assert start(7, 6) == []


def make(run: Path, config: Config) -> Config:
    run.mkdir(parents=True)
    return config


def test_a_run_of_mlflow_goes_on_after_a_restart(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "store").as_uri()
    config = make(tmp_path / "run", config_of(mlflow=MlflowLog(experiment="tests", uri=uri)))
    starts(MlFlow, tmp_path / "run", config, [(1, 2)])
    client = MlflowClient(uri)
    run = client.get_run(kept_id(tmp_path / "run", "mlflow"))
    assert run.info.status == "KILLED" and run.info.run_name == "run"
    assert run.data.params["optim.lr"] == str(config.optim.lr) and run.data.params["run.steps"] == "4"
    starts(MlFlow, tmp_path / "run", config, [(3, 4)])
    experiment = client.get_experiment_by_name("tests")
    assert [found.info.run_id for found in client.search_runs([experiment.experiment_id])] == [run.info.run_id]
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    assert [m.value for m in client.get_metric_history(run.info.run_id, "validation/books")] == [4.0]
    assert client.get_run(run.info.run_id).info.status == "FINISHED"
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == ["samples/step-00000002.txt"]
    text = Path(client.download_artifacts(run.info.run_id, "samples/step-00000002.txt", str(tmp_path))).read_text("utf-8")
    assert text == 'The capital of France is Paris,\nwhich\n\na "b" <c> é\n'
    starts(MlFlow, tmp_path / "run", config, [(4, 4)], failed=True)
    assert client.get_run(run.info.run_id).info.status == "FAILED"


def test_samples_that_cannot_be_stored_are_a_warning_and_numbers_go_on(tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    def refuse(*arguments):
        raise ConnectionError("no credentials\nfor the bucket")

    monkeypatch.setattr(MlflowClient, "log_text", refuse)
    config = make(tmp_path / "run", config_of(mlflow=MlflowLog(experiment="tests", uri=(tmp_path / "store").as_uri())))
    with caplog.at_level(logging.WARNING, "pretrain"):
        starts(MlFlow, tmp_path / "run", config, [(1, 4)])
    [line] = caplog.messages
    assert line.startswith("MLflow: samples cannot be stored as artifacts: ConnectionError: no credentials for the bucket")
    client = MlflowClient((tmp_path / "store").as_uri())
    history = client.get_metric_history(kept_id(tmp_path / "run", "mlflow"), "loss")
    assert [metric.value for metric in history] == [4.0, 3.0, 2.0, 1.0]


def test_trackio_is_asked_for_the_run_of_the_start_before(tmp_path, monkeypatch):
    """Its own package does not go together with our pins; `tests/clients/test_trackio.py` (slow) runs the real one."""
    asked, logged = [], []

    class Run:
        def log(self, numbers, step):
            logged.append((step, numbers["loss"], *([numbers["samples"].data] if "samples" in numbers else [])))

        def finish(self):
            logged.append("end")

    fake = types.ModuleType("trackio")
    fake.init = lambda project, **options: (
        asked.append((project, options["name"], options["resume"], options["space_id"])) or Run()
    )
    fake.Table = lambda columns, data: types.SimpleNamespace(data=data)
    monkeypatch.setitem(__import__("sys").modules, "trackio", fake)
    config = make(tmp_path / "run", config_of(trackio=TrackioLog(project="tests", space="me/runs")))
    starts(Trackio, tmp_path / "run", config, [(1, 2), (3, 4)])
    assert asked == [("tests", kept_id(tmp_path / "run", "trackio"), "allow", "me/runs")] * 2
    assert logged == [(1, 4.0), (2, 3.0, ROWS), "end", (3, 2.0), (4, 1.0), "end"]


# ---- networks that fail, and slow ones ----------------------------------------------------------------------------------


class Flaky(Tracker):
    """Fails as long as `down` is set; `got` keeps the steps."""

    name, tracker = "Flaky", "flaky"

    def __init__(self) -> None:
        self.down, self.got, self.closed = threading.Event(), [], False

    def open(self, directory: Path, config: Config, step: int) -> None:
        self._check()

    def write(self, record: StepRecord) -> None:
        self._check()
        self.got.append(record.step)

    def _check(self) -> None:
        if self.down.is_set():
            raise ConnectionError("no route\nto host")

    def close(self) -> None:
        self.closed = True


def until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_logged_while_a_network_is_down_arrives_later_in_order(tmp_path, caplog):
    flaky = Flaky()
    sink = InBackground(flaky, retry_seconds=0.05)
    flaky.down.set()
    with caplog.at_level(logging.WARNING, "pretrain"):
        sink.open(tmp_path, Config(), 0)
        for step in range(1, 6):
            sink.write(StepRecord(step, step))
        until(lambda: any("ConnectionError: no route to host" in line for line in caplog.messages))
        flaky.down.clear()
        until(lambda: len(flaky.got) == 5)
        flaky.down.set()
        sink.write(StepRecord(6, 6))
        until(lambda: sum("the run goes on" in line for line in caplog.messages) == 2)
        flaky.down.clear()
        sink.close()
    assert flaky.got == [1, 2, 3, 4, 5, 6] and flaky.closed
    assert sum("works again" in line for line in caplog.messages) == 2
    assert all(line.startswith("Flaky: ") for line in caplog.messages if "\n" not in line)


def test_lines_that_never_arrived_are_counted_at_the_end(tmp_path, caplog):
    flaky = Flaky()
    flaky.down.set()
    sink = InBackground(flaky, retry_seconds=60.0)
    with caplog.at_level(logging.WARNING, "pretrain"):
        sink.open(tmp_path, Config(), 0)
        for step in range(1, 4):
            sink.write(StepRecord(step, step))
        sink.close()
    assert caplog.messages[-1] == "Flaky: 3 log lines could not be sent; metrics.jsonl has them"


def test_a_slow_sink_holds_up_neither_the_steps_nor_the_end(tmp_path, caplog):
    class Slow(Flaky):
        def write(self, record: StepRecord) -> None:
            time.sleep(30)

    sink = InBackground(Slow(), close_seconds=0.2)
    started = time.monotonic()
    sink.open(tmp_path, Config(), 0)
    for step in range(1000):
        sink.write(StepRecord(step, step))
    with caplog.at_level(logging.WARNING, "pretrain"):
        sink.close()
    assert time.monotonic() - started < 15
    assert "has not ended within 0.2 s" in caplog.messages[0] and "log lines could not be sent" in caplog.messages[1]


# ---- Prometheus -----------------------------------------------------------------------------------------------------------


def test_prometheus_reads_the_last_line_from_a_file_and_from_an_address(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = tmp_path / "run.prom"
    run = tmp_path / "a run"
    sinks = Sinks([Prometheus()], [], run, config_of(prometheus=PrometheusLog(file=str(file), port=port)), 0)
    before = time.time()
    for step in (1, 2):
        more = {"validation": {"books": 2.5, 'a "b"': 1.5}, "batch": "0" * 13, "experts": {"1": [3, 4]}}
        sinks.write(StepRecord(step, step * 64, 5.0 - step, mfu=None, **more))
    address = f"http://127.0.0.1:{port}/metrics"
    texts = [file.read_text(), urllib.request.urlopen(address, timeout=10).read().decode()]
    sinks.close()
    for text in texts:
        families = {family.name: family for family in parser.text_string_to_metric_families(text)}
        values = {
            (name, sample.labels.get("of")): sample.value for name, family in families.items() for sample in family.samples
        }
        assert values[("pretrain_step", None)] == 2 and values[("pretrain_steps", None)] == 4
        assert values[("pretrain_loss", None)] == 3.0 and values[("pretrain_validation", 'a "b"')] == 1.5
        assert values[("pretrain_updated_seconds", None)] >= before - 1
        assert {sample.labels["run"] for family in families.values() for sample in family.samples} == {"a run"}
        assert not [name for name in families if "mfu" in name or "batch" in name]
    with pytest.raises(OSError):
        urllib.request.urlopen(address, timeout=2)


# ---- the configuration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "package"),
    [
        (Log(wandb=WandbLog(project="p")), "wandb"),
        (Log(mlflow=MlflowLog(experiment="e")), "mlflow"),
        (Log(trackio=TrackioLog(project="p")), "trackio"),
        (Log(prometheus=PrometheusLog(port=9000)), "prometheus_client"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_package_that_is_missing_is_an_error_before_the_run(monkeypatch, log, package):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"needs the package {package}, which is not installed; run pip install"):
        check_trackers(log)
    check_trackers(Log())


def test_a_file_that_node_exporter_would_not_read_is_refused():
    pytest.importorskip("prometheus_client")
    check_trackers(Log(prometheus=PrometheusLog(file="f.prom")))
    with pytest.raises(ConfigError, match=r"log\.prometheus\.file=f\.txt: node_exporter reads only names that end with \.prom"):
        check_trackers(Log(prometheus=PrometheusLog(file="f.txt")))


def test_the_configuration_decides_the_sinks():
    def names(log: Log) -> list[str]:
        return [type(getattr(sink, "sink", sink)).__name__ for sink in own_sinks(log)]

    assert names(Log()) == ["JsonLines", "TensorBoard", "Console"]
    every = dataclasses.replace(
        Log(tensorboard=False),
        wandb=WandbLog(project="p"),
        mlflow=MlflowLog(experiment="e"),
        trackio=TrackioLog(project="p"),
        prometheus=PrometheusLog(file="f.prom"),
    )
    assert names(every) == ["JsonLines", "Prometheus", "WeightsAndBiases", "MlFlow", "Trackio", "Console"]
