"""The last log line as Prometheus metrics: a text file for node_exporter, an address to scrape, or both (`log.prometheus`)."""

from __future__ import annotations

from pathlib import Path

from pretrain.config.schema import Config
from pretrain.observe.metrics import StepRecord
from pretrain.observe.sinks import Sink


class Prometheus(Sink):
    """Gauges `pretrain_NAME{run="..."}` of a record's numbers. Numbers by source, layer or name have a second label, `of`.

    `pretrain_updated_seconds` is the time of the last log line, so that an alert sees a run that stands still.
    """

    name = "Prometheus"
    beside = True

    def __init__(self) -> None:
        self._server = None

    def open(self, directory: Path, config: Config, step: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        chosen, self._run = config.log.prometheus, directory.name
        self._file = chosen.file
        self._registry, self._gauges = CollectorRegistry(), {}
        self._set("steps", config.run.steps, "steps of the whole run")
        if chosen.port is not None:
            self._server, self._thread = start_http_server(chosen.port, registry=self._registry)

    def write(self, record: StepRecord) -> None:
        from prometheus_client import write_to_textfile

        meanings = record.meanings()
        for name, value in {"step": record.step, **record.numbers()}.items():
            name, _, of = name.partition("/")
            self._set(name, value, meanings[name], of)
        self._gauge("updated_seconds", "Unix time of the last log line", "").labels(self._run).set_to_current_time()
        if self._file is not None:
            write_to_textfile(self._file, self._registry)

    def _set(self, name: str, value: float, meaning: str, of: str = "") -> None:
        gauge = self._gauge(name, meaning, of)
        (gauge.labels(self._run, of) if of else gauge.labels(self._run)).set(value)

    def _gauge(self, name: str, meaning: str, of: str):
        from prometheus_client import Gauge

        if name not in self._gauges:
            labels = ["run", "of"] if of else ["run"]
            self._gauges[name] = Gauge(f"pretrain_{name}", meaning, labels, registry=self._registry)
        return self._gauges[name]

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
