"""The page of tools/report.py: what it says of a run's starts and its time, and how a browser shows it."""

from __future__ import annotations

import errno
import html
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
    assert [count for _, count, _ in story.made] == [1, 9, *[10] * 11]
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


def test_what_was_evaluated_at_a_step_without_a_log_line_is_on_the_page(tmp_path):
    run = write_run(tmp_path)
    (run / "evaluations.jsonl").write_text(
        "".join(f'{{"step": {step}, "tokens": {step * 64}, "evaluation": {{"x": {step}}}}}\n' for step in (105, 25, 60))
    )
    story = read_story(run)
    assert story.evaluations == [{"step": step, "evaluation": {"x": step}, "tokens": step * 64} for step in (25, 105)]
    [shown] = page_data([story])["runs"]
    assert [record["step"] for record in shown["records"] if "evaluation" in record] == [25, 60, 105]
    assert sum(story.seconds().values()) == pytest.approx(600.0)


def test_a_number_that_a_record_lacks_is_left_out_of_the_facts(tmp_path):
    """A record of another program had joules_per_token and no watts, and ended the page with a KeyError."""
    run = write_run(tmp_path)
    for known, energy, hours in (
        ({"joules_per_token": 2.0, "watts": 412.0, "device_hours": 1.5, "goodput": 0.9}, "2 joules per token, 412 watts", "1.5, 90.0% of them in steps that count"),
        ({"joules_per_token": 2.0, "device_hours": 1.5}, "2 joules per token", "1.5"),
        ({"joules_per_token": 2.0, "watts": None, "goodput": 0.9}, "2 joules per token", None),
        ({"watts": 412.0}, None, None),
    ):  # fmt: skip
        (run / "metrics.jsonl").write_text(line(1) + line(2, **known))
        facts = page_data([read_story(run)])["runs"][0]["facts"]
        assert (facts.get("energy"), facts.get("device hours"), facts.get("cost")) == (energy, hours, None)
    (run / "metrics.jsonl").write_text(line(1, tokens=None) + '{"step": 2, "loss": 1.0}\n')
    for output in ([], ["--output", str(tmp_path / "page.html")]):
        assert tool("report").main([str(run), *output]) == 1


def test_a_line_that_got_its_evaluation_later_is_no_step_made_again(tmp_path):
    run = write_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(100, validation={"books": 3.0}))
    assert len(read_story(run).repeated) == 1 and read_story(run).records[-1]["validation"] == {"books": 3.0}


def test_a_single_line_that_was_made_again_is_told_and_its_time_parted(tmp_path):
    """Steps 1 to 8, killed after its checkpoint of step 6, and on from there: steps 7 and 8 were made twice."""
    (tmp_path / "metrics.jsonl").write_text(
        "".join(line(step) for step in (1, 4)) + line(8, seconds=2.0) + "".join(line(step) for step in (8, 12))
    )
    (tmp_path / "starts.jsonl").write_text(start(0, "10:00:00") + start(6, "10:01:00"))
    story = read_story(tmp_path)
    assert [[record["step"] for record in stretch] for stretch in story.repeated] == [[8]]
    assert [(record["step"], count, again) for record, count, again in story.made] == [
        (1, 1, 0),
        (4, 3, 0),
        (8, 4, 2),
        (8, 2, 0),
        (12, 4, 0),
    ]
    parts = story.seconds()
    assert parts["steps made again"] == pytest.approx(4.0) and sum(parts.values()) == pytest.approx(18.0)


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
    assert data["runs"][0]["facts"]["validation, <script>"].startswith("3.0000 nats per token at step ")
    assert data["runs"][0]["environment"] == {"platform": "Slurm job 7"}


@pytest.mark.parametrize("name", ["page.html", "losses.png"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys, name):
    (tmp_path / "file").write_text("")
    assert tool("report").main([str(write_run(tmp_path)), "--output", str(tmp_path / "file" / name)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and str(tmp_path / "file") in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["page.html", "losses.png"])
def test_the_folder_of_a_page_or_picture_is_made(tmp_path, name):
    if name == "losses.png":
        pytest.importorskip("matplotlib")
    assert tool("report").main([str(write_run(tmp_path)), "--output", str(tmp_path / "new" / name)]) == 0
    assert (tmp_path / "new" / name).stat().st_size > 1000


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


SIZES = {"wide": (1600, 4000), "phone": (390, 9000)}
SCHEMES = {"light": "1", "dark": "0"}
"""Chromium's numbers for `prefers-color-scheme`."""

MEASURE = """<script>
const readable = (r, g, b) => [r, g, b].map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);  // relative luminance, WCAG 2.2
const channels = (text) => { const n = text.match(/[0-9.]+/g).map(Number); return n.length === 3 ? [...n, 1] : n; };
function ground(node) {
  for (; node; node = node.parentElement) { const c = channels(getComputedStyle(node).backgroundColor); if (c[3] === 1) return c; }
}
function contrast(a, b) {
  const [x, y] = [a, b].map((c) => readable(...c.slice(0, 3)));
  return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
}
const size = (box) => [box.left, box.right, box.top, box.bottom];
setTimeout(() => {
  for (const svg of document.querySelectorAll("svg")) {  // as if a pointer was over each chart
    const box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 0.8 * box.width, clientY: box.top + 9 }));
  }
  const found = { width: innerWidth, scrolls: document.documentElement.scrollWidth, dark: matchMedia("(prefers-color-scheme: dark)").matches,
    page: getComputedStyle(document.body).backgroundColor, texts: [], lines: [], charts: [], cells: [], tables: [],
    tips: [...document.querySelectorAll(".tip")].map((tip) => [tip.innerText, tip.getBoundingClientRect().left, tip.getBoundingClientRect().right]) };
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, at = text.parentElement, style = getComputedStyle(at);
    if (!text.data.trim() || at.tagName === "OPTION" || !at.getClientRects().length) continue;
    const ink = channels(at instanceof SVGElement ? style.fill : style.color);
    found.texts.push([text.data.slice(0, 40), contrast(ink, ground(at)), parseFloat(style.fontSize)]);
  }
  for (const card of document.querySelectorAll(".card")) {
    const legend = card.querySelector(".legend"), svg = card.querySelector("svg");
    found.charts.push({ title: card.querySelector("h3").textContent, card: size(card.getBoundingClientRect()), svg: size(svg.getBoundingClientRect()),
      legend: [...legend.children].map((item) => [item.textContent, ...size(item.getBoundingClientRect())]),
      labels: [...svg.querySelectorAll("text")].map((label) => [label.textContent, ...size(label.getBoundingClientRect())]) });
    for (const line of svg.querySelectorAll("path[stroke-width='1.7']")) found.lines.push(contrast(channels(getComputedStyle(line).stroke), ground(card)));
  }
  for (const cell of document.querySelectorAll("td.short:not(.key)")) {
    const range = document.createRange();
    range.selectNodeContents(cell);
    const lines = new Set([...range.getClientRects()].map((box) => box.top));
    if (cell.textContent && lines.size) found.cells.push([cell.textContent, lines.size]);
  }
  for (const made of document.querySelectorAll("table")) {
    if (made.getClientRects().length) found.tables.push([made.textContent.slice(0, 40), made.parentElement.scrollWidth - made.parentElement.clientWidth]);
  }
  parent.postMessage(JSON.stringify(found), "*");
}, 100);
</script></body>"""
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><style>body { margin: 0 } iframe { border: 0 }</style>
<iframe src="measured.html" width="WIDTH" height="HEIGHT"></iframe><pre id="measured"></pre>
<script>addEventListener("message", (event) => { document.getElementById("measured").textContent = event.data; });</script>"""
"""A window of Chromium is at least 500 pixels wide; a frame may be narrower."""


def write_full_run(folder: Path, name: str = "run") -> Path:
    """A run with something for every part of the page: several sources, statistics of layers, samples, another start."""
    run = write_run(folder, name)
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    layers = ["embedding", *(f"layers.{i}" for i in range(40)), "norm"]
    for record in lines:
        step = record["step"]
        record |= {"shares": {"books": 0.7, "code": 0.3}, "source_loss": {"books": 9 - step / 90, "code": 8 - step / 90}}
        record |= {"mfu": 0.41, "memory": {"largest": 8e9, "mean": 7.5e9}, "watts": 412.0}
        for field in ("gradient_norms", "weight_norms", "update_norms", "activations", "attention_scores"):
            record[field] = {layer: (1 + i) * (1 + step) / 100 for i, layer in enumerate(layers)}
        if step in (60, 100):
            record["validation"] = {"books": 5.0 - step / 100, "code": 4.0 - step / 100}
            record["samples"] = {
                "The capital of France is": " Paris," * 40,
                "def f(n):\n    ": "return n",
                "x" * 300: "y" * 300,
            }
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    return run


def measured(page: Path, scheme: str, size: str) -> dict:
    """What a script finds in the page of a browser window of this size and colour scheme."""
    text = page.read_text(encoding="utf-8")
    width, height = SIZES[size]
    page.with_name("measured.html").write_text(text.replace("</body>", MEASURE), encoding="utf-8")
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(height)), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    drawn = browser(
        frame, scheme, "--hide-scrollbars", f"--window-size={width},{height}", "--virtual-time-budget=3000", "--dump-dom"
    )
    return json.loads(html.unescape(re.search(r'<pre id="measured">(.*?)</pre>', drawn, re.DOTALL)[1]))


def overlap(one: list, other: list) -> bool:
    """Whether two boxes (text, left, right, top, bottom) share more than an edge."""
    _, left, right, top, bottom = one
    _, left_2, right_2, top_2, bottom_2 = other
    return min(right, right_2) - max(left, left_2) > 0.5 and min(bottom, bottom_2) - max(top, top_2) > 0.5


@NEEDS_CHROMIUM
@pytest.mark.parametrize("runs", [1, 2], ids=["one run", "two runs"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_is_readable_on_a_phone_and_a_wide_screen_in_light_and_dark(tmp_path, scheme, size, runs):
    write_page([write_full_run(tmp_path, f"run-{i}") for i in range(runs)], tmp_path / "page.html")
    found = measured(tmp_path / "page.html", scheme, size)
    assert found["width"] == SIZES[size][0] and found["dark"] == (scheme == "dark")
    assert found["page"] == ("rgb(20, 24, 28)" if scheme == "dark" else "rgb(251, 251, 250)")
    assert found["scrolls"] <= found["width"]  # nothing sticks out at the side
    assert len(found["texts"]) > 150
    assert [text for text in found["texts"] if text[1] < 4.5 or text[2] < 11] == []
    legends = {chart["title"]: [entry[0] for entry in chart["legend"]] for chart in found["charts"]}
    assert legends["Training loss"] == (["run-0", "run-1"] if runs == 2 else [])
    assert len(found["lines"]) >= 20 and min(found["lines"]) >= 3.0
    assert all(" at step " in tip[0] and 0 <= tip[1] < tip[2] <= found["width"] for tip in found["tips"]), found["tips"]
    small = [cell for cell in found["cells"] if len(cell[0]) <= 10]
    assert len(small) > 10 and [cell for cell in small if cell[1] > 1] == []  # no word is broken in two lines
    assert len(found["tables"]) >= 3 and [table for table in found["tables"] if table[1] > 0] == []  # nor does a table scroll


@NEEDS_CHROMIUM
@pytest.mark.parametrize("size", SIZES)
def test_labels_and_legends_lie_inside_their_charts_and_not_on_each_other(tmp_path, size):
    write_page([write_full_run(tmp_path)], tmp_path / "page.html")
    charts = {chart["title"]: chart for chart in measured(tmp_path / "page.html", "light", size)["charts"]}
    assert [entry[0] for entry in charts["Validation loss"]["legend"]] == ["books", "code"]
    assert [entry[0] for entry in charts["Gradients by layer"]["legend"]][::11] == ["embedding", "norm"]  # 12 of 42
    assert "Mixture consumed" in charts
    for title, chart in charts.items():
        card_left, card_right, card_top, card_bottom = chart["card"]
        svg_left, svg_right, _, svg_bottom = chart["svg"]
        assert len(chart["labels"]) >= 4, title
        for _, left, right, _, bottom in chart["labels"]:
            assert svg_left - 1 <= left < right <= svg_right + 1 and bottom <= svg_bottom + 1, title
        for _, left, right, top, bottom in chart["legend"]:
            assert card_left <= left < right <= card_right and card_top < top < bottom <= card_bottom, title
        for texts in (chart["labels"], chart["legend"]):
            assert [(a, b) for i, a in enumerate(texts) for b in texts[:i] if overlap(a, b)] == [], title


@NEEDS_CHROMIUM
@pytest.mark.slow  # pictures of all of it, to be looked at: build/report_page/
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pictures_of_the_page(tmp_path, scheme, size):
    from PIL import Image

    write_page([write_full_run(tmp_path)], tmp_path / "page.html")
    folder = Path(__file__).resolve().parents[2] / "build" / "report_page"
    folder.mkdir(parents=True, exist_ok=True)
    (width, height), picture = SIZES[size], folder / f"{scheme}-{size}.png"
    dark = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    browser(tmp_path / "page.html", dark, "--hide-scrollbars", f"--window-size={width},{height}", f"--screenshot={picture}")
    with Image.open(picture) as seen:
        assert seen.size == (width, height)
        corner = sum(seen.convert("RGB").getpixel((2, 2))) / 3
        assert corner > 200 if scheme == "light" else corner < 60
        assert len(seen.convert("RGB").resize((200, 200)).getcolors(40_000)) > 50


def test_a_run_that_diverged_is_shown(tmp_path, capsys):
    """A validation that is not finite is null in the log."""
    run = write_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(110, seconds=None, validation={"books": None}, bits_per_byte={"books": None}))
    (run / "starts.jsonl").write_text(start(0, "10:00:00", run={"steps": 200}, parallel={"strategy": "ddp"}))
    (run / "status.json").write_text('{"state": "fail')  # as a reader of a network file system may see it
    assert tool("report").main([str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert "validation, books     not finite nats per token at step 110\n" in capsys.readouterr().out
    assert tool("watch").main([str(run), "--once"]) == 0
    assert "not finite at step 110" in capsys.readouterr().out


def test_a_run_that_is_silent_is_doubted_and_the_time_after_its_last_line_is_paid(tmp_path):
    """A run that was killed was running for ever. Hours and cost were those of the last line, without the end of the run."""
    run = write_run(tmp_path)
    (run / "metrics.jsonl").write_text(line(1) + line(2, device_hours=1.0, goodput=0.9, cost=3.0))
    status = {"state": "running", "reason": None, "updated": "2026-11-23T10:10:00Z", "device_seconds": 7200.0}
    (run / "status.json").write_text(json.dumps(status))
    facts = page_data([read_story(run)])["runs"][0]["facts"]
    assert facts["state"].startswith("running: nothing was written for ") and facts["state"].endswith(": is it still alive?")
    assert (facts["device hours"], facts["cost"]) == ("2, 45.0% of them in steps that count", "6.00")
    (run / "status.json").write_text(json.dumps(status | {"state": "finished", "device_seconds": None}))
    facts = page_data([read_story(run)])["runs"][0]["facts"]
    assert (facts["state"], facts["device hours"], facts["cost"]) == ("finished", "1, 90.0% of them in steps that count", "3.00")


def test_a_picture_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path, monkeypatch, capsys):
    """A full disk cut off the old picture, and the line named no file."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    run, picture = write_run(tmp_path), tmp_path / "loss.png"
    assert tool("report").main([str(run), "--output", str(picture)]) == 0
    before = picture.read_bytes()

    def fill(self, file, **options):
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(figure, "savefig", fill)
    assert tool("report").main([str(run), "--output", str(picture)]) == 1
    assert f"error: {picture}: No space left on device" in capsys.readouterr().err
    assert picture.read_bytes() == before and sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "run"]
