"""The section log: what a run writes about itself, and where."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.keys import MOST_STEPS, SET, key, section


@dataclass
class WandbLog:
    """Weights & Biases (wandb.ai), from the main rank. A run that is continued continues there too."""

    project: str | None = key(
        None, "Send the numbers of each log line to this project; needs the package wandb (the extra `trackers`)."
    )
    entity: str | None = key(
        None, "Team or user that the project belongs to; null: the login's default.", when={"log.wandb.project": SET}
    )
    group: str | None = key(None, "Group that the run is shown in.", when={"log.wandb.project": SET})
    tags: list[str] = key([], "Tags of the run.", when={"log.wandb.project": SET})
    offline: bool = key(
        False,
        "Make no connection; write files to wandb/ of the run directory, for `wandb sync` later.",
        when={"log.wandb.project": SET},
    )


@dataclass
class MlflowLog:
    """MLflow (mlflow.org), from the main rank. A run that is continued continues there too."""

    experiment: str | None = key(
        None, "Send the numbers of each log line to this experiment; needs the package mlflow (the extra `trackers`)."
    )
    uri: str | None = key(
        None,
        "Tracking server or place, such as http://host:5000; null: what MLFLOW_TRACKING_URI says.",
        when={"log.mlflow.experiment": SET},
    )


@dataclass
class TrackioLog:
    """Trackio (Hugging Face), from the main rank. A run that is continued continues there too."""

    project: str | None = key(None, "Write the numbers of each log line to this project; needs the package trackio.")
    space: str | None = key(
        None,
        "Space of the Hugging Face Hub that shows them, such as user/name; null: a local database.",
        when={"log.trackio.project": SET},
    )


@dataclass
class PrometheusLog:
    """The last log line as Prometheus metrics, for Grafana and alerts, from the main rank."""

    file: str | None = key(
        None,
        "Text file that is replaced at each log line, for node_exporter's textfile collector (its name must end with .prom). Needs the package "
        "prometheus_client (the extra `trackers`).",
    )
    port: int | None = key(None, "Port at which the main rank's host answers http://HOST:PORT/metrics.", ge=1, le=65535)


@dataclass
class Log:
    """What is reported."""

    every_steps: int = key(10, "Optimizer steps between log lines.", ge=1, le=MOST_STEPS)
    layers_every_steps: int = key(
        0,
        "Optimizer steps between statistics of each layer: norms of weights, gradients and updates, sizes of activations, largest scores of attention. "
        "0: none. Such a step takes longer, and copies the weights once.",
        ge=0,
        le=MOST_STEPS,
    )
    device_hour_price: float | None = key(
        None, "Price of an hour of one device (on a CPU: of one process), in any currency, for `cost` in the log.", ge=0, le=1e6
    )
    tensorboard: bool = key(True, "Write TensorBoard event files.")
    wandb: WandbLog = section(WandbLog)
    mlflow: MlflowLog = section(MlflowLog)
    trackio: TrackioLog = section(TrackioLog)
    prometheus: PrometheusLog = section(PrometheusLog)
    gradients_at: list[int] = key(
        [],
        "Steps whose whole gradients, before clipping, are written to gradients/step-00000001.safetensors (of step 1), to compare layouts.",
        ge=1,
        le=MOST_STEPS,
    )
    memory_history: bool = key(
        False,
        "Remember the last 200,000 allocations of GPU memory, and write them to profile/ when a step does not fit. Costs some percent of a step; GPUs only.",
    )
    profile: list[int] = key(
        [],
        "Steps that torch.profiler records on every rank: traces and a page on where time and memory go, in profile/.",
        ge=1,
        le=MOST_STEPS,
    )
