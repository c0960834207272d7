"""Experiment trackers as sinks: Weights & Biases, MLflow and Trackio. `log.wandb`, `log.mlflow` and `log.trackio` turn them on.

A run has one entry in a tracker, whatever restarts: its id is kept in the run directory (trackers.json). Every start adds to that entry. A run that
went back to a checkpoint sends the repeated steps again, and the tracker shows both.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import re
import secrets
import time
from pathlib import Path
from typing import Any

from pretrain.config.log_schema import Log
from pretrain.config.schema import Config
from pretrain.config.written import flatten
from pretrain.errors import ConfigError, install_command, without_secrets
from pretrain.observe.background import InBackground, Tracker, kept_id
from pretrain.observe.metrics import StepRecord
from pretrain.observe.prometheus import Prometheus
from pretrain.observe.sinks import Console, JsonLines, Sink, TensorBoard

log = logging.getLogger(__name__)

SAMPLE_COLUMNS = ["step", "prompt", "continuation"]
MLFLOW_BATCH = {"metrics": 1000, "params": 100}
"""The most that a request of MLflow's REST API takes (mlflow.org, "Log Batch")."""
MLFLOW_VALUE = 6000
"""The longest value of a parameter there, in characters."""


def _without_secrets(value: Any) -> Any:
    """Settings for others to see: URLs of data lose user, password and query."""
    if isinstance(value, dict):
        return {name: _without_secrets(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_without_secrets(each) for each in value)
    return without_secrets(value) if isinstance(value, str) else value


def own_sinks(config: Log) -> list[Sink]:
    """The sinks that a configuration asks for. Trackers have a thread of their own each."""
    prometheus = config.prometheus.file is not None or config.prometheus.port is not None
    trackers = {
        WeightsAndBiases: config.wandb.project,
        MlFlow: config.mlflow.experiment,
        Trackio: config.trackio.project,
    }
    return [
        JsonLines(),
        *([TensorBoard()] if config.tensorboard else []),
        *([Prometheus()] if prometheus else []),
        *(InBackground(kind()) for kind, project in trackers.items() if project is not None),
        Console(),
    ]


def check_trackers(config: Log) -> None:
    """Raise ConfigError if the package of a tracker is not installed, so that it is known before the run."""
    needed = {
        "log.wandb.project": (config.wandb.project, "wandb"),
        "log.mlflow.experiment": (config.mlflow.experiment, "mlflow"),
        "log.trackio.project": (config.trackio.project, "trackio"),
        "log.prometheus.file": (config.prometheus.file, "prometheus_client"),
        "log.prometheus.port": (config.prometheus.port, "prometheus_client"),
    }
    for key, (value, package) in needed.items():
        if value is not None and importlib.util.find_spec(package) is None:
            how = "pip install trackio" if package == "trackio" else install_command("trackers")
            raise ConfigError(f"{key} needs the package {package}, which is not installed; run {how}, or remove the key")
    if (file := config.prometheus.file) is not None and not file.endswith(".prom"):
        raise ConfigError(
            f"log.prometheus.file={file}: node_exporter reads only names that end with .prom; give it such a name"
        )


def sample_rows(record: StepRecord) -> list[list[Any]]:
    """The record's samples as rows of SAMPLE_COLUMNS."""
    return [[record.step, prompt, text] for prompt, text in (record.samples or {}).items()]


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases. Its curves have the optimizer step as x-axis; `wandb.Run.log` cannot go back in steps of its own."""

    name, tracker = "Weights & Biases", "wandb"

    def arrived(self) -> int:
        """The last step that the server has, of an entry that goes on. Offline there is nobody to ask."""
        return int(self._run.summary.get("step") or 0) if self._run.resumed else 0

    def open(self, directory: Path, config: Config, step: int) -> None:
        import wandb

        chosen = config.log.wandb
        self._run = wandb.init(
            project=chosen.project,
            entity=chosen.entity,
            group=chosen.group,
            tags=chosen.tags or None,
            name=directory.name,
            id=kept_id(directory, "wandb", secrets.token_hex(8)),
            resume="allow",
            dir=str(directory),
            mode="offline" if chosen.offline else "online",
            settings=wandb.Settings(console="off", quiet=True, disable_git=True, disable_code=True),
        )
        self._run.config.update(_without_secrets(dataclasses.asdict(config)), allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, record: StepRecord) -> None:
        import wandb

        texts = {"samples": wandb.Table(SAMPLE_COLUMNS, sample_rows(record))} if record.samples else {}
        self._run.log({"step": record.step, **record.numbers(), **texts})

    def close(self) -> None:
        if (run := getattr(self, "_run", None)) is not None:
            if not self.failed and not self.finished:
                run.mark_preempting()  # a run that was asked to stop goes on later
            run.finish(exit_code=0 if self.finished and not self.failed else 1)


class MlFlow(Tracker):
    """A run of MLflow: numbers as metrics, the configuration of the first start as parameters, which MLflow does not let change."""

    name, tracker, is_immediate = "MLflow", "mlflow", True

    def open(self, directory: Path, config: Config, step: int) -> None:
        from mlflow.tracking import MlflowClient

        chosen, self._warned = config.log.mlflow, False
        self._client = MlflowClient(chosen.uri)
        self._id = kept_id(directory, "mlflow")
        if self._id is None:
            experiment = self._client.get_experiment_by_name(chosen.experiment)
            place = experiment.experiment_id if experiment else self._client.create_experiment(chosen.experiment)
            self._id = kept_id(directory, "mlflow", self._client.create_run(place, run_name=directory.name).info.run_id)
            self._log_parameters(config)
        self._client.update_run(self._id, status="RUNNING")

    def _log_parameters(self, config: Config) -> None:
        from mlflow.entities import Param

        parameters = [
            Param(key, str(value)[:MLFLOW_VALUE])
            for key, value in flatten(_without_secrets(dataclasses.asdict(config))).items()
        ]
        for first in range(0, len(parameters), MLFLOW_BATCH["params"]):
            self._client.log_batch(self._id, params=parameters[first : first + MLFLOW_BATCH["params"]])

    def write(self, record: StepRecord) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        # Names may have letters, digits and _-./ and spaces.
        metrics = [
            Metric(re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII), value, now, record.step)
            for name, value in record.numbers().items()
        ]
        for first in range(0, len(metrics), MLFLOW_BATCH["metrics"]):
            self._client.log_batch(self._id, metrics=metrics[first : first + MLFLOW_BATCH["metrics"]])
        if record.samples:
            self._log_samples(record)

    def _log_samples(self, record: StepRecord) -> None:
        """A text file among the run's artifacts. They have storage of their own, so that numbers go on where it fails."""
        text = "\n\n".join(f"{prompt}{continued}" for _, prompt, continued in sample_rows(record))
        try:
            self._client.log_text(self._id, text + "\n", f"samples/step-{record.step:08d}.txt")
        except Exception as error:
            if not self._warned:
                reason = " ".join(str(error).split())[:300]
                log.warning(
                    "MLflow: samples cannot be stored as artifacts: %s: %s; metrics.jsonl has them",
                    type(error).__name__,
                    reason,
                )
            self._warned = True

    def close(self) -> None:
        if getattr(self, "_id", None) is not None:
            ended = "FAILED" if self.failed else "FINISHED" if self.finished else "KILLED"
            self._client.set_terminated(self._id, ended)


class Trackio(Tracker):
    """A run of Trackio, in its local database or in a Space of the Hugging Face Hub."""

    name, tracker = "Trackio", "trackio"

    def open(self, directory: Path, config: Config, step: int) -> None:
        import trackio

        chosen = config.log.trackio
        name = kept_id(directory, "trackio", f"{directory.name}-{secrets.token_hex(4)}")
        settings = flatten(_without_secrets(dataclasses.asdict(config)))
        self._run = trackio.init(chosen.project, name=name, space_id=chosen.space, config=settings, resume="allow", embed=False)

    def write(self, record: StepRecord) -> None:
        import trackio

        texts = {"samples": trackio.Table(columns=SAMPLE_COLUMNS, data=sample_rows(record))} if record.samples else {}
        self._run.log({**record.numbers(), **texts}, step=record.step)

    def close(self) -> None:
        if (run := getattr(self, "_run", None)) is not None:
            run.finish()
