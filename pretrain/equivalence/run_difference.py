"""Where two runs part: the first step and the first parameter that differ, and what was configured differently.

For two layouts, commits or number formats of one run. Start both with the same `log.gradients_at`. Then the gradients of those steps are compared, by
parameter, in the order in which a forward pass meets them. Checkpoints of the same step are compared too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pretrain.checkpoint import files
from pretrain.checkpoint.payload import Payload
from pretrain.config.written import from_recorded
from pretrain.errors import DataError
from pretrain.models import network_without_values
from pretrain.observe.run_story import RunStory, configuration_of, differences, read_story

NUMBERS = (
    "tokens", "loss", "objective", "grad_norm", "lr", "router_loss", "source_loss",
    "validation", "ema_validation", "bits_per_byte", "translation", "evaluation",
)  # fmt: skip
"""Fields of a logged step that follow from the run alone, and not from the machine or the time."""
NAMED = 5
"""Parameters that are named of those that differ."""


@dataclass
class Difference:
    """What was compared, in lines, and whether something differs. `parted`: the first step at which something does."""

    lines: list[str] = field(default_factory=list)
    parted: int | None = None

    def note(self, what: str, line: str, step: int | None = None) -> None:
        self.lines.append(f"{what:14} {line}")
        if step is not None:
            self.parted = step if self.parted is None else min(self.parted, step)


def compare_runs(first: Path, second: Path, tolerance: float) -> Difference:
    """Compare what two run directories hold. Numbers differ if they are further apart than `tolerance` times the larger one.

    Raises DataError for a directory without a run, and CheckpointError for a damaged checkpoint.
    """
    stories = read_story(first), read_story(second)
    found = Difference()
    _compare_configurations(stories, found)
    _compare_records(stories, tolerance, found)
    _compare_layers(stories, tolerance, found)
    order = _forward_order(stories[0])
    _compare_gradients(first, second, order, tolerance, found)
    _compare_checkpoints(first, second, order, tolerance, found)
    return found


def _compare_configurations(stories: tuple[RunStory, RunStory], found: Difference) -> None:
    chosen = [configuration_of(story.starts[-1]) if story.starts else {} for story in stories]
    differ = differences(chosen)
    differ = {key: values for key, values in differ.items() if key not in ("run.name", "run.dir")}
    for key, (one, other) in differ.items():
        found.note("configuration", f"{key}: {one} | {other}")
    if not differ:
        found.note("configuration", "equal")


def _compare_records(stories: tuple[RunStory, RunStory], tolerance: float, found: Difference) -> None:
    by_step = [{record["step"]: record for record in story.records} for story in stories]
    steps = sorted(by_step[0].keys() & by_step[1].keys())
    if not steps:
        raise DataError("the runs have no logged step in common; log the same steps (log.every_steps)")
    pairs = [(step, by_step[0][step], by_step[1][step]) for step in steps]
    found.note("steps", f"{len(steps)} logged in both, {steps[0]} to {steps[-1]}")
    apart = next((step for step, one, other in pairs if one.get("batch") != other.get("batch")), None)
    found.note(
        "samples",
        "equal" if apart is None else f"differ from step {apart} on: the runs do not train on the same batches",
        apart,
    )
    numbers = [(step, _numbers(one), _numbers(other)) for step, one, other in pairs]
    names = dict.fromkeys(name for _, one, other in numbers for name in one if name in other)
    for name in names:
        values = [(step, one[name], other[name]) for step, one, other in numbers if name in one and name in other]
        apart = next((item for item in values if _relative(item[1], item[2]) > tolerance), None)
        most = max((_relative(one, other) for _, one, other in values), default=0.0)
        if apart is None:
            found.note(name, f"equal within {tolerance:g} (most {most:.2g})")
        else:
            step, one, other = apart
            found.note(
                name,
                f"differs first at step {step}: {one:.8g} | {other:.8g} ({_relative(one, other):.2g}); most {most:.2g}",
                step,
            )
    for number, story in enumerate(stories):
        own = {name.partition("/")[0] for pair in numbers for name in pair[1 + number]}
        for name in sorted(own - {name.partition("/")[0] for pair in numbers for name in pair[2 - number]}):
            found.note(name, f"not compared: only {story.directory} has it at these steps")


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """NUMBERS of a record, those by source under `validation/books`."""
    # A step that was skipped has no loss.
    logged = [(name, record.get(name)) for name in NUMBERS if name in record or name == "loss"]
    return {key: part for name, value in logged for key, part in _parts(name, value)}


def _parts(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _parts(f"{name}/{key}", part)
    else:
        yield name, math.nan if value is None else value  # what is logged as null was not finite


def _compare_layers(stories: tuple[RunStory, RunStory], tolerance: float, found: Difference) -> None:
    """Statistics of layers at the steps where both runs have them (`log.layers_every_steps`), in the order in which a step makes them."""
    records = [{r["step"]: r for r in story.records if "gradient_norms" in r} for story in stories]
    steps = sorted(records[0].keys() & records[1].keys())
    if not steps:
        found.note("layers", "not compared: give both runs the same log.layers_every_steps")
    for name in ("weight_norms", "activations", "attention_scores", "gradient_norms", "update_norms"):
        pairs = [(step, records[0][step].get(name), records[1][step].get(name)) for step in steps]
        apart = [
            (step, layer, one[layer], other.get(layer))
            for step, one, other in pairs
            for layer in (one if one and other else ())
            if not _are_close(one[layer], other.get(layer), tolerance)
        ]
        if apart:
            step, layer, one, other = apart[0]
            found.note(name, f"differ first at step {step}, {layer}: {one} | {other}; {len(apart)} values in all", step)
        elif any(one and other for _, one, other in pairs):
            found.note(name, f"of all layers equal within {tolerance:g} at {len(steps)} steps")


def _are_close(one: Any, other: Any, tolerance: float) -> bool:
    return _relative(one, other) <= tolerance if _is_number(one) and _is_number(other) else one == other


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _relative(one: float, other: float) -> float:
    """The difference as a share of the larger number. A number is infinitely far from none."""
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    larger = max(abs(one), abs(other))
    return abs(one - other) / larger if larger else 0.0


def _forward_order(story: RunStory) -> list[str]:
    """Names of parameters as a forward pass meets them; none if the run's model cannot be built from its record."""
    if not story.starts:
        return []
    config = from_recorded(story.starts[-1]["config"], str(story.directory))
    return [name for name, _ in network_without_values(config).named_parameters()]


def _compare_gradients(first: Path, second: Path, order: list[str], tolerance: float, found: Difference) -> None:
    names = sorted({path.name for path in (first / "gradients").glob("*.safetensors")})
    common = [name for name in names if (second / "gradients" / name).is_file()]
    for name in common:
        step = int(Path(name).stem.removeprefix("step-"))
        _compare_tensors(
            "gradients", step, _of_files(first / "gradients" / name, second / "gradients" / name), order, tolerance, found
        )
    if not common:
        found.note("gradients", "not compared: give both runs the same log.gradients_at=[STEP]")


def _of_files(first: Path, second: Path) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    try:
        with safe_open(first, "pt") as one, safe_open(second, "pt") as other:
            names = dict.fromkeys([*one.keys(), *other.keys()])
            for name in names:
                yield (
                    name,
                    one.get_tensor(name) if name in one.keys() else None,
                    other.get_tensor(name) if name in other.keys() else None,
                )
    except SafetensorError as error:
        raise DataError(f"{first} or {second} cannot be read: {error}") from error


def _compare_checkpoints(first: Path, second: Path, order: list[str], tolerance: float, found: Difference) -> None:
    of_first = {path.name: path for path in files.complete_checkpoints(first / "checkpoints")}
    of_second = {path.name: path for path in files.complete_checkpoints(second / "checkpoints")}
    common = sorted(of_first.keys() & of_second.keys())
    for name in common:
        pairs = _of_payloads(Payload(of_first[name]), Payload(of_second[name]))
        _compare_tensors("weights", files.step_of(of_first[name]), pairs, order, tolerance, found)
    if not common:
        found.note("weights", "not compared: no checkpoint of the same step")


def _of_payloads(one: Payload, other: Payload) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    prefix = "model."
    names = dict.fromkeys([*one.names(prefix), *other.names(prefix)])
    for name in names:
        tensors = [payload.read([name])[name] if name in payload.items else None for payload in (one, other)]
        yield name.removeprefix(prefix), *tensors


def _compare_tensors(
    what: str,
    step: int,
    pairs: Iterable[tuple[str, Tensor | None, Tensor | None]],
    order: list[str],
    tolerance: float,
    found: Difference,
) -> None:
    """Compare by the norm of the difference over the larger norm, parameter by parameter."""
    apart: dict[str, float] = {}
    count = 0
    for name, one, other in pairs:
        count += 1
        distance = _distance(one, other)
        if not distance <= tolerance:  # also if it is no number
            apart[name] = distance
    place = {name: index for index, name in enumerate(order)}
    ordered = sorted(apart, key=lambda name: place.get(name, len(place)))
    if not apart:
        found.note(what, f"step {step}: all {count} parameters equal within {tolerance:g}")
        return
    named = ", ".join(f"{name} ({apart[name]:.2g})" for name in ordered[:NAMED])
    worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
    found.note(
        what,
        f"step {step}: {len(apart)} of {count} parameters differ, from the input on: {named}"
        f"{', ...' if len(apart) > NAMED else ''}; most: {worst} ({apart[worst]:.2g})",
        step,
    )


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    one, other = one.double(), other.double()
    larger = max(float(one.norm()), float(other.norm()))
    return float((one - other).norm()) / larger if larger else 0.0
