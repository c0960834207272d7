"""The measurements of a run at a step: their record, the log that it is read from, and the clock behind the speeds."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

METRICS_FILE, STARTS_FILE, EVALUATIONS_FILE = "metrics.jsonl", "starts.jsonl", "evaluations.jsonl"


def measured(meaning: str, unit: str, of: str, when: str = "always") -> Any:
    """A field of `StepRecord`, described for docs/metrics.md: meaning, unit, the steps that it covers, and when it is logged."""
    described = {"meaning": meaning, "unit": unit, "of": of, "when": when}
    return dataclasses.field(default=None, metadata=described)


STEP, RUN, SINCE, AFTER = "this step", "the run", "since the last line", "after this step"
TOKEN_LOSS = "nats per target token"
FIRST_EXPONENT, LAST_EXPONENT = -40, 8
"""Gradients are counted by size from 2^-40 to 2^8."""
LAYERS = "at steps of `log.layers_every_steps`"


@dataclass
class StepRecord:
    """The numbers of a step, as metrics.jsonl, TensorBoard and every other sink get them. An unknown number is None, and left out.

    docs/metrics.md is generated from these fields. The main rank's record is the one that is logged. Its times, and what follows from them,
    are of its own clock; `compiled` and `communication` are its own as well. Only the main rank has `translation`, `device_hours`, `goodput`
    and `cost`. The numbers of a callback are what it returns. All else is equal on all ranks.
    """

    step: int = measured("optimizer steps made", "", RUN)
    tokens: int = measured("target tokens consumed, those of skipped steps as well: positions that carry a loss", "tokens", RUN)
    loss: float | None = measured("cross-entropy of the step's target tokens, before its update", TOKEN_LOSS, STEP)
    objective: float | None = measured(
        "what is minimised, where that is not the cross-entropy alone: weights of sources, z-loss, label smoothing, losses of routers, tokens further ahead",
        TOKEN_LOSS,
        STEP,
        "where it differs from `loss`",
    )
    grad_norm: float | None = measured("2-norm of all gradients together, before clipping", "", STEP)
    lr: float | None = measured("learning rate", "", STEP)
    skipped: int | None = measured(
        "steps that were skipped because they were not finite (`optim.skip_nonfinite`)", "steps", RUN, "from the first one on"
    )
    router_loss: float | None = measured(
        "auxiliary losses of routers, weighted, as they stand in `objective`",
        TOKEN_LOSS,
        STEP,
        "with `balance_loss` or `router_z_loss`",
    )
    batch: str | None = measured("digest of the step's samples, equal in every layout", "", STEP)
    seconds: float | None = measured(
        "wall-clock time of a step with its share of all else: data, validation, translation, saving, logging", "seconds", SINCE
    )
    tokens_per_second: float | None = measured(
        "target tokens of all ranks divided by wall-clock time", "tokens per second", SINCE
    )
    step_seconds: float | None = measured(
        "time of a step alone, from its batch in hand to the end of its update", "seconds", SINCE
    )
    step_tokens_per_second: float | None = measured(
        "target tokens of all ranks divided by that time", "tokens per second", SINCE
    )
    mfu: float | None = measured(
        "model FLOPs of the step alone, divided by the devices' peak (`pretrain/observe/flops.py` lists the devices). Per token they are 6 × parameters in "
        "matrix products + 12 × layers × width of attention × min(sequence length, window) (`model.family=hf`: without windows; linear attention: 18 × value_heads × key_dim × value_dim of a layer instead, 12 × of Mamba 2), as in PaLM (arXiv 2204.02311, appendix B): the output head counts, "
        "the embedding's look-up and recomputation do not, and attention counts as if it were not causal",
        "share",
        SINCE,
        "in bf16, where the peak is known; not on a CPU",
    )
    pipeline_wait: float | None = measured(
        "share of the time in steps that ranks of a pipeline waited for hidden states and gradients of other stages, mean over ranks",
        "share",
        SINCE,
        "with `parallel.pipeline`; not on a GPU",
    )
    compiled: dict[str, float] | None = measured(
        "what torch.compile did on the main rank: `functions` compiled, those of them that were compiled `again` for other inputs, `graph_breaks`, "
        "graphs taken `from_cache`, and the `seconds` of it all",
        "",
        SINCE,
        "with `parallel.compile`, when something was compiled",
    )
    memory: dict[str, float] | None = measured(
        "memory that a rank has used at most so far, the `largest` and the `mean` of all ranks: on a GPU what torch allocated, on a CPU the process's",
        "bytes",
        AFTER,
    )
    watts: float | None = measured(
        "mean power of all GPUs of the run together, by NVML (with the package nvidia-ml-py)",
        "watts",
        SINCE,
        "where every device's counter can be read",
    )
    joules_per_token: float | None = measured("the energy of these devices per target token", "joules", SINCE, "with `watts`")
    device_hours: float | None = measured(
        "time of all starts, each from its first to its last sign of life, times its devices (processes on a CPU)", "hours", RUN
    )
    goodput: float | None = measured(
        "share of this time in steps that count: the rest is start-up, data, validation, saving, and steps that were lost or skipped",
        "share",
        RUN,
    )
    cost: float | None = measured("`device_hours` times `log.device_hour_price`", "as the price", RUN, "with a price")
    communication: float | None = measured(
        "share of the step on the main rank in which a collective ran and nothing else",
        "share",
        STEP,
        "for steps of `log.profile`",
    )
    data_wait: float | None = measured(
        "share of the wall-clock time that was spent waiting for batches: in each step, for that of the rank that waited longest",
        "share",
        SINCE,
    )
    seconds_left: float | None = measured(
        "time until the last step, at this start's mean time per sample (per step with `data.pairs`), without its first step",
        "seconds",
        AFTER,
    )
    shares: dict[str, float] | None = measured(
        "by source, its share of the samples so far", "share", RUN, "with several sources"
    )
    source_loss: dict[str, float] | None = measured(
        "by source, the cross-entropy of its target tokens, each before its step's update",
        TOKEN_LOSS,
        SINCE,
        "with several sources",
    )
    experts: dict[str, list[int]] | None = measured(
        "by layer, target tokens that each expert got", "tokens", SINCE, "with experts"
    )
    expert_load: dict[str, float] | None = measured(
        "by layer, the largest of these divided by their mean; 1 is even", "", SINCE, "with experts"
    )
    gradient_norms: dict[str, float] | None = measured(
        "by layer, the 2-norm of its gradients, before clipping", "", STEP, LAYERS
    )
    weight_norms: dict[str, float] | None = measured("by layer, the 2-norm of its weights, before the update", "", STEP, LAYERS)
    update_norms: dict[str, float] | None = measured("by layer, the 2-norm of what the update changed", "", STEP, LAYERS)
    activations: dict[str, float] | None = measured(
        "by layer, the root mean square of the hidden states after it",
        "",
        STEP,
        f"{LAYERS}; not with `parallel.compile=model` or `model.family=hf`",
    )
    largest_activations: dict[str, float] | None = measured("by layer, their largest size", "", STEP, "with `activations`")
    attention_scores: dict[str, float] | None = measured(
        "by layer, the largest score that the softmax of attention was given, before soft-cap and biases; above some hundreds training becomes unstable",
        "",
        STEP,
        f"{LAYERS}; not with `parallel.compile` or `model.family=hf`",
    )
    gradient_sizes: dict[str, list[int]] | None = measured(
        "by layer, how many gradients lie between 2^e and 2^(e+1), for e from -40 (and all smaller ones) to 7 (and all larger ones); zeros are not counted",
        "gradients",
        STEP,
        LAYERS,
    )
    samples: dict[str, str] | None = measured(
        "by prompt, how the model continues it, always with the likeliest token",
        "",
        AFTER,
        "when validated, with `validation.prompts`",
    )
    validation: dict[str, float] | None = measured(
        "by source, the cross-entropy of its first `validation.sequences` samples", TOKEN_LOSS, AFTER, "when validated"
    )
    ema_validation: dict[str, float] | None = measured(
        "by source, the same with the running mean of the weights", TOKEN_LOSS, AFTER, "when validated, with `optim.ema_decay`"
    )
    bits_per_byte: dict[str, float] | None = measured(
        "by source, the same in bits per byte of text, by the source's mean bytes per token: it compares between tokenizers",
        "bits per byte",
        AFTER,
        "when validated, on data that was prepared from text alone, without token ids",
    )
    translation: dict[str, dict[str, float]] | None = measured(
        "by source, BLEU, chrF, CER and WER of its translations", "percent", AFTER, "when translated"
    )
    evaluation: dict[str, float] | None = measured(
        "by name, what your own callbacks measured ([extending.md](extending.md))", "", AFTER, "when they measured something"
    )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StepRecord:
        """A record that was read back. Unknown names are dropped."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        """The known numbers, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each number is, in words."""
        return {field.name: field.metadata["meaning"] for field in dataclasses.fields(cls)}

    def numbers(self) -> dict[str, float]:
        """Every known number except the step, nested ones under `parent/child`."""
        return {name: value for name, value in _flat(self.to_dict()) if name != "step" and isinstance(value, (int, float))}


def _flat(record: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items = []
    for name, value in record.items():
        items += _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else [(prefix + name, value)]
    return items


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a run's log that have a step, as written. Other lines (torn, damaged, foreign) are skipped."""
    with path.open("rb") as file:
        for line in file:
            if (found := _object_of(line)) is not None:
                yield found


def _object_of(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # ValueError: no JSON, or no UTF-8
        return None
    return found if isinstance(found, dict) and type(found.get("step")) is int else None


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl as written. Three kinds of lines are skipped: torn ones, those with a number of `StepRecord` of another type,
    and those that lack a number which every record has.
    """
    return (line for line in read_lines(path) if _is_record(line))


def record_of(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None for one that `read_records` skips."""
    found = _object_of(line)
    return found if found is not None and _is_record(found) else None


_KINDS = {field.name: field.type.removesuffix(" | None") for field in dataclasses.fields(StepRecord)}
_FLOATS = {name for name, kind in _KINDS.items() if kind == "float"}
_ALWAYS = [field.name for field in dataclasses.fields(StepRecord) if field.type == _KINDS[field.name]]


def _is_record(line: dict[str, Any]) -> bool:
    if any(line.get(name) is None for name in _ALWAYS):
        return False
    for name, value in line.items():
        if type(value) is float and name in _FLOATS and math.isfinite(value):
            continue  # nearly all values: a long log has ten million of them
        if name in _KINDS and not _is(value, _KINDS[name]):
            return False
    return True


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a type such as `dict[str, float]`. A number may be null, where it was not finite."""
    if isinstance(value, float):
        return kind in ("int", "float") and math.isfinite(value)
    if kind.startswith("dict[str, "):
        return isinstance(value, dict) and all(_is(item, kind[len("dict[str, ") : -1]) for item in value.values())
    if kind in ("int", "float"):
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63)
    return isinstance(value, list if kind.startswith("list") else str)


def read_metrics(run_directory: Path) -> list[dict[str, Any]]:
    """The records of a run in order of steps.

    A run that went back to a checkpoint logs an earlier step again; the old records from that step on are dropped.
    """
    records: list[dict[str, Any]] = []
    for record in read_records(run_directory / METRICS_FILE):
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    return records


def known_records(run_directory: Path, until: int) -> list[StepRecord]:
    """The run's records up to a step. The log only observes the run: an unreadable log is a warning, and a missing one is empty."""
    try:
        records = read_metrics(run_directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s: cannot be read: %s; the run goes on", run_directory / METRICS_FILE, error.strerror or error)
        return []
    return [StepRecord.from_dict(record) for record in records if record["step"] <= until]


def shown_number(value: float | None, form: str) -> str:
    """A number of a record for people. One that was not finite is logged as null."""
    return "not finite" if value is None else f"{value:{form}}"


def number_or_dash(value: float | None, form: str) -> str:
    """A number of a record for people; `-` if it is unknown."""
    return "-" if value is None else f"{value:{form}}"


def duration(seconds: float | None) -> str:
    """A time as a person writes it; `-` if it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


class SpeedClock:
    """Wall-clock time since the last report. It includes validation, saving and everything else that is not a step."""

    def __init__(self) -> None:
        self._all_steps, self._after_first, self._timed = 0, 0.0, 0.0
        self._begin(time.monotonic())

    def _begin(self, now: float) -> None:
        self._started, self._steps = now, 0
        self.tokens, self.computed = 0, 0.0
        """Target tokens, and seconds in steps, since the last report."""
        self._waited = self._flops = 0.0

    def add(self, computed: float, waited: float, tokens: int, flops: float = 0.0) -> None:
        """Add a step: the seconds that it computed, the seconds that its batches were waited for before, its target tokens, and the model's FLOPs."""
        self._steps += 1
        self._all_steps += 1
        self.tokens += tokens
        self.computed += computed
        self._waited += waited
        self._flops += flops
        if self._all_steps == 1:
            self._after_first = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the last report."""
        return time.monotonic() - self._started

    def take(self) -> dict[str, float]:
        """The numbers about speed in docs/metrics.md. The window then starts anew."""
        now = time.monotonic()
        seconds = now - self._started
        speed = {
            "tokens_per_second": self.tokens / seconds,
            "seconds": seconds / self._steps,
            "step_tokens_per_second": self.tokens / self.computed,
            "step_seconds": self.computed / self._steps,
            "data_wait": self._waited / seconds,
        }
        # The first step of a start compiles and warms up. Later ones show how long steps take, with their share of all else.
        self._timed = now - self._after_first if self.left_out else seconds
        self._begin(now)
        return speed

    @property
    def flops_per_second(self) -> float:
        """Over the seconds in steps since the last report."""
        return self._flops / self.computed

    @property
    def left_out(self) -> int:
        """Steps at the beginning of this start that `left` does not go by."""
        return int(self._all_steps > 1)

    @property
    def timed_steps(self) -> int:
        """Steps of this start that `left` goes by."""
        return self._all_steps - self.left_out

    def left(self, share: float) -> float:
        """Seconds for so many times the work of the timed steps, at their mean speed at the last report."""
        return share * self._timed
