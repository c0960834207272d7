"""The page of tools/report.py: what it says of a run's starts and its time, and how a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from running import tool

from pretrain.errors import DataError
from pretrain.observe.report_page import page_data, write_page
from pretrain.observe.run_story import read_story, thinned

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)")


def line(step: int, loss: float | None = None, **more) -> str:
    numbers = {
        "step": step,
        "tokens": step * 64,
        "loss": 9.0 - step / 100 if loss is None else loss,
        "grad_norm": 1.0,
        "lr": 1e-3,
    }
    numbers |= {"seconds": 1.0, "step_seconds": 0.7, "data_wait": 0.1, "tokens_per_second": 64.0}
    return json.dumps(numbers | more) + "\n"


def start(step: int, when: str, **config) -> str:
    about = {
        "step": step,
        "time": f"2026-11-23T{when}Z",
        "world_size": 2,
        "config": config,
        "environment": {"platform": "Slurm job 7"},
    }
    return json.dumps(about) + "\n"


def write_run(folder: Path, name: str = "run", lr: float = 1e-3) -> Path:
    """Steps 1 to 60, then back to step 40 with another rate, and on to step 100. A line each ten steps."""
    run = folder / name
    run.mkdir(parents=True)
    first = "".join(line(step) for step in (1, 10, 20, 30, 40, 50, 60))
    second = "".join(
        line(step, validation={"books": 4.0, "<script>": 3.0} if step == 100 else None) for step in range(50, 101, 10)
    )
    (run / "metrics.jsonl").write_text(first + second.replace(', "validation": null', ""))
    (run / "starts.jsonl").write_text(
        start(0, "10:00:00", optim={"lr": lr, "clip": 1.0}) + start(40, "10:05:00", optim={"lr": lr / 2, "clip": 1.0})
    )
    (run / "status.json").write_text(json.dumps({"state": "finished", "reason": None, "updated": "2026-11-23T10:10:00Z"}))
    return run


def test_a_story_keeps_what_was_repeated_and_the_time_adds_up(tmp_path):
    story = read_story(write_run(tmp_path))
    assert [record["step"] for record in story.records] == [1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert [[record["step"] for record in stretch] for stretch in story.repeated] == [[50, 60]]
    assert story.steps_of(story.records) == [1, 9, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    parts = story.seconds()
    assert sum(parts.values()) == pytest.approx(600.0)
    assert parts["steps"] == pytest.approx(70.0) and parts["waiting for data"] == pytest.approx(10.0)
    assert parts["evaluation, saving, logging"] == pytest.approx(20.0) and parts["steps made again"] == pytest.approx(20.0)


def test_what_was_evaluated_beside_the_run_is_on_its_curves(tmp_path):
    run = write_run(tmp_path)
    (run / "evaluations.jsonl").write_text(
        '{"step": 60, "evaluation": {"books bits_per_byte": 1.25}}\n{"step": 61, "evaluation": {"x": 1}}\n'
    )
    assert [r["evaluation"] for r in read_story(run).records if "evaluation" in r] == [{"books bits_per_byte": 1.25}]


def test_a_line_that_got_its_evaluation_later_is_no_step_made_again(tmp_path):
    run = write_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(100, validation={"books": 3.0}))
    assert len(read_story(run).repeated) == 1 and read_story(run).records[-1]["validation"] == {"books": 3.0}


def test_of_a_long_run_evenly_chosen_lines_and_all_evaluations_are_shown():
    records = [{"step": step, **({"validation": {}} if step == 501 else {})} for step in range(10_000)]
    chosen = [record["step"] for record in thinned(records, 100)]
    assert 100 <= len(chosen) <= 103 and chosen[0] == 0 and chosen[-1] == 9999 and 501 in chosen


class Outline(HTMLParser):
    """The data of a page, its addresses, and how many scripts it has."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses, self.scripts, self.data, self._inside = [], 0, "", False

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.addresses += [value for name, value in given.items() if name in ("src", "href", "action")]
        self.scripts += tag == "script"
        self._inside = given.get("id") == "data"

    def handle_data(self, text):
        self.data += text if self._inside else ""


def test_the_page_needs_no_network_and_a_name_in_it_is_no_code(tmp_path, capsys):
    runs = [write_run(tmp_path, "<script>alert(1)"), write_run(tmp_path, "b", lr=2e-3)]
    assert tool("report").main([*map(str, runs), "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    outline = Outline()
    outline.feed(text)
    assert outline.addresses == [] and outline.scripts == 2 and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    data = json.loads(outline.data)
    assert [run["name"] for run in data["runs"]] == ["<script>alert(1)", "b"]
    assert data["differences"] == {"optim.lr": ["0.0005", "0.001"]}
    [change] = data["runs"][0]["changes"]
    assert change == {"step": 40, "keys": {"optim.lr": ["0.001", "0.0005"]}}
    assert data["runs"][0]["facts"]["validation, <script>"] == "3.0000 nats per token"
    assert data["runs"][0]["environment"] == {"platform": "Slurm job 7"}


def test_runs_of_one_name_are_told_apart(tmp_path):
    stories = [read_story(write_run(tmp_path / folder)) for folder in ("one", "other")]
    assert [run["name"] for run in page_data(stories)["runs"]] == [
        str(tmp_path / "one" / "run"),
        str(tmp_path / "other" / "run"),
    ]


@pytest.mark.parametrize("content", [None, "", '{"step": 1, "loss": null}\n'], ids=["no file", "empty", "skipped step"])
def test_a_run_without_a_logged_step_is_an_error(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match="no step was logged yet|not the directory of a run that has logged a step"):
        write_page([tmp_path], tmp_path / "page.html")


def browser(page: Path, *options: str) -> str:
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--v=0",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, re.findall(".*CONSOLE.*", done.stderr)
    return done.stdout


@NEEDS_CHROMIUM
def test_a_browser_draws_every_curve_without_an_error(tmp_path):
    runs = [write_run(tmp_path, "a"), write_run(tmp_path, "b", lr=2e-3)]
    write_page(runs, tmp_path / "page.html")
    drawn = browser(tmp_path / "page.html", "--dump-dom")
    titles = re.findall(r"<h3>([^<]*)</h3>", drawn)
    assert titles[:2] == ["Training loss", "Validation loss"] and "Gradient norm" in titles and "a: 10.0 min" in titles
    charts = re.findall(r"<svg.*?</svg>", drawn, re.DOTALL)
    assert len(charts) == titles.index("Learning rate") + 1 and all('<path d="M' in chart for chart in charts)
    assert all(chart.count('class="start"') == 2 for chart in charts)  # each run was started again once
    assert 'stroke-dasharray="1 3"' in charts[0] and "NaN" not in "".join(charts)
    assert "steps made again 20.0 s (3.3%)" in drawn and "optim.lr: 0.001 → 0.0005" in drawn


@NEEDS_CHROMIUM
@pytest.mark.slow  # pictures of all of it, to be looked at: build/report_page/
@pytest.mark.parametrize(("width", "height"), [(1300, 2400), (500, 4600)], ids=["wide", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_of_the_page(tmp_path, theme, width, height):
    from PIL import Image

    write_page([write_run(tmp_path, "a"), write_run(tmp_path, "b", lr=2e-3)], tmp_path / "page.html")
    folder = Path(__file__).resolve().parents[2] / "build" / "report_page"
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{theme}-{width}.png"
    dark = ["--blink-settings=preferredColorScheme=0", "--force-dark-mode"] if theme == "dark" else []
    browser(tmp_path / "page.html", *dark, "--hide-scrollbars", f"--window-size={width},{height}", f"--screenshot={picture}")
    with Image.open(picture) as seen:
        assert seen.size == (width, height)
        corner = sum(seen.convert("RGB").getpixel((2, 2))) / 3
        assert corner > 200 if theme == "light" else corner < 60
        assert len(seen.convert("RGB").resize((200, 200)).getcolors(40_000)) > 50
