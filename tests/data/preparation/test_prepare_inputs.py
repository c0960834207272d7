"""Every kind of input: what it holds comes out once, in order, wherever it is cut; where it came from is kept."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from running import tool

from pretrain.data.preparation.binary_inputs import cut_at
from pretrain.data.preparation.documents import PieceReader, read_documents
from pretrain.data.preparation.inputs import InputFile, dataset_files, find_inputs
from pretrain.data.preparation.preparation_plan import Piece, Settings, plan_units, unit_size
from pretrain.data.preparation.prepare import merge, prepare
from pretrain.data.preparation.text_inputs import Tally
from pretrain.data.shards.reader import PreparedData
from pretrain.data.tokenizers.tokenizer import HuggingFaceTokenizer
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.errors import ConfigError, DataError
from pretrain.storage import staged_directory

END = 256  # of the byte tokenizer


@pytest.fixture
def prepared(byte_tokenizer, tmp_path):
    """prepare(inputs..., **options) -> (texts of the documents, where each comes from), by the byte tokenizer."""

    def run(*inputs, **options):
        output = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        prepare([str(name) for name in inputs], byte_tokenizer, output, **options)
        return contents(output)

    return run


def contents(path: Path) -> tuple[list[str], list[tuple[str, int]]]:
    data = PreparedData.open(path)
    data.verify()
    spans = [data.document_span(number) for number in range(data.documents)]
    documents = [data.read(start, end - start) for start, end in spans]
    assert all(ids[-1] == END and (ids[:-1] != END).all() for ids in documents)
    return [bytes(ids[:-1].tolist()).decode() for ids in documents], [data.origin(n) for n in range(data.documents)]


def pieces_of(file: InputFile, options: Settings, unit_bytes: int, end: int = END) -> list[list]:
    """The documents of each piece, and the number of its rows."""
    found = []
    for unit in plan_units([file], options, unit_bytes):
        for _, start, stop in unit:
            tally = Tally()
            documents = list(PieceReader(Piece(file, start, stop), options, end, tally).documents())
            found.append([documents, tally.rows])
    return found


def write_arrow(path: Path, table: pa.Table, stream: bool, rows: int = 3) -> Path:
    with pa.OSFile(str(path), "wb") as sink:
        with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


# Wherever the input is cut.


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), max_size=12), max_size=30),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    unit_bytes=st.integers(1, 40),
)
@settings(max_examples=150, deadline=None)
def test_lines_are_read_once_wherever_a_file_is_cut(tmp_path_factory, lines, end, last, unit_bytes):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    text = end.join(lines) + (end if last and lines else "")
    path.write_bytes(text.encode())
    pieces = pieces_of(InputFile.found_at(str(path)), Settings(text_mode="line"), unit_bytes)
    # The reference is Python's own reading of the file, with the line ends that we take for line ends.
    expected = [line.removesuffix("\n").removesuffix("\r") for line in io.StringIO(text, newline="\n")]
    assert [document for documents, _ in pieces for document, _ in documents] == expected
    assert sum(rows for _, rows in pieces) == len(expected)


@given(
    ids=st.lists(st.sampled_from([0, 1, 2, END]), max_size=60),
    unit_bytes=st.integers(2, 60),
    suffix=st.sampled_from([".npy", ".bin"]),
)
@settings(max_examples=150, deadline=None)
def test_ids_are_cut_at_the_end_id_wherever_a_file_is_cut(tmp_path_factory, ids, unit_bytes, suffix):
    path = tmp_path_factory.getbasetemp() / f"ids{suffix}"
    array = np.array(ids, dtype="<u2")
    np.save(path, array) if suffix == ".npy" else path.write_bytes(array.tobytes())
    pieces = pieces_of(InputFile.found_at(str(path)), Settings(ids_dtype="uint16"), unit_bytes)
    parts = ",".join(map(str, ids)).split(str(END)) if ids else []
    expected = [[int(word) for word in part.split(",") if word] for part in parts]
    if expected and not expected[-1]:
        expected.pop()
    assert [document.tolist() for documents, _ in pieces for document, _ in documents] == expected


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "stream.arrow", "file.arrow", "a.txt"])
@pytest.mark.parametrize("unit_bytes", [60, 700])
def test_every_kind_of_file_gives_the_same_wherever_it_is_cut(prepared, tmp_path, name, unit_bytes):
    texts = [f"document {number}" * (number % 5) for number in range(50)]
    table = pa.table({"text": texts, "other": list(range(50))})
    if name == "a.jsonl":
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    elif name == "a.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name, row_group_size=3)
    elif name == "a.txt":
        (tmp_path / name).write_text("".join(text + "\n" for text in texts))
    else:
        write_arrow(tmp_path / name, table, stream=name == "stream.arrow")
    found, origins = prepared(tmp_path / name, text_mode="line", unit_bytes=unit_bytes)
    assert found == [text for text in texts if text]
    assert origins == [(str(tmp_path / name), row) for row, text in enumerate(texts) if text]
    options = Settings(text_mode="line")
    assert len(plan_units([InputFile.found_at(str(tmp_path / name))], options, unit_bytes)) >= 1500 // (unit_bytes + 800)


def test_an_error_names_the_line_wherever_the_file_is_cut(tmp_path, byte_tokenizer):
    rows = [json.dumps({"text": "x" * (n % 7)}) for n in range(60)]
    rows[41] = '{"body": 1}'
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    pyarrow.parquet.write_table(pa.table({"text": ["x"] * 41 + [None] * 3}), tmp_path / "b.parquet", row_group_size=4)
    for stream in (True, False):
        write_arrow(tmp_path / f"{stream}.arrow", pa.table({"text": ["x"] * 41 + [None] * 3}), stream)
    for unit_bytes in (30, 100, 10_000):
        with pytest.raises(DataError, match=r"a\.jsonl, line 42: no field 'text'; it has: body"):
            prepare([str(tmp_path / "a.jsonl")], byte_tokenizer, tmp_path / "out", unit_bytes=unit_bytes, restart=True)
        for name in ("b.parquet", "True.arrow", "False.arrow"):
            with pytest.raises(DataError, match=rf"{name}, row 42: field 'text' is NoneType, not text"):
                prepare([str(tmp_path / name)], byte_tokenizer, tmp_path / "out", unit_bytes=unit_bytes, restart=True)


def test_the_plan_depends_on_the_inputs_alone_and_groups_small_files():
    files = [InputFile(f"{n}.txt", f"{n}.txt", size, 1) for n, size in enumerate([10, 20, 5, 100, 7, 1])]
    whole = -1
    assert plan_units(files, Settings(), 32) == [
        [(0, 0, whole), (1, 0, whole)],
        [(2, 0, whole)],
        [(3, 0, whole)],
        [(4, 0, whole), (5, 0, whole)],
    ]
    many = [InputFile(f"{n}.txt", f"{n}.txt", 1, 1) for n in range(10_000)]
    assert [len(unit) for unit in plan_units(many, Settings(), 1 << 20)] == [4096, 4096, 1808]
    sizes = {total: unit_size([InputFile("a", "a", total, 1)]) for total in (1000, 2**30, 2**40, 10**14)}
    assert sizes == {1000: 2**21, 2**30: 2**22, 2**40: 2**25, 10**14: 10**14 // 2**16}


# Kinds of files.


def test_zstandard_is_read_frame_by_frame(prepared, tmp_path):
    compress = zstandard.ZstdCompressor().compress
    frames = [compress("".join(f'{{"text": "{n} {m}"}}\n' for m in range(200)).encode()) for n in range(3)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    (tmp_path / "b.txt.zst").write_bytes(compress(b"one\r\ndocument"))
    (tmp_path / "c.txt.zst").write_bytes(b"")
    texts, origins = prepared(tmp_path / "*.zst")
    assert texts == [f"{n} {m}" for n in range(3) for m in range(200)] + ["one\r\ndocument"]
    assert origins[-2:] == [(str(tmp_path / "a.jsonl.zst"), 599), (str(tmp_path / "b.txt.zst"), 0)]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_truncated_archive_is_named(tmp_path, name, kept, byte_tokenizer):
    random = np.random.default_rng(0)
    lines = [json.dumps({"text": random.integers(0, 10**9, 20).tolist().__str__()}) for _ in range(300)]
    data = "\n".join(lines).encode()
    data = gzip.compress(data) if name.endswith("gz") else zstandard.ZstdCompressor().compress(data)
    (tmp_path / name).write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(DataError, match=rf"{name}: cannot be read \(Compressed file ended before"):
        prepare([str(tmp_path / name)], byte_tokenizer, tmp_path / "out")


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_damaged_tables_are_named(tmp_path, name, byte_tokenizer):
    table = pa.table({"text": [f"{n}" * 50 for n in range(100)]})
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        write_arrow(tmp_path / name, table, name == "stream.arrow")
    content = (tmp_path / name).read_bytes()
    middle = len(content) // 2
    cases = [content[:middle], b"PAR1 nonsense PAR1", b""]
    if name == "a.parquet":
        cases.append(content[:4] + b"\xff" * 64 + content[68:])  # the first page
    for damaged in cases:
        (tmp_path / name).write_bytes(damaged)
        for unit_bytes in (100, 1 << 20):
            with pytest.raises(DataError, match=rf"{name}: cannot be read \(") as caught:
                prepare([str(tmp_path / name)], byte_tokenizer, tmp_path / "out", unit_bytes=unit_bytes, restart=True)
            assert "\n" not in str(caught.value)


def test_a_file_is_read_once_a_link_to_nothing_is_refused_and_folders_of_a_glob_are_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "c" / "sub").mkdir(parents=True)
    (tmp_path / "c" / "a.txt").write_text("hello")
    (tmp_path / "c" / "sub" / "b.txt").write_text("deep")
    (tmp_path / "again").symlink_to("c")
    monkeypatch.chdir(tmp_path)
    assert len(find_inputs(["c", str(tmp_path / "c"), "again"])) == 2
    assert [file.name for file in find_inputs(["c/*"])] == ["c/a.txt"]
    assert "c/*: left out 1 folders; name them, or descend by **" in capsys.readouterr().err
    for number in range(9):
        (tmp_path / "c" / f"{number}.txt").write_text("more")
    asked, realpath = [], os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path, **options: asked.append(path) or realpath(path, **options))
    assert len(find_inputs(["c"])) == 11 and sorted(asked) == ["c", "c/sub"]  # it was asked once for each file
    (tmp_path / "c" / "z.txt").symlink_to("nowhere")
    for pattern in ("c", "c/*", "c/z.txt"):
        with pytest.raises(DataError, match=r"c/z\.txt: is a link to nowhere, which is missing"):
            find_inputs([pattern])


def test_a_path_through_a_link_and_back_means_the_same_as_to_the_system(tmp_path, byte_tokenizer, monkeypatch):
    """link/../a.txt is beside the folder that the link leads to. The a.txt beside the link was read, and the output written there."""
    monkeypatch.chdir(tmp_path)
    Path("elsewhere/folder").mkdir(parents=True)
    Path("elsewhere/data").mkdir()
    Path("data").mkdir()
    os.symlink("elsewhere/folder", "link")
    for folder, text in (("elsewhere", "right"), (".", "wrong")):
        for name in ("a.txt", "data/b.txt"):
            Path(folder, name).write_text(text)
    for number, pattern in enumerate(("link/../a.txt", "link/../*.txt", "link/../data")):
        prepare([pattern], byte_tokenizer, f"link/../out{number}")
        data = PreparedData.open(f"link/../out{number}")
        assert bytes(data.read(0, data.tokens - 1).tolist()) == b"right"
    with staged_directory(Path("link/../staged")) as stage:
        stage.joinpath("x").touch()
    assert sorted(path.name for path in Path("elsewhere").iterdir() if path.is_dir()) == ["data", "folder", "out0", "out1", "out2", "staged"]


def test_two_columns_of_one_name_are_refused(tmp_path, byte_tokenizer):
    table = pa.Table.from_arrays([pa.array(["one"]), pa.array(["two"]), pa.array(["url"])], names=["text", "text", "url"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    write_arrow(tmp_path / "a.arrow", table, stream=False)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=rf"{name}: has 2 columns 'text'; rename all but one"):
            prepare([str(tmp_path / name)], byte_tokenizer, tmp_path / "out")


def test_an_option_that_is_given_twice_adds(tmp_path, byte_tokenizer):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    words = ["--input", f"{tmp_path}/a.txt", "--input", f"{tmp_path}/b.txt", "--tokenizer", str(byte_tokenizer), "--output", f"{tmp_path}/out"]
    assert tool("prepare_data").main([*words, "--workers", "1"]) == 0
    assert contents(tmp_path / "out")[0] == ["a", "b"]


def test_a_folder_means_its_visible_files(prepared, tmp_path, capsys):
    for name in ("c/d.py", "c/.git/config", "c/.hidden.py", "c/b.txt", "c/e/.x/y.py", "c/e/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c/link").symlink_to(tmp_path / "c/e")
    texts, _ = prepared(tmp_path / "c")
    assert texts == ["c/b.txt", "c/d.py", "c/e/z"]
    assert f"{tmp_path}/c: left out 3 hidden files and folders and 1 links to folders\n" in capsys.readouterr().err


DIRTY = b"""{"text": "fine"}
{"text": "\xff"}
{"text": "\\ud800"}
{"text": null}
{"body": "x"}
{"text": 3}
[1]
{"text": "good"}
{"text": "cut"""
REASONS = [
    "not valid UTF-8 (invalid start byte)",
    "U+D800 is half of a surrogate pair, not valid text",
    "field 'text' is NoneType, not text",
    "no field 'text'; it has: body",
    "field 'text' is int, not text",
    "expected one JSON object per line, found list",
    "not valid JSON (Unterminated string",
]


@pytest.mark.parametrize("unit_bytes, workers", [(None, 1), (40, 1), (40, 2)])
def test_rows_that_cannot_be_used_are_left_out_counted_and_listed(tmp_path, byte_tokenizer, unit_bytes, workers):
    """D-D7: bad UTF-8, broken JSON, missing, empty and wrong fields, up to --max-invalid."""
    (tmp_path / "d.jsonl").write_bytes(DIRTY)
    options = {"unit_bytes": unit_bytes, "workers": workers}
    with pytest.raises(DataError, match=r"d\.jsonl, line [23]: .*leave such rows out, up to a number, with --max-invalid"):
        prepare([str(tmp_path / "d.jsonl")], byte_tokenizer, tmp_path / "out", **options)
    with pytest.raises(DataError, match=r"--max-invalid") as caught:
        prepare([str(tmp_path / "d.jsonl")], byte_tokenizer, tmp_path / "out", max_invalid=6, **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    result = prepare([str(tmp_path / "d.jsonl")], byte_tokenizer, tmp_path / "out", max_invalid=7, **options)
    assert result.invalid_documents == 7 and f"7 invalid rows left out (see {tmp_path}/out/invalid.jsonl)" in str(result)
    assert contents(tmp_path / "out") == (["fine", "good"], [(str(tmp_path / "d.jsonl"), 0), (str(tmp_path / "d.jsonl"), 7)])
    listed = [json.loads(line) for line in (tmp_path / "out" / "invalid.jsonl").read_text().splitlines()]
    assert [row["where"] for row in listed] == [f"{tmp_path}/d.jsonl, line {n}" for n in (2, 3, 4, 5, 6, 7, 9)]
    assert all(row["why"].startswith(reason) for row, reason in zip(listed, REASONS, strict=True))
    assert PreparedData.open(tmp_path / "out").manifest.preparation["invalid_documents"] == 7


def test_the_limit_of_invalid_rows_is_that_of_all_tasks_together(tmp_path, byte_tokenizer):
    """D-D7: over tasks too; and a larger number goes on from what is finished."""
    (tmp_path / "d.jsonl").write_bytes(DIRTY)
    arguments = [[str(tmp_path / "d.jsonl")], byte_tokenizer, tmp_path / "out"]
    options = {"unit_bytes": 40, "tasks": 3}
    message = r"rows cannot be used, more than --max-invalid 4, the first of them .*d\.jsonl, line 2: not valid .*finished work is kept"
    with pytest.raises(DataError, match=message):
        for task in range(3):
            prepare(*arguments, task=task, max_invalid=4, **options)
    for task in range(3):
        prepare(*arguments, task=task, max_invalid=7, **options)
    with pytest.raises(DataError, match="7 " + message):
        merge(tmp_path / "out")  # what the first start was given
    assert merge(tmp_path / "out", max_invalid=7).invalid_documents == 7


def test_what_a_tokenizer_cannot_express_and_gaps_in_tables_are_rows_that_may_be_left_out(tmp_path, trained, byte_tokenizer):
    """D-D7: nulls in Parquet, characters and ids that the vocabulary does not have."""
    (tmp_path / "a.jsonl").write_text('{"text": "def"}\n{"text": "defß"}\n{"text": "def"}\n')
    result = prepare([str(tmp_path / "a.jsonl")], trained["char"], tmp_path / "a", max_invalid=1)
    assert (result.invalid_documents, result.splits[0].documents) == (1, 2)
    pyarrow.parquet.write_table(pa.table({"text": ["x", None, "y"]}), tmp_path / "b.parquet")
    assert prepare([str(tmp_path / "b.parquet")], byte_tokenizer, tmp_path / "b", max_invalid=1).invalid_documents == 1
    assert contents(tmp_path / "b")[1] == [(str(tmp_path / "b.parquet"), 0), (str(tmp_path / "b.parquet"), 2)]
    table = pa.table({"ids": [[1], None, [2, None], [3], [300]]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    result = prepare([str(tmp_path / "c.parquet")], byte_tokenizer, tmp_path / "c", max_invalid=3, ids_field="ids")
    assert (result.invalid_documents, contents(tmp_path / "c")[0]) == (3, ["\x01", "\x03"])


@pytest.mark.parametrize("option", ["text_field", "ids_field"])
def test_a_table_without_a_column_names_the_option_that_asked_for_it(tmp_path, byte_tokenizer, option):
    """It was --text-field for a column of ids as well."""
    table = pa.table({"a": ["x"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for path in (tmp_path / "a.parquet", write_arrow(tmp_path / "a.arrow", table, stream=True)):
        with pytest.raises(DataError, match=rf"no column 'b'; it has: a\. Name one with --{option.replace('_', '-')}"):
            prepare([str(path)], byte_tokenizer, tmp_path / "out", **{option: "b"})


def test_binary_files_are_named_by_what_they_are(tmp_path, byte_tokenizer):
    """D-D9: what is no text is refused with the reader to use, or left out."""
    parquet = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": ["x"]}), parquet)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("a.txt", "x")
    npy = io.BytesIO()
    np.save(npy, np.arange(3))
    files = {
        "a.txt": (gzip.compress(b"x"), "a gzip file: name it .gz"),
        "b.txt": (zstandard.ZstdCompressor().compress(b"x"), "a Zstandard file: name it .zst"),
        "c.txt": (bz2.compress(b"x"), "a bzip2 file: name it .bz2"),
        "d.txt": (lzma.compress(b"x"), "an xz file: name it .xz"),
        "e.data": (parquet.getvalue(), "a Parquet file: name it .parquet"),
        "f.tar": (tar.getvalue(), "a tar archive: unpack it first"),
        "g.tar.gz": (gzip.compress(tar.getvalue()), "a tar archive: unpack it first"),
        "h.zip": (zipped.getvalue(), "a zip archive"),
        "i.ids": (npy.getvalue(), "a NumPy file: name it .npy"),
        "j.pdf": (b"%PDF-1.7\n", "a PDF: extract its text first"),
        "k.bin": (b"ELF\0\1", "a binary file, not text; if it holds token ids, prepare_data.py needs their type: --ids-dtype"),
        "l.exe": (b"MZ\0\1", "a binary file, not text; "),
        "m.txt": ("x".encode("utf-16"), "UTF-16: convert it first"),
        "n.txt": (b"caf\xe9", "not valid UTF-8"),
    }
    for name, (content, message) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}: {re.escape(message)}") as caught:
            prepare([str(tmp_path / name)], byte_tokenizer, tmp_path / "out")
        assert "\n" not in str(caught.value)
    (tmp_path / "z.txt").write_text("good")
    inputs = [str(tmp_path / name) for name in (*files, "z.txt")]
    assert prepare(inputs, byte_tokenizer, tmp_path / "out", max_invalid=len(files)).invalid_documents == 14
    assert contents(tmp_path / "out")[0] == ["good"]


def test_a_byte_order_mark_is_removed_and_that_is_said(prepared, tmp_path, byte_tokenizer):
    """D-D9: in every kind of text, at its beginning and nowhere else."""
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + b"one \xef\xbb\xbf")
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "c.jsonl").write_bytes(mark + b'{"text": "three"}\n')
    (tmp_path / "d.csv").write_bytes(mark + b"text\nfour\n")
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.jsonl", "d.csv")]
    result = prepare(inputs, byte_tokenizer, tmp_path / "out")
    assert contents(tmp_path / "out")[0] == ["one \ufeff", "two", "three", "four"]
    assert "3 byte order marks removed" in str(result)


# Tables and archives of other programs.


def test_csv_is_read_by_its_columns(prepared, tmp_path):
    """D-D9: a .csv is rows, not one document; quotation marks hold separators and line ends."""
    rows = [["a, b", "1"], ['say "x"\nand y', "2"], ["", "3"], ["é中", "4"]]
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text", "n"], *rows])
    texts, origins = prepared(tmp_path / "a.csv", unit_bytes=5)
    assert texts == [row[0] for row in rows if row[0]]
    assert [row for _, row in origins] == [0, 1, 3]
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    assert prepared(tmp_path / "a.csv.gz")[0] == texts
    assert prepared(tmp_path / "a.csv", text_field="n,text")[0][0] == "1\n\na, b"


def test_quotation_marks_in_tsv_are_text(prepared, tmp_path, byte_tokenizer):
    """R2: two lines of a .tsv, of which the first begins with a quotation mark and the second ends with one, became one document."""
    lines = ["text\tid", '"Hello there.\t1', 'I am Bob."\t2', "", '"all of it"\t3', '5" tall, \r, ""\t4', "é中\t5"]
    expected = ['"Hello there.', 'I am Bob."', '"all of it"', '5" tall, \r, ""', "é中"]
    for ends, last in (("\n", "\n"), ("\r\n", "")):
        (tmp_path / "a.tsv").write_bytes((ends.join(lines) + last).encode())
        texts, origins = prepared(tmp_path / "a.tsv")
        assert texts == expected and [row for _, row in origins] == [0, 1, 2, 3, 4]
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress((tmp_path / "a.tsv").read_bytes()))
    assert prepared(tmp_path / "a.tsv.gz")[0] == expected
    (tmp_path / "b.tsv").write_bytes(b'text\tid\n"of two\nlines"\t1\ncaf\xe9\t2\ngood\t3\n')
    message = r"b\.tsv, row 1: has 1 values, but the first line names 2 columns; in \.tsv quotation marks do not group values"
    with pytest.raises(DataError, match=message):
        prepared(tmp_path / "b.tsv")
    assert prepare([str(tmp_path / "b.tsv")], byte_tokenizer, tmp_path / "out", max_invalid=2).invalid_documents == 2
    assert contents(tmp_path / "out")[0] == ['lines"', "good"]


@pytest.mark.parametrize("last, wrong", [("", "unexpected end of data"), ('7,"seven"\n8,eight\n', "',' expected after")])
def test_rows_that_a_quotation_mark_swallows_are_never_left_out(tmp_path, byte_tokenizer, last, wrong):
    """R2: one stray quotation mark took 1,000 good rows away, and --max-invalid 1 called it one invalid row."""
    good = "".join(f"{number},row {number}\n" for number in range(1000))
    (tmp_path / "a.csv").write_text('id,text\n1,"of two\nlines"\n2,"stray\n' + good + last)
    lines = rf"a\.csv, lines 4 to {1005 if last else 1004}: one row by its quotation marks, and not valid CSV \({wrong}"
    for number in (0, 1, 5000):
        with pytest.raises(DataError, match=lines) as caught:
            prepare([str(tmp_path / "a.csv")], byte_tokenizer, tmp_path / "out", max_invalid=number)
        assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["a.csv"]
    (tmp_path / "a.csv").write_text('id,text\n1,"a\n2,b\n3,c",d\n4,e\n')  # the marks are in order, the number of values is not
    with pytest.raises(DataError, match=r"a\.csv, lines 2 to 4: .* and has 3 values, but the first line names 2 columns"):
        prepare([str(tmp_path / "a.csv")], byte_tokenizer, tmp_path / "out", max_invalid=1)
    (tmp_path / "a.csv").write_text('id,text\n1,a\n2,"stray')  # on the last line it takes that line alone
    assert prepare([str(tmp_path / "a.csv")], byte_tokenizer, tmp_path / "out", max_invalid=1).invalid_documents == 1


def test_dirty_csv_is_named_or_left_out(tmp_path, byte_tokenizer):
    (tmp_path / "a.csv").write_bytes(b'text,n\ngood,1\nshort\n"bad"x,3\ncaf\xe9,4\n\nlong,5,6\nfine,7\n')
    with pytest.raises(DataError, match=r"a\.csv, row 2: has 1 values, but the first line names 2 columns"):
        prepare([str(tmp_path / "a.csv")], byte_tokenizer, tmp_path / "out")
    assert prepare([str(tmp_path / "a.csv")], byte_tokenizer, tmp_path / "out", max_invalid=4).invalid_documents == 4
    assert contents(tmp_path / "out")[0] == ["good", "fine"]
    for content, message in (
        (b"a,b\n1,2\n", "no column 'text'; it has: a, b. Name one with --text-field"),
        (b"", "no column 'text'"),
        (b"text,text\n1,2\n", "has 2 columns 'text'"),
    ):
        (tmp_path / "b.csv").write_bytes(content)
        with pytest.raises(DataError, match=rf"b\.csv: {re.escape(message)}"):
            prepare([str(tmp_path / "b.csv")], byte_tokenizer, tmp_path / "other")


def write_archive(path: Path, kind: str, texts: list[str]) -> Path:
    warcwriter = pytest.importorskip("warcio.warcwriter")
    with open(path, "wb") as file:
        writer = warcwriter.WARCWriter(file, gzip=path.suffix == ".gz")
        writer.write_record(writer.create_warcinfo_record(path.name, {"software": "test"}))
        for number, text in enumerate(texts):
            payload = io.BytesIO(text.encode("utf-8", "surrogateescape"))
            writer.write_record(writer.create_warc_record(f"http://x/{number}", kind, payload, warc_content_type="text/plain"))
    return path


@pytest.mark.parametrize("name", ["a.warc.wet.gz", "a.wet", "a.warc"])
def test_the_texts_of_a_web_archive_are_documents(prepared, tmp_path, byte_tokenizer, name):
    """D-D9: a WET file is its records, not one document."""
    path = write_archive(tmp_path / name, "conversion", ["one\r\n\r\ntwo", "", "drei é", "x\udcff"])
    with pytest.raises(DataError, match=rf"{name}, record 4: not valid UTF-8"):
        prepared(path)
    prepare([str(path)], byte_tokenizer, tmp_path / "out", max_invalid=1)
    assert contents(tmp_path / "out") == (["one\r\n\r\ntwo", "drei é"], [(str(path), 0), (str(path), 2)])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(DataError, match=rf"{name}: cannot be read"):
        prepare([str(path)], byte_tokenizer, tmp_path / "other", max_invalid=1)


def test_a_web_archive_of_pages_is_refused_with_what_to_do(tmp_path, byte_tokenizer):
    path = write_archive(tmp_path / "a.warc.gz", "resource", ["<html>"])
    with pytest.raises(
        DataError, match=r"a\.warc\.gz: holds web pages as they were served \(resource records\), not text; take the WET"
    ):
        prepare([str(path)], byte_tokenizer, tmp_path / "out")


@pytest.mark.parametrize("suffix, compress", [(".bz2", bz2.compress), (".xz", lzma.compress)])
def test_bzip2_and_xz_are_read_like_gzip(prepared, tmp_path, suffix, compress):
    lines = b"".join(b'{"text": "%d"}\n' % n for n in range(3000))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(lines[:30000]) + compress(lines[30000:]))
    assert prepared(tmp_path / f"a.jsonl{suffix}", unit_bytes=100)[0] == [str(n) for n in range(3000)]
    (tmp_path / f"b.txt{suffix}").write_bytes(compress(b"text" * 1000)[:-9])
    with pytest.raises(DataError, match=rf"b\.txt{suffix}: cannot be read \(Compressed file ended"):
        prepared(tmp_path / f"b.txt{suffix}")


# URLs.


@pytest.mark.parametrize("suffix, compress", [(".bz2", bz2.compress), (".xz", lzma.compress), (".gz", gzip.compress)])
def test_a_damaged_part_of_an_archive_of_several_is_no_end(prepared, tmp_path, byte_tokenizer, suffix, compress):
    """pbzip2 and `cat a.xz b.xz` write such files; Python's readers of bzip2 and xz end in silence at a damaged head."""
    one, other = (compress(f"{name}\n".encode() * 9_000) for name in "ab")
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(one + bytes(8) + other + bytes(4))  # zeros are padding
    assert prepared(file, text_mode="line")[0] == ["a"] * 9_000 + ["b"] * 9_000
    for content in (one + b"\x01" + other, one + other[:-9], one + b"rubbish"):
        file.write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.txt{suffix}: cannot be read"):
            prepare([str(file)], byte_tokenizer, tmp_path / "out", text_mode="line")


def test_inputs_may_be_urls(prepared, tmp_path):
    """D-D4: files, patterns and folders, of every kind, as fsspec reads them; cut like local ones."""
    (tmp_path / "in" / ".git").mkdir(parents=True)
    lines = [json.dumps({"text": f"document {n}"}) + "\n" for n in range(40)]
    (tmp_path / "in" / "a.jsonl").write_text("".join(lines[:10]))
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[10:20]).encode()))
    pyarrow.parquet.write_table(
        pa.table({"text": [f"document {n}" for n in range(20, 30)]}), tmp_path / "in" / "c.parquet", row_group_size=3
    )
    write_arrow(tmp_path / "in" / "d.arrow", pa.table({"text": [f"document {n}" for n in range(30, 40)]}), True)
    (tmp_path / "in" / ".git" / "x").write_text("hidden")
    for urls in ([f"file://{tmp_path}/in"], [f"file://{tmp_path}/in/{name}*" for name in "abcd"]):
        texts, origins = prepared(*urls, unit_bytes=60)
        assert texts == [f"document {n}" for n in range(40)]
        assert origins[0] == (f"file://{tmp_path}/in/a.jsonl", 0) and origins[25] == (f"file://{tmp_path}/in/c.parquet", 5)
    np.save(tmp_path / "ids.npy", np.array([72, END, 73, 74, END], dtype=np.uint16))
    assert prepared(f"file://{tmp_path}/ids.npy", unit_bytes=2)[0] == ["H", "IJ"]


def test_urls_that_cannot_be_read_are_one_line(tmp_path, byte_tokenizer, capsys, monkeypatch):
    """D-D4: and an output is never a folder called s3: in the working directory."""
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    main = tool("prepare_data").main
    common = ["--tokenizer", str(byte_tokenizer), "--workers", "1"]
    for arguments, code, message in (
        (["--input", f"file://{tmp_path}/none.txt", "--output", "out"], 1, "none.txt: no such input file"),
        (["--input", f"file://{tmp_path}/*.csv", "--output", "out"], 1, "*.csv: no such input file"),
        (["--input", "nothing://x/y", "--output", "out"], 1, "nothing://x/y: cannot be read"),
        (
            ["--input", "a.txt", "--output", "s3://bucket/out"],
            2,
            "--output s3://bucket/out: is a URL; name a directory on a local",
        ),
        (
            ["--input", "a.txt", "--output", "out", "--tokenizer", "s3://b/t"],
            1,
            "s3://b/t: tokenizers are read from local disks only",
        ),
    ):
        assert main([*common, *arguments]) == code
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1, error
    assert sorted(os.listdir(tmp_path)) == ["a.txt"]
    with pytest.raises(ConfigError, match="--output s3://b/t: is a URL"):
        train_tokenizer([], "s3://b/t", "byte")


def test_an_unreadable_file_is_named(tmp_path, byte_tokenizer):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    if os.access(tmp_path / "a.txt", os.R_OK):  # nothing is unreadable for root: a folder in the place of the file is
        file = InputFile.found_at(str(tmp_path / "a.txt"))
        (tmp_path / "a.txt").unlink()
        (tmp_path / "a.txt").mkdir()
        with pytest.raises(DataError, match=r"a\.txt: cannot be read \(Is a directory\)"):
            list(PieceReader(Piece(file), Settings(), END, Tally()).documents())
        return
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        prepare([str(tmp_path / "a.txt")], byte_tokenizer, tmp_path / "out")


def test_several_fields_are_joined_by_a_blank_line(prepared, tmp_path):
    rows = [{"title": f"t{n}", "body": f"b{n}", "n": n} for n in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    write_arrow(tmp_path / "c.arrow", pa.Table.from_pylist(rows), True)
    texts, _ = prepared(*(tmp_path / name for name in ("a.jsonl", "b.parquet", "c.arrow")), text_field="title,body")
    assert texts == [f"t{n}\n\nb{n}" for n in range(5)] * 3
    with pytest.raises(ConfigError, match="--text-field 'title,,body'"):
        prepared(tmp_path / "a.jsonl", text_field="title,,body")


def test_a_string_column_of_any_arrow_type_is_text(prepared, tmp_path):
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        table = pa.table({"text": pa.array(["a", "b", "a"]).cast(kind)})
        write_arrow(tmp_path / "a.arrow", table, True, rows=1)
        assert prepared(tmp_path / "a.arrow", unit_bytes=50)[0] == ["a", "b", "a"], kind


# Ids.


def test_ids_from_every_kind_of_file_are_the_same_documents(prepared, tmp_path):
    documents = [[72, 105], [1, 2, 3], [0], [255] * 40]
    stream = [token for ids in documents for token in (*ids, END)]
    np.save(tmp_path / "a.npy", np.array(stream, dtype=np.int64))
    (tmp_path / "b.bin").write_bytes(np.array(stream[:-1], dtype="<u4").tobytes())
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in documents))
    pyarrow.parquet.write_table(pa.table({"ids": documents}), tmp_path / "d.parquet")
    write_arrow(tmp_path / "e.arrow", pa.table({"ids": pa.array([stream], pa.large_list(pa.uint16()))}), True)
    write_arrow(tmp_path / "f.arrow", pa.table({"ids": pa.array([[*ids, END] for ids in documents])}), False)

    def ids_of(name):
        output = tmp_path / f"out-{name}"
        from_field = "" if name in ("a.npy", "b.bin") else "ids"
        prepare([str(tmp_path / name)], TOKENIZER[0], output, ids_field=from_field, ids_dtype="uint32")
        data = PreparedData.open(output)
        assert data.manifest.shards[0].bytes == 0
        return [data.read(start, end - start)[:-1].tolist() for start, end in map(data.document_span, range(data.documents))]

    TOKENIZER = [prepared.__closure__[0].cell_contents]
    for name in ("a.npy", "b.bin", "c.jsonl", "d.parquet", "e.arrow", "f.arrow"):
        assert ids_of(name) == documents, name


def test_the_end_id_inside_a_row_closes_a_document_there():
    cut = [part.tolist() for part in cut_at(np.array([1, 2, END, 3, END, END, 4]), END)]
    assert cut == [[1, 2], [3], [], [4]]
    assert [part.tolist() for part in cut_at(np.array([1, END]), END)] == [[1]]
    assert [part.tolist() for part in cut_at(np.array([END]), END)] == [[]]
    assert [part.tolist() for part in cut_at(np.array([], int), END)] == [[]]


@pytest.mark.parametrize("wrong", [257, 2**32 + 5, -1])
def test_ids_outside_the_vocabulary_are_named_with_their_row(tmp_path, byte_tokenizer, wrong):
    (tmp_path / "a.jsonl").write_text(f'{{"ids": [1]}}\n{{"ids": [2, {wrong}]}}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: id {wrong} is outside the tokenizer's vocabulary of 257"):
        prepare([str(tmp_path / "a.jsonl")], byte_tokenizer, tmp_path / "out", ids_field="ids")
    if 0 <= wrong < 2**32:
        np.save(tmp_path / "b.npy", np.array([1, END, 2, 2, 2, END, wrong], dtype=np.uint32))
        for unit_bytes in (4, 20, 24, 100):
            with pytest.raises(DataError, match=rf"b\.npy, document 3: id {wrong} is outside"):
                prepare([str(tmp_path / "b.npy")], byte_tokenizer, tmp_path / "out", unit_bytes=unit_bytes, restart=True)


@pytest.mark.parametrize(
    "value", ['"text"', "[1.5]", "[[1], [2]]", "[true]", "null", '["1"]', "[[1], 2]", "{}", f"[2, {2**70}]"]
)
def test_a_field_that_is_no_list_of_ids_is_named(tmp_path, byte_tokenizer, value):
    (tmp_path / "a.jsonl").write_text('{"ids": [1]}\n{"ids": ' + value + "}\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: field 'ids' is not a list of ids"):
        prepare([str(tmp_path / "a.jsonl")], byte_tokenizer, tmp_path / "out", ids_field="ids")


def test_id_files_of_other_types_are_refused(tmp_path, byte_tokenizer):
    np.save(tmp_path / "a.npy", np.zeros((2, 2), int))
    np.save(tmp_path / "b.npy", np.zeros(2))
    np.save(tmp_path / "c.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "d.bin").write_bytes(b"123")
    pyarrow.parquet.write_table(pa.table({"ids": [["1"]]}), tmp_path / "e.parquet")
    pyarrow.parquet.write_table(pa.table({"ids": [[1], None]}), tmp_path / "f.parquet")
    messages = {
        "a.npy": "2 dimensions of int64", "b.npy": "1 dimensions of float64", "c.npy": "1 dimensions of object", "d.bin": "3 bytes are no",
        "e.parquet": "not lists of integers", "f.parquet": "row 2: field 'ids' has no list",
    }  # fmt: skip
    for name, message in messages.items():
        with pytest.raises(DataError, match=re.escape(message)) as caught:
            field = "ids" if name.endswith("parquet") else ""
            prepare([str(tmp_path / name)], byte_tokenizer, tmp_path / "out", ids_dtype="uint16", ids_field=field)
        assert name in str(caught.value)


def test_the_split_of_ids_follows_their_values(tmp_path, byte_tokenizer):
    random = np.random.default_rng(0)
    rows = [random.integers(0, 256, 5).tolist() for _ in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in rows))
    np.save(tmp_path / "b.npy", np.array([token for ids in rows for token in (*ids, END)], dtype=np.uint16))
    for name in ("a.jsonl", "b.npy"):
        options = {"ids_field": "ids"} if name == "a.jsonl" else {}
        prepare([str(tmp_path / name)], byte_tokenizer, tmp_path / f"out-{name}", validation_fraction=0.3, **options)
    one, other = (PreparedData.open(tmp_path / f"out-{name}" / "validation") for name in ("a.jsonl", "b.npy"))
    assert one.fingerprint == other.fingerprint and 30 < one.documents < 90


# Hugging Face datasets.


def test_datasets_on_disk_are_read_in_the_order_of_their_rows(tmp_path, byte_tokenizer, capsys):
    import datasets

    texts = [f"row {n}" for n in range(30)]
    plain = datasets.Dataset.from_dict({"text": texts})
    plain.save_to_disk(tmp_path / "plain", num_shards=12)
    datasets.DatasetDict({"train": plain, "test": plain.select([3, 1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files" / "data").mkdir(parents=True)
    for part in range(3):
        table = pa.table({"text": texts[part * 10 : part * 10 + 10]})
        pyarrow.parquet.write_table(table, tmp_path / "files" / "data" / f"train-{part:05d}-of-00003.parquet")
    cases = {
        ("plain", "train"): texts,
        ("splits", "train"): texts,
        ("splits", "test"): ["row 3", "row 1"],
        ("files", "train"): texts,
    }
    for number, ((name, split), expected) in enumerate(cases.items()):
        output = tmp_path / f"out-{number}"
        command = ["--dataset", str(tmp_path / name), "--dataset-split", split, "--tokenizer", str(byte_tokenizer)]
        assert tool("prepare_data").main([*command, "--output", str(output), "--workers", "1"]) == 0, capsys.readouterr().err
        assert contents(output)[0] == expected
    assert tool("prepare_data").main([*command[:3], "none", *command[4:], "--output", str(tmp_path / "out")]) == 1
    assert "no split 'none'; name one of train with --dataset-split" in capsys.readouterr().err


def test_a_dataset_by_name_is_read_from_the_cache_of_datasets(tmp_path, byte_tokenizer, monkeypatch, capsys):
    import datasets

    table = datasets.Dataset.from_dict({"text": ["one", "two"]})
    table.save_to_disk(tmp_path / "cache")
    asked = []

    def load_dataset(name, config, split, revision):
        asked.append((name, config, split))
        return datasets.load_from_disk(tmp_path / "cache")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    command = ["--dataset", "owner/corpus", "--dataset-config", "en", "--tokenizer", str(byte_tokenizer)]
    assert tool("prepare_data").main([*command, "--output", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert asked == [("owner/corpus", "en", "train")]
    assert contents(tmp_path / "out") == (
        ["one", "two"],
        [("owner/corpus/en/train/data-00000-of-00001.arrow", n) for n in (0, 1)],
    )


def test_a_part_of_a_dataset_is_not_taken_for_the_whole(tmp_path, monkeypatch):
    """The files of `train[:5%]` hold the other rows too."""
    import datasets

    whole = datasets.Dataset.from_dict({"text": [str(number) for number in range(100)]})
    whole.save_to_disk(tmp_path / "cache")
    loaded = datasets.load_from_disk(tmp_path / "cache")
    for part, refused in ((loaded, False), (loaded.select(range(5)), True), (loaded.select([3, 1]), True)):
        monkeypatch.setattr(datasets, "load_dataset", lambda *names, part=part, **options: part)
        if refused:
            with pytest.raises(DataError, match="its rows are not those of its files"):
                dataset_files("owner/corpus", split="train[:5%]")
        else:
            assert len(dataset_files("owner/corpus")) == 1


def test_a_dataset_that_cannot_be_had_is_one_line(tmp_path, byte_tokenizer, capsys):
    command = ["--dataset", "owner/none", "--tokenizer", str(byte_tokenizer), "--output", str(tmp_path / "out")]
    assert tool("prepare_data").main(command) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: owner/none: cannot be loaded (") and error.count("\n") == 1


# Documents of any size.


@pytest.mark.slow
def test_a_document_of_100_megabytes_comes_out_whole(tmp_path, monkeypatch, trained):
    line = "def f(x):\n    return x + 1  # a line of a very long file\n"
    text = line * (100_000_000 // len(line) + 1)
    (tmp_path / "a.txt").write_text(text)
    # A stand-in for the encoder: one id per byte, without the minutes that the library takes for a text without spaces.
    monkeypatch.setattr(
        HuggingFaceTokenizer, "encode_arrays", lambda _, texts: [np.frombuffer(t.encode(), np.uint8) for t in texts]
    )
    result = prepare([str(tmp_path / "a.txt")], trained["byte"], tmp_path / "out")
    data = PreparedData.open(tmp_path / "out")
    assert (result.splits[0].documents, data.tokens) == (1, len(text) + 1)
    assert data.manifest.shards[0].longest == len(text) + 1 and data.manifest.shards[0].bytes == len(text)
    assert bytes(data.read(99_999_000, 1000).tolist()).decode() == text[99_999_000:100_000_000]


def test_the_training_of_tokenizers_reads_the_same_texts(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(b'{"text": "x"}\n'))
    (tmp_path / "b.py").write_text("pass")
    assert list(read_documents(find_inputs([str(tmp_path)]))) == ["x", "pass"]
    np.save(tmp_path / "c.npy", np.arange(3))
    with pytest.raises(DataError, match=r"c\.npy: holds ids, not text"):
        list(read_documents([tmp_path / "c.npy"]))


def test_what_a_document_of_plain_text_is_has_no_effect_without_plain_text(tmp_path, byte_tokenizer, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.txt").write_text("b\nc\n")
    command = ["--tokenizer", str(byte_tokenizer), "--output", str(tmp_path / "o"), "--workers", "1", "--documents", "line"]
    with pytest.raises(SystemExit) as ended:
        tool("prepare_data").main([*command, "--input", str(tmp_path / "a.jsonl")])
    said = "--documents has no effect, because no input is a plain text file; leave it out"
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert tool("prepare_data").main([*command, "--input", str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]) == 0
    assert "(3 documents," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dataset-split", "train"], "--dataset-split has no effect without --dataset"),
        (["--dataset-config", "c"], "--dataset-config has no effect without --dataset"),
        (["--fim-spm-rate", "0.5"], "--fim-spm-rate has no effect without --fim-rate"),
        (["--ids-dtype", "uint16"], "--ids-dtype has no effect, because no input is a .bin file"),
    ],
)
def test_an_option_without_effect_is_bad_usage(tmp_path, byte_tokenizer, capsys, options, said):
    (tmp_path / "a.txt").write_text("text")
    command = ["--input", str(tmp_path / "a.txt"), "--tokenizer", str(byte_tokenizer), "--output", str(tmp_path / "o")]
    with pytest.raises(SystemExit) as ended:
        tool("prepare_data").main([*command, *options])
    assert ended.value.code == 2 and said in capsys.readouterr().err and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("prepare_data", ["--dataset", "", "--tokenizer", "bytes"], "--dataset is empty"),
        ("collect_source", [], "give the name of a file"),
    ],
)
def test_an_empty_name_is_bad_usage(capsys, name, options, said):
    """It was a traceback."""
    with pytest.raises(SystemExit) as ended:
        tool(name).main([*options, "--output", "/"])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_text_beside_ids_in_one_shard_has_no_bytes_per_token(tmp_path, byte_tokenizer):
    """The bytes of 5 letters beside 1,000 tokens were 0.005 bytes per token, and bits per byte 200 times too high."""
    (tmp_path / "a.txt").write_text("hello")
    np.save(tmp_path / "b.npy", np.array([*b"x" * 994, 256], dtype=np.uint16))
    prepare([str(tmp_path / "a.txt"), str(tmp_path / "b.npy")], byte_tokenizer, tmp_path / "mixed", workers=1)
    prepare([str(tmp_path / "a.txt")], byte_tokenizer, tmp_path / "text", workers=1)
    mixed, text = (PreparedData.open(tmp_path / name) for name in ("mixed", "text"))
    assert len(mixed.manifest.shards) == 1 and mixed.bytes_per_token is None
    assert text.bytes_per_token == 5 / 6
