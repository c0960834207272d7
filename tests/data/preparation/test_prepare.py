"""Text in many formats becomes the same shards, whoever does the work, and what cannot be read is named."""

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.preparation.documents import read_documents
from pretrain.data.preparation.inputs import find_inputs
from pretrain.data.preparation.prepare import prepare
from pretrain.data.shards.reader import PreparedData
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError, DataError
from tools import collect_source as collect_tool
from tools import prepare_data as prepare_tool

ROOT = Path(__file__).resolve().parents[3]


def documents_of(path: Path) -> list[str]:
    """The documents of a prepared directory, decoded by its own copy of the tokenizer."""
    data = PreparedData.open(path)
    tokenizer = load_tokenizer(data.tokenizer_path)
    assert (tokenizer.fingerprint, tokenizer.eod_id) == (data.tokenizer.sha256, data.eod_id)
    spans = [data.document_span(number) for number in range(data.documents)]
    tokens = [data.read(start, end - start) for start, end in spans]
    assert all(document[-1] == data.eod_id for document in tokens)
    return [tokenizer.decode(document[:-1]) for document in tokens]


def content_of(root: Path) -> dict[str, str]:
    """Relative path -> hash of every file under `root`."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, columns: dict) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


def texts_of(path: Path, **options) -> list[str]:
    return list(read_documents([path], **options))


# Formats.


def test_json_lines_keep_every_document_in_order(corpus, trained, texts, tmp_path):
    result = prepare([str(corpus)], trained["bpe"], tmp_path / "out")
    assert documents_of(tmp_path / "out") == texts
    data = PreparedData.open(tmp_path / "out")
    data.verify()
    assert (data.documents, data.tokens) == (result.splits[0].documents, result.splits[0].tokens)
    assert data.dtype == np.dtype("<u2")
    assert data.vocab_size == 500


def test_every_format_gives_the_same_tokens(trained, texts, tmp_path):
    some = [text.replace("\n", " ") for text in texts[:20]]
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in some])
    write_jsonl(tmp_path / "a.json", [{"text": text} for text in some])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    write_parquet(tmp_path / "a.parquet", {"text": some, "number": list(range(20))})
    (tmp_path / "a.txt").write_text("".join(text + "\n" for text in some), encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    fingerprints = set()
    for number, file in enumerate(sorted(tmp_path.glob("a.*"))):
        prepare([str(file)], trained["byte"], tmp_path / f"out-{number}", text_mode="line")
        fingerprints.add(PreparedData.open(tmp_path / f"out-{number}").fingerprint)
    assert number == 5
    assert len(fingerprints) == 1


def test_a_text_file_is_one_document_to_the_last_byte(tmp_path):
    content = "first\r\nsecond\r\n\n\tthird\x0c\x85\u2028 \ufeff\n"
    for mark in ("", "\ufeff"):
        (tmp_path / "a.md").write_bytes((mark + content).encode())
        assert texts_of(tmp_path / "a.md") == [content]
        assert texts_of(tmp_path / "a.md", text_mode="line") == ["first", "second", "", "\tthird\x0c\x85\u2028 \ufeff"]


def test_strings_that_look_like_other_types_stay_text(tmp_path):
    rows = ["2020-01-01", "2020-01-01T00:00:00Z", "1", "null", "\u2028\x85\x0b line ends of other kinds \r\n"]
    assert texts_of(write_jsonl(tmp_path / "a.jsonl", [{"text": row} for row in rows])) == rows


def test_fields_that_are_not_read_may_be_of_any_type(tmp_path):
    rows = [{"text": "a", "meta": 1}, {"text": "b", "meta": {"x": []}}, {"text": "c"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    assert texts_of(tmp_path / "a.jsonl") == ["a", "b", "c"]


def test_the_text_field_can_be_named(tmp_path):
    assert texts_of(write_jsonl(tmp_path / "a.jsonl", [{"content": "x", "text": "no"}]), text_field="content") == ["x"]
    assert texts_of(write_parquet(tmp_path / "a.parquet", {"content": ["x"] * 7}), text_field="content") == ["x"] * 7


def test_names_with_pattern_characters_are_read(tmp_path):
    file = write_jsonl(tmp_path / "part[1].jsonl", [{"text": "x"}])
    assert [found.path for found in find_inputs([str(file)])] == [str(file)]
    assert texts_of(file) == ["x"]


def test_inputs_are_sorted_and_read_once(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_inputs([str(tmp_path / "**/*.txt"), str(tmp_path / "b.txt"), str(tmp_path / "*")])
    assert [os.path.relpath(file.path, tmp_path) for file in found] == ["a.txt", "b.txt", "sub/c.txt"]


# Independence of how the work is done.


def test_the_number_of_workers_changes_no_byte(corpus, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.data.preparation.unit_work.BATCH_DOCUMENTS", 16)
    for workers in (1, 3):
        output = tmp_path / f"workers-{workers}"
        prepare([str(corpus)], trained["bpe"], output, workers=workers, shard_tokens=3000, validation_fraction=0.2)
    one, three = content_of(tmp_path / "workers-1"), content_of(tmp_path / "workers-3")
    assert one == three
    assert len([name for name in one if name.startswith("train/shard")]) > 4


def test_the_size_of_batches_changes_no_byte(corpus, trained, tmp_path, monkeypatch):
    for size in (1, 50, 10_000):
        monkeypatch.setattr("pretrain.data.preparation.unit_work.BATCH_DOCUMENTS", size)
        prepare([str(corpus)], trained["unigram"], tmp_path / str(size), shard_tokens=3000)
    assert content_of(tmp_path / "1") == content_of(tmp_path / "50") == content_of(tmp_path / "10000")


def test_a_worker_names_the_document_that_it_cannot_express(trained, tmp_path):
    rows = [{"text": "def"}] * 6 + [{"text": "defß"}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"a\.jsonl, line 7: character 'ß' \(U\+00DF\) is not in the vocabulary"):
            prepare([str(file)], trained["char"], tmp_path / "out", workers=workers)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl"]


# Validation split.


def test_the_splits_partition_the_corpus_close_to_the_fraction(corpus, trained, texts, tmp_path):
    result = prepare([str(corpus)], trained["byte"], tmp_path / "out", validation_fraction=0.25)
    train, validation = (documents_of(tmp_path / "out" / name) for name in ("train", "validation"))
    assert sorted(train + validation) == sorted(texts)
    assert not set(train) & set(validation)
    assert 0.15 < len(validation) / len(texts) < 0.35
    assert [split.path for split in result.splits] == [tmp_path / "out" / "train", tmp_path / "out" / "validation"]


def test_adding_data_never_moves_a_document(trained, texts, tmp_path):
    first = write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in texts[:150]])
    prepare([str(first)], trained["byte"], tmp_path / "small", validation_fraction=0.2)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts[150:]])
    prepare([str(tmp_path / "*.jsonl")], trained["bpe"], tmp_path / "large", validation_fraction=0.2, workers=2)
    for name in ("train", "validation"):
        small, large = (set(documents_of(tmp_path / size / name)) for size in ("small", "large"))
        assert small == large & set(texts[:150])


def test_equal_documents_land_on_the_same_side(trained, texts, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts[:50] * 2])
    prepare([str(file)], trained["byte"], tmp_path / "out", validation_fraction=0.3)
    validation = documents_of(tmp_path / "out" / "validation")
    assert sorted(validation) == sorted(list(set(validation)) * 2)


def test_both_splits_appear_or_neither(trained, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "one document"}])
    with pytest.raises(DataError, match="the (train|validation) split is empty"):
        prepare([str(file)], trained["byte"], tmp_path / "out", validation_fraction=0.5)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl"]


# What cannot be read.


def _invalid(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_every_reading_error_names_the_file_and_the_place(tmp_path):
    cases = [
        (write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}, {"body": "y"}]), "a.jsonl, line 2: no field 'text'; it has: body"),
        (
            write_jsonl(tmp_path / "b.jsonl", [{"text": "x"}, {"text": None}]),
            "b.jsonl, line 2: field 'text' is NoneType, not text",
        ),
        (write_jsonl(tmp_path / "c.jsonl", [{"text": 3}]), "c.jsonl, line 1: field 'text' is int"),
        (write_jsonl(tmp_path / "d.jsonl", [["x"]]), "d.jsonl, line 1: expected one JSON object per line, found list"),
        (_invalid(tmp_path / "e.jsonl", b'{"text": "x"}\n{"text": '), "e.jsonl, line 2: not valid JSON"),
        (_invalid(tmp_path / "f.jsonl", b'{"text": "\xff"}\n'), "f.jsonl, line 1: not valid UTF-8"),
        (_invalid(tmp_path / "g.txt", b"caf\xe9"), "g.txt: not valid UTF-8"),
        (_invalid(tmp_path / "h.txt.gz", b"not gzip"), "h.txt.gz: cannot be read"),
        (_invalid(tmp_path / "i.txt.gz", gzip.compress(b"text" * 1000)[:-20]), "i.txt.gz: cannot be read"),
        (_invalid(tmp_path / "j.jsonl.gz", b"not gzip"), "j.jsonl.gz: cannot be read"),
        (_invalid(tmp_path / "k.parquet", b"not parquet"), "k.parquet: cannot be read"),
        (write_parquet(tmp_path / "l.parquet", {"body": ["x"]}), "l.parquet: no column 'text'; it has: body"),
        (write_parquet(tmp_path / "m.parquet", {"text": ["x"] * 4 + [None]}), "m.parquet, row 5: field 'text' is NoneType"),
        (write_parquet(tmp_path / "n.parquet", {"text": [1]}), "n.parquet, row 1: field 'text' is int"),
    ]
    for file, message in cases:
        with pytest.raises(DataError, match=re.escape(message)) as caught:
            list(read_documents([file]))
        assert not re.search("\n|--max-invalid", str(caught.value)), file  # tools that read so have no such option


def test_half_a_surrogate_pair_is_named_with_its_line(trained, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "x\\ud800"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: U\+D800 is half of a surrogate pair"):
        prepare([str(tmp_path / "a.jsonl")], trained["bpe"], tmp_path / "out")


def test_a_row_that_is_left_out_does_not_choose_the_engine(trained, tmp_path, capsys):
    """One row with half a surrogate pair made the slower library encode a whole corpus, although that row is left out."""
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "x\\ud800"}\n')
    result = prepare([str(tmp_path / "a.jsonl")], trained["byte_bpe"], tmp_path / "out", max_invalid=1)
    assert result.invalid_documents == 1 and documents_of(tmp_path / "out") == ["fine"]
    assert "tokenizer engine: tiktoken" in capsys.readouterr().err


def test_a_pattern_without_files_is_an_error_even_beside_one_that_has(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"\*\.md: no such input file"):
        find_inputs([str(tmp_path / "*.txt"), str(tmp_path / "*.md")])
    (tmp_path / "folder" / ".hidden").mkdir(parents=True)
    with pytest.raises(DataError, match=r"folder: no such input file \(a folder without files\)"):
        find_inputs([str(tmp_path / "folder")])


@pytest.mark.parametrize(
    "name, content", [("a.jsonl", ""), ("a.jsonl", '{"text": "  \\n"}\n'), ("a.txt", ""), ("a.txt", " \n\n")]
)
def test_an_empty_corpus_is_an_error(trained, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match="the corpus is empty"):
        prepare([str(tmp_path / name)], trained["byte"], tmp_path / "out")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"workers": 0}, "--workers 0"),
        ({"validation_fraction": 1.0}, "--validation-fraction 1.0"),
        ({"validation_fraction": float("nan")}, "--validation-fraction nan"),
        ({"shard_tokens": 0}, "--shard-tokens 0"),
        ({"text_mode": "page"}, "--documents page: expected one of file, line"),
    ],
)
def test_arguments_out_of_range_are_refused(corpus, trained, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        prepare([str(corpus)], trained["byte"], tmp_path / "out", **options)


# The tools.


def test_the_closing_line_says_where_and_how_much(trained, tmp_path, capsys):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": ""}, {"text": "de"}, {"text": " "}])
    arguments = ["--input", str(file), "--tokenizer", str(trained["byte"]), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert prepare_tool.main(arguments) == 0
    line = capsys.readouterr().out
    expected = (
        rf"prepared {tmp_path}/out \(2 documents, 7 tokens, 1 shard\); 2 empty documents skipped; [\d.]+ s,"
        r" [\d.]+ MB/s\n"
    )
    assert re.fullmatch(expected, line)
    assert prepare_tool.main([*arguments, "--workers", "0"]) == 2


def test_the_tool_runs_from_a_clone_and_touches_no_network(corpus, trained, tmp_path):
    """In a fresh process, without the package's directory on the path and with sockets that cannot connect."""
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\ndef refuse(*_): raise SystemExit('network')\nsocket.socket.connect = socket.getaddrinfo = refuse\n"
    )
    command = [sys.executable, str(ROOT / "tools" / "prepare_data.py"), "--input", str(corpus)]
    command += ["--tokenizer", str(trained["bpe"]), "--output", str(tmp_path / "out"), "--workers", "1"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"prepared {tmp_path}/out (216 documents, ")


def test_python_source_is_collected_in_a_fixed_order(tmp_path, capsys):
    root = tmp_path / "lib"
    files = {"b.py": "b = 1\n", "a.py": "# é\n", "sub/c.py": "c\n", "test/t.py": "t\n", "__pycache__/p.py": "p\n", "n.txt": "n"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    output = tmp_path / "source.jsonl"
    assert collect_tool.main(["--output", str(output), "--root", str(root)]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows == [{"path": name, "text": files[name]} for name in ("a.py", "b.py", "sub/c.py")]
    assert capsys.readouterr().out == f"collected {output} (3 files, 0.0 MB); 1 undecodable files skipped\n"
    assert collect_tool.main(["--output", str(output), "--root", str(tmp_path / "none")]) == 1


@pytest.mark.parametrize("output", ["kept", "folder", ".."])
def test_collected_source_replaces_nothing(tmp_path, monkeypatch, capsys, output):
    """A file was replaced, and of a folder the name of a temporary file was told."""
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert collect_tool.main(["--output", output, "--max-mb", "0.1"]) == 1
    assert capsys.readouterr().err == f"error: {output}: already exists; choose another output or remove it first\n"
    assert (tmp_path / "kept").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


def test_the_standard_library_feeds_the_quickstart(tmp_path, capsys):
    output = tmp_path / "source.jsonl"
    assert collect_tool.main(["--output", str(output), "--max-mb", "1"]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert 700_000 < sum(len(row["text"].encode()) for row in rows) <= 1_000_000
    assert all(row["path"].endswith(".py") and "site-packages" not in row["path"] for row in rows)


# One text file.


LINES = [f"line {number}, " + "word " * (number % 7) for number in range(1000)]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_the_end_of_one_text_file_is_the_validation_split(trained, tmp_path, capsys, suffix):
    """Newcomer review, section 1: nanoGPT's case failed, because a file is one document."""
    text = "\n".join(LINES)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    file = tmp_path / f"a{suffix}"
    result = prepare([str(file)], trained["byte"], tmp_path / "out", validation_fraction=0.1)
    (head,), (tail,) = (documents_of(tmp_path / "out" / name) for name in ("train", "validation"))
    assert head + tail == text and head.endswith("\n") and tail.startswith("line ")
    assert 0.095 < len(tail) / len(text) <= 0.1
    assert [split.documents for split in result.splits] == [1, 1]
    said = "too few text files for a share of 0.1 of them: the end of each, so much of it, is the validation split, from the next line on, or else"
    assert said in capsys.readouterr().err
    assert PreparedData.open(tmp_path / "out" / "validation").origin(0) == (str(file), head.count("\n"))
    assert prepare([str(file)], trained["byte"], tmp_path / "out", validation_fraction=0.1).repeated


@pytest.mark.parametrize(
    "text, parts",
    [
        ("one long line of words " * 50, (1039, 111)),
        ("x" * 1000, (900, 100)),
        ("x" * 1000 + "  ", (901, 101)),
        ("x" * 980 + "\n" + "y" * 18 + "\n", (981, 19)),
    ],
)
def test_one_line_is_cut_at_a_word_or_where_it_must(trained, tmp_path, text, parts):
    """R8: as the line about it says; never so that only the white space at the end is left for validation."""
    (tmp_path / "a.txt").write_text(text)
    prepare([str(tmp_path / "a.txt")], trained["byte"], tmp_path / "out", validation_fraction=0.1)
    (head,), (tail,) = (documents_of(tmp_path / "out" / name) for name in ("train", "validation"))
    assert head + tail == text and (len(head), len(tail)) == parts


@pytest.mark.parametrize(
    "text, fraction, deduplicate",
    [
        ("one line\nand two\n" * 20, 1e-7, False),
        ("one line", 1e-17, False),
        ("words " * 50 + "\n" * 500, 0.2, False),
        ("\n" * 500 + "words", 0.9, False),
        ("x" * 1000 + "\nyyyy\n", 0.1, False),
        ("the same of both\n" * 2, 0.6, True),
    ],
)
def test_one_text_whose_end_or_beginning_is_blank_short_or_a_duplicate_is_refused_for_that(trained, tmp_path, text, fraction, deduplicate):
    """R8: what one file of plain text was told was to give one file of plain text."""
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match="the validation split is empty: the end of every text file is too short, blank, invalid or a duplicate; choose"):
        prepare([str(tmp_path / "a.txt")], trained["byte"], tmp_path / "out", validation_fraction=fraction, deduplicate=deduplicate)
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("count", [2, 5, 90])
def test_the_ends_of_a_few_text_files_are_the_validation_split(trained, tmp_path, capsys, count):
    """A newcomer's corpus of 2 and of 5 files had an empty split: each goes there with a chance of one in ten."""
    texts = {f"{number:02}.txt": "\n".join(f"file {number}, {line}" for line in LINES[:50]) for number in range(count)}
    texts["short.txt"] = "a\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    result = prepare([str(tmp_path / "*.txt")], trained["byte"], tmp_path / "out", validation_fraction=0.1)
    heads, tails = (documents_of(tmp_path / "out" / name) for name in ("train", "validation"))
    assert [split.documents for split in result.splits] == [count + 1, count] and not result.empty_documents
    assert sorted(head + tail for head, tail in zip(heads, tails)) == sorted(text for name, text in texts.items() if name != "short.txt")
    assert heads[-1] == texts["short.txt"]
    said = "too few text files for a share of 0.1 of them: the end of each, so much of it, is the validation split, from the next line on"
    assert said in capsys.readouterr().err


def test_a_blank_file_is_counted_once_where_ends_are_cut(trained, tmp_path):
    """Its end was counted as well."""
    for name, text in (("a", "\n".join(LINES)), ("b", "\n".join(LINES)), ("c", " \n"), ("d", "")):
        (tmp_path / f"{name}.txt").write_text(text)
    for fraction in (0, 0.1):
        assert prepare([str(tmp_path / "*.txt")], trained["byte"], tmp_path / f"out{fraction}", validation_fraction=fraction).empty_documents == 2


def test_ends_are_no_shorter_than_a_few_words(trained, tmp_path):
    """A reviewer's 50 short files at a fraction of 0.001 made 50 validation documents of one character."""
    for number in range(50):
        (tmp_path / f"{number}.txt").write_text(f"{number} " + "word " * 60)
    with pytest.raises(DataError, match="the validation split is empty: the end of every text file is too short, blank, invalid or a duplicate; choose another"):
        prepare([str(tmp_path / "*.txt")], trained["byte"], tmp_path / "out", validation_fraction=1e-3)


def test_many_files_lines_and_other_kinds_are_split_by_document(trained, tmp_path, capsys):
    """The ends are taken of a few plain files only; an empty split says what to do."""
    for number in range(101):
        (tmp_path / f"{number}.txt").write_text(f"file {number}\n" * 20)
    many = prepare([str(tmp_path / "*.txt")], trained["byte"], tmp_path / "many", validation_fraction=0.1)
    assert sum(split.documents for split in many.splits) == 101 and "too few text files" not in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    result = prepare([str(tmp_path / "a.txt")], trained["byte"], tmp_path / "lines", validation_fraction=0.1, text_mode="line")
    assert 60 < result.splits[1].documents < 140
    with pytest.raises(
        DataError, match=r"split is empty: none of the 1 documents .* more documents with --documents line, or give one file"
    ):
        prepare([str(tmp_path / "b.jsonl")], trained["byte"], tmp_path / "out", validation_fraction=0.001)
