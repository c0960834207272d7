"""Every kind of input: what it holds comes out once, in order, wherever it is cut; where it came from is kept."""

import gzip
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from running import tool

from pretrain.data.preparation.documents import DocumentOptions, Piece, PieceReader, read_documents
from pretrain.data.preparation.inputs import InputFile, find_inputs
from pretrain.data.preparation.lines import Tally
from pretrain.data.preparation.prepare import prepare
from pretrain.data.preparation.token_files import cut_at
from pretrain.data.preparation.units import plan_units, unit_size
from pretrain.data.shards.reader import PreparedData
from pretrain.data.tokenizers.tokenizer import HuggingFaceTokenizer
from pretrain.errors import ConfigError, DataError

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


def pieces_of(file: InputFile, options: DocumentOptions, unit_bytes: int, end: int = END) -> list[list]:
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
    pieces = pieces_of(InputFile.found_at(str(path)), DocumentOptions(text_mode="line"), unit_bytes)
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
    pieces = pieces_of(InputFile.found_at(str(path)), DocumentOptions(ids_dtype="uint16"), unit_bytes)
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
    options = DocumentOptions(text_mode="line")
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
    assert plan_units(files, DocumentOptions(), 32) == [
        [(0, 0, whole), (1, 0, whole)],
        [(2, 0, whole)],
        [(3, 0, whole)],
        [(4, 0, whole), (5, 0, whole)],
    ]
    many = [InputFile(f"{n}.txt", f"{n}.txt", 1, 1) for n in range(10_000)]
    assert [len(unit) for unit in plan_units(many, DocumentOptions(), 1 << 20)] == [4096, 4096, 1808]
    sizes = {total: unit_size([InputFile("a", "a", total, 1)]) for total in (1000, 2**30, 2**40, 10**14)}
    assert sizes == {1000: 2**21, 2**30: 2**22, 2**40: 2**25, 10**14: 10**14 // 2**16}


# Kinds of files.


def test_zstandard_is_read_frame_by_frame(prepared, tmp_path):
    compress = zstandard.ZstdCompressor().compress
    frames = [compress("".join(f'{{"text": "{n} {m}"}}\n' for m in range(200)).encode()) for n in range(3)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    (tmp_path / "b.txt.zst").write_bytes(compress(b"one\r\ndocument"))
    (tmp_path / "c.txt.zst").write_bytes(b"")
    texts, origins = prepared(tmp_path)
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


def test_a_folder_means_its_visible_files(prepared, tmp_path, capsys):
    for name in ("c/d.py", "c/.git/config", "c/.hidden.py", "c/b.txt", "c/e/.x/y.py", "c/e/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c/link").symlink_to(tmp_path / "c/e")
    texts, _ = prepared(tmp_path / "c", engine="library")
    assert texts == ["c/b.txt", "c/d.py", "c/e/z"]
    assert capsys.readouterr().err == f"{tmp_path}/c: left out 3 hidden files and folders and 1 links to folders\n"


def test_what_is_not_text_is_an_error_or_is_left_out_and_counted(tmp_path, byte_tokenizer, capsys):
    files = {"a.bin": b"ELF\0\1", "b.txt": b"caf\xe9", "c.txt": b"good"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n{"text": "\\ud800"}\n')
    inputs = [str(tmp_path / name) for name in (*files, "d.jsonl")]
    for name, reason in (("a.bin", "a binary file"), ("b.txt", "not valid UTF-8"), ("d.jsonl", "line 2: not valid UTF-8")):
        with pytest.raises(DataError, match=rf"{name}[,:] {reason}"):
            prepare([str(tmp_path / name)], byte_tokenizer, tmp_path / "out", engine="library")
    result = prepare(inputs, byte_tokenizer, tmp_path / "out", skip_invalid=True, engine="library")
    assert result.invalid_documents == 4 and "4 invalid documents skipped" in str(result)
    assert contents(tmp_path / "out")[0] == ["good", "fine"]
    skipped = capsys.readouterr().err.splitlines()
    assert [line.split(str(tmp_path))[1] for line in skipped] == [
        f"/{name}: not valid text" for name in ("a.bin", "b.txt", "d.jsonl, line 2", "d.jsonl, line 3")
    ]
    assert PreparedData.open(tmp_path / "out").manifest.preparation["invalid_documents"] == 4


def test_an_unreadable_file_is_named(tmp_path, byte_tokenizer):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    if os.access(tmp_path / "a.txt", os.R_OK):  # nothing is unreadable for root: a folder in the place of the file is
        file = InputFile.found_at(str(tmp_path / "a.txt"))
        (tmp_path / "a.txt").unlink()
        (tmp_path / "a.txt").mkdir()
        with pytest.raises(DataError, match=r"a\.txt: cannot be read \(Is a directory\)"):
            list(PieceReader(Piece(file), DocumentOptions(), END, Tally()).documents())
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
        "a.npy": "2 dimensions of int64", "b.npy": "1 dimensions of float64", "c.npy": "Python objects in dtype", "d.bin": "3 bytes are no",
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

    def load_dataset(name, config, split):
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


def test_a_dataset_that_cannot_be_had_is_one_line(tmp_path, byte_tokenizer, capsys):
    command = ["--dataset", "owner/none", "--tokenizer", str(byte_tokenizer), "--output", str(tmp_path / "out")]
    assert tool("prepare_data").main(command) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --dataset owner/none: cannot be loaded (") and error.count("\n") == 1


# Documents of any size.


def test_a_document_of_100_megabytes_comes_out_whole(tmp_path, monkeypatch, trained):
    line = "def f(x):\n    return x + 1  # a line of a very long file\n"
    text = line * (100_000_000 // len(line) + 1)
    (tmp_path / "a.txt").write_text(text)
    # A stand-in for the encoder: one id per byte, without the minutes that the library takes for a text without spaces.
    monkeypatch.setattr(
        HuggingFaceTokenizer, "encode_arrays", lambda _, texts: [np.frombuffer(t.encode(), np.uint8) for t in texts]
    )
    result = prepare([str(tmp_path / "a.txt")], trained["byte"], tmp_path / "out", engine="library")
    data = PreparedData.open(tmp_path / "out")
    assert (result.splits[0].documents, data.tokens) == (1, len(text) + 1)
    assert data.manifest.shards[0].longest == len(text) + 1 and data.manifest.shards[0].bytes == len(text)
    assert bytes(data.read(99_999_000, 1000).tolist()).decode() == text[99_999_000:100_000_000]


def test_the_training_of_tokenizers_reads_the_same_texts(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(b'{"text": "x"}\n'))
    (tmp_path / "b.py").write_text("pass")
    assert [document.text for document in read_documents(find_inputs([str(tmp_path)]))] == ["x", "pass"]
    np.save(tmp_path / "c.npy", np.arange(3))
    with pytest.raises(DataError, match=r"c\.npy: holds ids, not text"):
        list(read_documents([tmp_path / "c.npy"]))
