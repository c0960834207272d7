"""A page about runs: one HTML file that needs no network. `report_page.html` draws what is put together here."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from pretrain.observe.metrics import StepRecord, duration, shown_number
from pretrain.observe.run_story import RunStory, configuration_of, costs_until_now, differences, read_story, silence, thinned
from pretrain.storage import plain, replace_text

TEMPLATE = Path(__file__).with_name("report_page.html")
PLACE = "__DATA__"
KEPT = (
    "step", "tokens", "loss", "objective", "grad_norm", "lr", "seconds", "tokens_per_second", "step_tokens_per_second", "mfu", "data_wait",
    "pipeline_wait", "shares", "expert_load", "source_loss", "validation", "ema_validation", "bits_per_byte", "translation", "evaluation", "memory",
    "watts", "gradient_norms", "weight_norms", "update_norms", "activations", "largest_activations", "attention_scores",
)  # fmt: skip
"""Fields of a log line that the page shows."""
SAMPLED = 5
"""Validations of which the page shows what the model wrote: the last ones."""


def write_page(directories: list[Path], output: Path) -> None:
    """Write a page about some runs. Raises DataError for a directory without a run."""
    data = page_data([read_story(directory) for directory in directories])
    # In a script element only `</` and `<!--` would end or change it: no `<` is left.
    text = json.dumps(plain(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text), durable=False)


def page_data(stories: list[RunStory]) -> dict[str, Any]:
    """All that the page shows, as JSON values."""
    names = _unique_names(stories)
    last = [configuration_of(story.starts[-1]) if story.starts else {} for story in stories]
    return {
        "meanings": StepRecord.meanings(),
        "runs": [_run(story, name) for story, name in zip(stories, names)],
        "differences": _texts(differences(last)) if len(stories) > 1 else {},
    }


def _unique_names(stories: list[RunStory]) -> list[str]:
    names = [story.name for story in stories]
    return [name if names.count(name) == 1 else str(story.directory) for name, story in zip(names, stories)]


def _run(story: RunStory, name: str) -> dict[str, Any]:
    records = thinned(story.records)
    starts = story.starts
    return {
        "name": name,
        "facts": facts(story),
        "records": [_kept(record) for record in sorted([*records, *story.evaluations], key=lambda record: record["step"])],
        "shown": [len(records), len(story.records)],
        "repeated": [[_kept(record) for record in thinned(stretch)] for stretch in story.repeated],
        "starts": [{"step": s["step"], "time": s.get("time"), "ranks": s.get("world_size")} for s in starts],
        "seconds": story.seconds(),
        "samples": [{"step": r["step"], "samples": r["samples"]} for r in story.records if "samples" in r][-SAMPLED:],
        "changes": [
            {"step": after["step"], "keys": _texts(differences([configuration_of(before), configuration_of(after)]))}
            for before, after in zip(starts, starts[1:])
        ],
        "configuration": {key: _text(value) for key, value in (configuration_of(starts[-1]) if starts else {}).items()},
        "environment": {key: _text(value) for key, value in (starts[-1].get("environment", {}) if starts else {}).items()},
    }


def facts(story: RunStory) -> dict[str, str]:
    """The run in a few numbers, ready to be read."""
    losses = [record for record in story.records if record.get("loss") is not None]
    first, last, state = losses[0], losses[-1], story.status.get("state", "unknown")
    told = story.status.get("reason") or silence(
        story.status, [record["step"] for record in story.records[-2:]], story.records[-1]
    )
    costs = costs_until_now(last, story.status)
    found = {
        "state": f"{state}: {told}" if told else state,
        "steps": f"{story.records[-1]['step']:,}",
        "tokens": f"{last['tokens']:,}",
        "loss": f"{first['loss']:.4f} -> {last['loss']:.4f} nats per token (steps {first['step']:,} to {last['step']:,})",
    }
    for field, unit in (("validation", "nats per token"), ("bits_per_byte", "bits per byte")):
        measured = [record for record in story.records if field in record][-1:]
        found |= {
            f"{field.replace('_', ' ')}, {name}": f"{shown_number(value, '.4f')} {unit} at step {r['step']:,}"
            for r in measured
            for name, value in r[field].items()
        }
    speeds = [record["tokens_per_second"] for record in story.records if record.get("tokens_per_second")]
    if speeds:
        found["speed"] = f"{statistics.median(speeds):,.0f} tokens per second (median)"
    shares = [record["mfu"] for record in story.records if record.get("mfu") is not None]
    if shares:
        found["MFU"] = f"{statistics.median(shares):.1%} (median)"
    found["energy"] = _in_words(last, joules_per_token="{:.4g} joules per token", watts="{:,.0f} watts")
    found["starts"] = str(len(story.starts) or 1)
    found["device hours"] = _in_words(costs, device_hours="{:,.4g}", goodput="{:.1%} of them in steps that count")
    found["cost"] = _in_words(costs, cost="{:,.2f}")
    found["time"] = duration(sum(story.seconds().values()))
    return {name: text for name, text in found.items() if text}


def _in_words(record: dict[str, Any], **forms: str) -> str:
    """Numbers of a record in words, up to the first that it lacks. Another program may have written the record."""
    known = itertools.takewhile(lambda name: record.get(name) is not None, forms)
    return ", ".join(forms[name].format(record[name]) for name in known)


def _kept(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in KEPT if name in record}


def _texts(found: dict[str, list[Any]]) -> dict[str, list[str]]:
    return {key: [_text(value) for value in values] for key, values in found.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
