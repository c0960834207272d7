"""Trackio itself, in an environment of its own: one run over two starts, in its own database."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from other_programs import child_environment, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from pathlib import Path
from pretrain.config.log_schema import Log, TrackioLog
from pretrain.config.schema import Config
from pretrain.observe.metrics import StepRecord
from pretrain.observe.trackers import Trackio
run = Path(sys.argv[1])
config = Config(log=Log(trackio=TrackioLog(project="tests")))
for first in (1, 3):
    sink = Trackio()
    sink.open(run, config, first - 1)
    for step in (first, first + 1):
        sink.write(StepRecord(step, 64 * step, 5.0 - step, samples={"one": " two"} if step == 4 else None))
    sink.close()
import trackio
from trackio.sqlite_storage import SQLiteStorage
names = SQLiteStorage.get_runs("tests")
logs = [SQLiteStorage.get_logs("tests", name) for name in names]
print("FOUND " + json.dumps([[entry["step"], entry["loss"]] for log in logs for entry in log]), len(names))
print("TABLE " + json.dumps(logs[0][-1]["samples"]["_value"]))
"""


def test_a_run_goes_on_after_a_restart(tmp_path):
    python = environment("trackio", "trackio==0.43.0")
    (tmp_path / "run").mkdir()
    own = {"PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-c", PROGRAM, tmp_path / "run"], env=child_environment() | own, capture_output=True, text=True
    )
    [table] = [line for line in done.stdout.splitlines() if line.startswith("TABLE")] or [done.stderr]
    assert json.loads(table.removeprefix("TABLE ")) == [{"step": 4, "prompt": "one", "continuation": " two"}]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND")] or [done.stderr]
    found, runs = line.removeprefix("FOUND ").rsplit(" ", 1)
    assert json.loads(found) == [[1, 4.0], [2, 3.0], [3, 2.0], [4, 1.0]] and runs == "1"
