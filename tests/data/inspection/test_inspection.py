"""Inspecting a planned run: forward and inverse agree, views are safe and complete, errors are one line, and it is quick."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from running import tool, write_prepared

from pretrain.config.load import load_config
from pretrain.config.written import from_recorded
from pretrain.data.inspection.coverage import measure_coverage
from pretrain.data.inspection.history import History
from pretrain.data.inspection.inspected_step import DocumentPiece, InspectedSample, InspectedStep, find_document, inspect_step
from pretrain.data.inspection.views import columns, coverage_lines, escaped, page, sightings_lines, step_lines, token_texts
from pretrain.data.shards.reader import PreparedData
from pretrain.data.shards.writer import ShardWriter
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></section><img src=x onerror=alert(1)>",
    "\x1b[2J\x1b]0;owned\x07 \u202eevil\u2066",
    "'\" onmouseover=alert(1) x='",
    "&lt;b&gt; &#x3c; nul\x00 tab\there\r\nline\n\n",
    "日本語 café 👩\u200d👧",
    "]]><!-- <style>*{}</style>",
]


@pytest.fixture(scope="module")
def planned(tmp_path_factory, byte_tokenizer) -> Path:
    """A plan with everything in it: two sources of documents of many lengths, stages, a ramp."""
    folder = tmp_path_factory.mktemp("plan")
    loaded, random = load_tokenizer(byte_tokenizer), np.random.default_rng(1)
    for name, documents in (("a", 300), ("b", 40)):
        with ShardWriter.create(folder / name, loaded, 4000) as writer:
            for length in np.minimum(random.geometric(0.02, documents), 400).tolist():
                writer.add(np.append(random.integers(97, 123, length - 1), loaded.eod_id), np.array([length]))
    config = {
        "run": {"name": "plan", "dir": str(folder / "runs"), "steps": 60, "seed": 7},
        "data": {
            "sequence_length": 48,
            "sources": [{"path": str(folder / name), "name": name} for name in "ab"],
            "stages": [{"until_tokens": 9000, "weights": {"a": 3, "b": 1}}, {"weights": {"a": 1, "b": 2}}],
            "cache": {"dir": str(folder / "cache")},
        },
        "batch": {"sequences": 16, "micro_sequences": 2, "ramp": [{"until_tokens": 5000, "sequences": 4}]},
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump(config))
    return folder / "plan.yaml"


def history_of(planned: Path, *overrides: str, ranks: int = 2) -> History:
    return History.planned(load_config(planned, list(overrides))[0], ranks)


@pytest.fixture(scope="module", params=["concatenate", "best_fit", "padded"])
def history(request, planned) -> History:
    return history_of(planned, f"data.packing={request.param}", "data.boundary_loss=false")


# ---- forward and inverse ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_document_is_in_the_batches_that_the_inverse_names_and_in_no_other(history, data):
    name = data.draw(st.sampled_from("ab"))
    source = next(s for s in history.stretches[0].stream.sources if s.name == name)
    document = data.draw(st.integers(0, source.data.documents - 1))
    found = find_document(history, document, name)
    for one in found.seen[:3]:
        samples = {s.position: s for s in inspect_step(history, one.step, one.rank).shown}
        sample = samples[one.position]
        assert (sample.micro_step, sample.epoch, sample.sample) == (one.micro_step, one.epoch, one.sample)
        assert sample.source == name and document in [piece.document for piece in sample.pieces]

    step = data.draw(st.integers(1, history.last))
    sample = data.draw(st.sampled_from(inspect_step(history, step).shown))
    piece = data.draw(st.sampled_from(sample.pieces))
    seen = find_document(history, piece.document, sample.source).seen
    assert (step, sample.rank, sample.position) in [(one.step, one.rank, one.position) for one in seen]


def test_the_inverse_looks_beyond_the_end_of_the_run_as_if_it_were_longer(planned):
    short, long = history_of(planned, "run.steps=20"), history_of(planned, "run.steps=400")
    beyond = find_document(short, 3, "b", epochs=12).seen
    assert {one.epoch for one in beyond} == set(range(12))
    assert find_document(short, 3, "b", epochs=12, most=5).seen == beyond[:5]
    assert "and more times" in "\n".join(sightings_lines(find_document(short, 3, "b", epochs=12, most=5), 100))
    assert beyond == [one for one in find_document(long, 3, "b").seen if one.epoch < 12]


def test_a_document_in_the_tail_of_a_source_is_said_to_be_in_no_sample(tmp_path, byte_tokenizer, planned):
    path = write_prepared(tmp_path / "tail", byte_tokenizer, seed=0, documents=3)
    keys = [
        f"data.sources=[{{path: {path}}}]",
        "data.stages=[]",
        "batch.ramp=[]",
        "batch.sequences=1",
        "batch.micro_sequences=1",
    ]
    assert find_document(history_of(planned, *keys, "data.sequence_length=199", ranks=1), 2).seen
    found = find_document(history_of(planned, *keys, "data.sequence_length=350", ranks=1), 2)
    assert found.samples == [] and found.seen == []
    assert "it is in no sample" in "\n".join(sightings_lines(found, 100))


# ---- coverage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 7, 60])
def test_coverage_is_a_count_of_what_every_step_reads(history, step):
    shown = [sample for n in range(1, step + 1) for sample in inspect_step(history, n).shown]
    coverage = measure_coverage(history, step)
    assert coverage.samples == len(shown)
    for source in coverage.sources:
        own = [sample for sample in shown if sample.source == source.name]
        assert (source.drawn, source.distinct) == (len(own), len({sample.sample for sample in own}))
        assert source.unseen == source.samples - source.distinct
    for segment in coverage.segments:
        positions = range(segment.start, segment.end)
        for name, share in segment.achieved.items():
            drawn = sum(sample.source == name for sample in shown if sample.position in positions)
            assert share == pytest.approx(drawn / len(positions))
    assert [segment.wanted for segment in coverage.segments][:1] == [{"a": 0.75, "b": 0.25}]


# ---- views ------------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The elements and attributes of a page, and the text of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.pieces: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.open += [tag] if tag != "meta" else []
        self.pieces += [""] if tag == "pre" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "pre" in self.open:
            self.pieces[-1] += data


@pytest.fixture(scope="module")
def hostile(planned, byte_tokenizer, tmp_path_factory) -> InspectedStep:
    path = tmp_path_factory.mktemp("hostile") / "data"
    loaded = load_tokenizer(byte_tokenizer)
    with ShardWriter.create(path, loaded, 10_000) as writer:
        for text in HOSTILE:
            ids = [*text.encode(), loaded.eod_id]
            writer.add(np.array(ids), np.array([len(ids)]))
    keys = ["data.stages=[]", "data.packing=padded", "data.sequence_length=60", "batch.ramp=[]", "run.name=<i>x"]
    keys += [f"data.sources=[{{path: {path}, name: '<b>bold'}}]", f"batch.sequences={len(HOSTILE)}", "batch.micro_sequences=1"]
    return inspect_step(history_of(planned, *keys, ranks=1), 1)


def test_hostile_text_stays_text_in_the_page(hostile):
    parser = Tags()
    content = "".join(page(hostile))
    parser.feed(content)
    parser.close()
    assert parser.open == []
    ours = "html head meta title style body h1 dl dt dd p details summary small section h2 pre span s"
    assert parser.tags <= set(ours.split())
    assert parser.attributes <= set("lang charset http-equiv name content class title style open".split())
    assert escape("default-src 'none'") in content
    texts = sorted(escape_but_lines(text) + "end" for text in HOSTILE)
    assert sorted(parser.pieces) == texts
    assert not any(ord(c) < 32 and c not in "\n\t" for c in content)
    assert not any(c in content for c in "\u202e\u2066\u200d")


def escape_but_lines(text: str) -> str:
    return "\n".join("\t".join(map(escaped, line.split("\t"))) for line in text.split("\n"))


def test_hostile_text_cannot_reach_the_terminal(hostile):
    lines = list(step_lines(hostile, 60, 0, True))
    assert all(line.isprintable() for line in lines)
    assert any("\\x1b[2J" in line for line in lines) and any("\\u202eevil" in line for line in lines)


@pytest.mark.parametrize("width", [40, 100])
def test_lines_of_the_terminal_are_as_wide_as_they_may_be(history, hostile, width):
    for step in (inspect_step(history, 3), hostile):
        for line in step_lines(step, width, 5, True):
            if line.startswith(("│", "┊")):
                assert sum(map(columns, line)) <= width


def test_the_text_view_shows_all_of_every_document_when_asked_to(history):
    step = inspect_step(history, 5)
    shown = "\n".join(step_lines(step, 100, 0, False))
    assert shown.count("── position") == step.sequences == len(step.shown)
    for sample in step.shown:
        for piece in sample.pieces:
            assert f"document {piece.document} from (no file) row {piece.row}, " in shown
            assert all(f"{piece.text[i : i + 98]}\n" in shown for i in range(0, len(piece.text), 98))
    short = "\n".join(step_lines(dataclasses.replace(step, shown=step.shown[:1]), 40, 1, False))
    assert f"{step.sequences - 1} more samples not shown (--samples 0 shows all)" in short


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_the_texts_of_tokens_join_to_the_text(byte_tokenizer, text):
    decode = load_tokenizer(byte_tokenizer).decode
    ids = list(text.encode())
    parts = list(token_texts(decode, ids))
    assert "".join(part for _, part in parts) == text
    assert sum(count for count, _ in parts) == len(ids)


def test_the_texts_of_sentencepiece_and_tokenizers_tokens_join_to_the_text(trained, texts):
    for folder in trained.values():
        tokenizer = load_tokenizer(folder)
        for text in texts[:6]:
            parts = token_texts(tokenizer.decode, tokenizer.encode(text))
            assert "".join(part for _, part in parts) == tokenizer.decode(tokenizer.encode(text))


def test_the_json_of_a_step_has_a_fixed_form(planned, capsys):
    arguments = ["--config", str(planned), "--step", "2", "--ranks", "2", "--json"]
    assert tool("inspect_data").main(arguments) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(content) == {field.name for field in dataclasses.fields(InspectedStep)} | {"digest_matches"}
    assert content["digest_matches"] is None and content["logged_digest"] is None and content["made"] is False
    assert len(content["shown"]) == content["sequences"] == content["asked"] == 4
    sample = content["shown"][3]
    assert set(sample) == {field.name for field in dataclasses.fields(InspectedSample)}
    assert (sample["position"], sample["rank"], sample["micro_step"]) == (7, 1, 0)
    assert len(sample["tokens"]) == len(sample["targets"]) == 48
    piece = sample["pieces"][0]
    assert set(piece) == {field.name for field in dataclasses.fields(DocumentPiece)}
    assert sum(piece["length"] for piece in sample["pieces"]) + sample["padding"] == 48

    for what in (["--coverage", "--step", "9"], ["--document", "5", "--source", "a"]):
        assert tool("inspect_data").main(["--config", str(planned), *what, "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["run"].endswith("plan (planned)")


def test_the_texts_of_coverage_and_sightings_say_what_is_missing(planned, capsys):
    history = history_of(planned, "run.steps=30")
    lines = "\n".join(coverage_lines(measure_coverage(history, 30), 100))
    assert "unseen" in lines and "wanted" in lines
    found = next(f for f in (find_document(history, d, "a") for d in range(300)) if not f.seen)
    assert "no step up to 30 of" in "\n".join(sightings_lines(found, 100))


def test_the_file_and_row_of_a_document_are_shown(planned, monkeypatch, capsys):
    monkeypatch.setattr(PreparedData, "origin", lambda self, document: (f"{self.path.name}<\x1b>.jsonl", 10 * document))
    step = inspect_step(history_of(planned), 2)
    piece = step.shown[0].pieces[0]
    assert (piece.input, piece.row) == (f"{step.shown[0].source}<\x1b>.jsonl", 10 * piece.document)
    label = f"document {piece.document} from {step.shown[0].source}<\\x1b>.jsonl row {piece.row:,}, "
    assert label in "\n".join(step_lines(step, 200, 0, False))
    assert escape(label) in "".join(page(step))
    found = find_document(history_of(planned), 7, "a")
    assert (found.input, found.row) == ("a<\x1b>.jsonl", 70)
    assert ", from a<\\x1b>.jsonl row 70: " in "\n".join(sightings_lines(found, 200))


def test_the_page_is_written_where_it_is_asked_for(planned, tmp_path, capsys):
    arguments = ["--config", str(planned), "--step", "2", "--ranks", "2", "--rank", "1", "--html", str(tmp_path / "page.html")]
    assert tool("inspect_data").main(arguments) == 0
    assert "rank 1" in (tmp_path / "page.html").read_text()
    assert tool("inspect_data").main([*arguments[:-1], str(tmp_path / "none" / "page.html")]) == 1
    assert "page.html: cannot be written: No such file or directory" in capsys.readouterr().err


# ---- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what, code, said",
    [
        (["--step", "0"], 1, "step 0: the steps of a run are counted from 1"),
        (["--step", "-3"], 1, "step -3: the steps of a run are counted from 1"),
        (["--step", "61"], 1, "step 61 is beyond the last step of"),
        (["--step", "3", "--rank", "2", "--ranks", "2"], 1, "--rank 2: step 3 is read by ranks 0..1"),
        (["--step", "3", "--rank", "-1"], 1, "--rank -1: step 3 is read by rank 0 alone"),
        (["--step", "3", "--ranks", "3"], 2, "batch.sequences=16 is not divisible by batch.micro_sequences=2 times 3"),
        (["--document", "0"], 1, "--source is missing: the run has a, b"),
        (["--document", "0", "--source", "c"], 1, "--source c: the run has no such source; it has a, b"),
        (["--document", "300", "--source", "a"], 1, "document 300: a has documents 0..299"),
        (["--document", "-1", "--source", "a"], 1, "document -1: a has documents 0..299"),
        (["--coverage"], 1, "has made no step; give --step N"),
        (["--coverage", "--step", "99"], 1, "step 99 is beyond the last step"),
        (["--coverage", "--step", "0"], 1, "step 0: the steps of a run are counted from 1"),
    ],
)
def test_what_the_run_does_not_have_is_refused_in_a_line(planned, capsys, what, code, said):
    assert tool("inspect_data").main(["--config", str(planned), *what]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_a_closed_output_is_no_defect(planned):
    """It was an AttributeError."""
    command = f"{sys.executable} tools/inspect_data.py --config {planned} --step 1 >&-"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_directory_that_is_no_run_is_refused_in_a_line(tmp_path, capsys):
    for folder, said in (
        (tmp_path / "none", "no such run directory"),
        (tmp_path, "starts.jsonl: cannot be read: No such file"),
    ):
        assert tool("inspect_data").main(["--run", str(folder), "--step", "1"]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and said in err
    for content, said in (
        ("", "empty: the run has not started"),
        ("{}\n", "starts.jsonl:1: not the record of a start"),
        ("[\n", ":1"),
        ("\xff{}\n", "starts.jsonl: not UTF-8 (invalid start byte at byte 0): damaged"),
    ):
        (tmp_path / "starts.jsonl").write_text(content, encoding="latin-1")
        assert tool("inspect_data").main(["--run", str(tmp_path), "--step", "1"]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and said in err


TEXT_ONLY = (("--lines", "0"), ("--ids",))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--run", "R"],
        ["--step", "1"],
        ["--run", "R", "--config", "C", "--step", "1"],
        ["--run", "R", "--step", "1", "--document", "2"],
        ["--run", "R", "--corrupt-check", "D"],
        ["--run", "R", "--step", "1", "run.steps=3"],
        ["--run", "R", "--step", "1", "--ranks", "2"],
        ["--run", "R", "--coverage", "--rank", "0"],
        ["--run", "R", "--coverage", "--html", "x.html"],
        ["--run", "R", "--step", "1", "--width", "3"],
        ["--run", "R", "--step", "1", "--width", "5001"],
        ["--run", "R", "--step", "1", "--html", "x.html", "--json"],
        *(["--run", "R", "--step", "1", *option, *other] for option in (*TEXT_ONLY, ("--width", "50")) for other in (("--json",), ("--html", "x"))),
        *(["--run", "R", *what, *option] for what in (("--coverage",), ("--document", "2")) for option in (*TEXT_ONLY, ("--samples", "3"))),
        *(["--corrupt-check", "D", *option] for option in (*TEXT_ONLY, ("--samples", "3"), ("--width", "50"))),
    ],
)
def test_options_that_do_not_go_together_are_bad_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        tool("inspect_data").main(arguments)
    assert ended.value.code == 2
    assert "error: " in (said := capsys.readouterr().err) and "unrecognized" not in said


def test_a_recorded_configuration_comes_back_as_it_was(planned):
    config, _ = load_config(planned, ["data.seed=3"])
    assert from_recorded(json.loads(json.dumps(dataclasses.asdict(config))), "x:1") == config
    with pytest.raises(ConfigError, match="x:1: not a configuration of this version"):
        from_recorded({"run": {"colour": 1}}, "x:1")


# ---- speed ------------------------------------------------------------------------------------------------------------


def test_it_answers_at_once_and_without_torch(planned, tmp_path):
    config, _ = load_config(planned)
    data = dataclasses.replace(config.data, seed=7)
    start = {
        "step": 0,
        "samples": 0,
        "world_size": 2,
        "data_size": 2,
        "folder": "/",
        "fingerprints": [],
        "config": dataclasses.asdict(config),
    }
    start["config"]["data"] = dataclasses.asdict(data)
    (tmp_path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    for what in (["--step", "50"], ["--document", "3", "--source", "a"], ["--coverage", "--step", "9"]):
        code = (
            "import runpy, sys\n"
            f"sys.argv = ['inspect_data.py', '--run', {str(tmp_path)!r}, *{what!r}]\n"
            "try:\n    runpy.run_path('tools/inspect_data.py', run_name='__main__')\n"
            "except SystemExit as end:\n    assert end.code == 0\n"
            "heavy = {'torch', 'omegaconf', 'transformers', 'datasets', 'pyarrow', 'pandas'} & set(sys.modules)\n"
            "assert not heavy, heavy"
        )
        used = os.times().children_user
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ)
        assert os.times().children_user - used < 3
