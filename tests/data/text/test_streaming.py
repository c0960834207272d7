"""Samples straight from text: every document once per epoch over the ranks, and a resumed run goes on with the next token."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.data_schema import Text
from pretrain.data.preparation.documents import Document
from pretrain.data.preparation.prepare import prepare
from pretrain.data.samples import Windows
from pretrain.data.shards.reader import PreparedData
from pretrain.data.text.corpus import FileCorpus, HubCorpus
from pretrain.data.text.stream import START, Cursor, TextStream, continue_cursors
from pretrain.data.text.training import TextTraining
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import CheckpointError, ConfigError, DataError

EOD = 0


class Characters:
    """A tokenizer whose ids are code points, so that tests can write tokens down as text."""

    vocab_size, eod_id, fingerprint = 0x110000, EOD, "characters"

    def encode(self, text: str) -> list[int]:
        if "\0" in text:
            raise DataError("the vocabulary has no U+0000")
        return [ord(character) for character in text]

    def encode_batch(self, texts) -> list[list[int]]:
        return [self.encode(text) for text in texts]


@dataclass
class Texts:
    """A corpus in memory: files of rows."""

    files: list[list[str]]
    opened: int = 0

    def read(self, start):
        for number in range(start[0], len(self.files)):
            self.opened += 1
            for row, text in enumerate(self.files[number]):
                yield (number, row), Document(text, f"file {number}", f"row {row}")

    def identity(self):
        return {"texts": self.files}


def stream_of(files: list[list[str]], length: int, rank: int = 0, size: int = 1) -> TextStream:
    return TextStream(Texts(files), Characters(), length, rank, size)


def take(stream: TextStream, share: int, count: int, cursor: Cursor = START, ahead: int = 0) -> list:
    batches = stream.batches(share, cursor, ahead)
    try:
        return list(islice(batches, count))
    finally:
        batches.close()


def tokens_of(texts: list[str]) -> list[int]:
    return [token for text in texts for token in [*map(ord, text), EOD]]


def joined(batches: list) -> list[int]:
    """The token stream that the windows of consecutive batches were cut from."""
    windows = np.concatenate([windows for windows, _ in batches])
    assert (windows[1:, 0] == windows[:-1, -1]).all()
    return [int(windows[0, 0]), *windows[:, 1:].reshape(-1).tolist()]


def streaming_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("text-stream")]


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


# Distinct characters, so that a token names its document; blank documents and ones much longer than a window among them.
_text = st.one_of(st.sampled_from(["", " ", "\n\t"]), st.integers(1, 12), st.integers(30, 90))


@st.composite
def corpora(draw) -> list[list[str]]:
    lengths = draw(st.lists(st.lists(_text, max_size=6), min_size=1, max_size=4))
    letters = iter(range(0x4E00, 0x9FFF))
    files = [[t if isinstance(t, str) else chr(next(letters)) * t for t in file] for file in lengths]
    if sum(1 for file in files for text in file if text.strip()) < 3:
        files.append(["abc", "de", "f"])
    return files


def texts_in(files: list[list[str]]) -> list[str]:
    return [text for file in files for text in file if text.strip()]


# What the ranks read.


@pytest.mark.parametrize("ranks", [1, 2, 3])
@settings(max_examples=40, deadline=None)
@given(files=corpora(), length=st.integers(1, 17), share=st.integers(1, 3))
def test_every_rank_reads_its_documents_end_to_end_epoch_after_epoch(ranks, files, length, share):
    texts = texts_in(files)
    for rank in range(ranks):
        batches = take(stream_of(files, length, rank, ranks), share, 12)
        assert {windows.shape for windows, _ in batches} == {(share, length + 1)}
        assert {windows.dtype for windows, _ in batches} == {np.dtype(np.int64)}
        read = joined(batches)
        numbers = range(rank, rank + ranks * len(read), ranks)
        expected = tokens_of([texts[number % len(texts)] for number in numbers])
        assert read == expected[: len(read)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@settings(max_examples=25, deadline=None)
@given(files=corpora(), length=st.integers(1, 9))
def test_each_document_is_trained_on_once_per_epoch_over_the_ranks(ranks, files, length):
    texts = texts_in(files)
    counted, leftover = Counter(), 0
    for rank in range(ranks):
        read, cursor = [], START
        batches = stream_of(files, length, rank, ranks).batches(1, ahead=0)
        while cursor.epoch == 0:
            windows, cursor = next(batches)
            read.extend(windows[0, :-1].tolist())  # the last token of a window is the first of the next
        # What lies behind the epoch's last token of this rank belongs to the next epoch.
        own = len(tokens_of([text for number, text in enumerate(texts) if number % ranks == rank]))
        leftover += len(read) - own
        counted.update(read[:own])
    assert counted == Counter(tokens_of(texts))
    assert 0 <= leftover <= ranks * length


def test_ids_are_those_of_the_tokenizer(trained, corpus, texts):
    for model_type, path in trained.items():
        tokenizer = load_tokenizer(path)
        stream = TextStream(FileCorpus.find([str(corpus)]), tokenizer, 64)
        expected = [token for text in texts for token in [*tokenizer.encode(text), tokenizer.eod_id]]
        count = (len(expected) - 1) // (4 * 64)
        assert joined(take(stream, 4, count)) == expected[: count * 4 * 64 + 1], model_type


def test_windows_are_the_unshuffled_samples_of_prepared_data(trained, corpus, tmp_path):
    prepare([str(corpus)], trained["bpe"], tmp_path / "prepared")
    samples = Windows("prepared", PreparedData.open(tmp_path / "prepared"), 48)
    stream = TextStream(FileCorpus.find([str(corpus)]), load_tokenizer(trained["bpe"]), 48)
    windows = [batch[0] for batch, _ in take(stream, 1, len(samples), ahead=3)]
    tokens, targets = np.empty((2, len(samples), 48), dtype=np.int64)
    samples.fill(np.arange(len(samples)), np.arange(len(samples)), tokens, targets)
    assert np.array_equal(np.stack(windows)[:, :-1], tokens) and np.array_equal(np.stack(windows)[:, 1:], targets)


def test_reading_ahead_changes_nothing(trained, corpus):
    stream = TextStream(FileCorpus.find([str(corpus)]), load_tokenizer(trained["byte"]), 32)
    here = take(stream, 3, 40, ahead=0)
    for ahead in (1, 4):
        there = take(stream, 3, 40, ahead=ahead)
        assert all(np.array_equal(a, b) and c == d for (a, c), (b, d) in zip(here, there))


def test_a_corpus_smaller_than_a_window_is_repeated_and_epochs_are_logged(caplog):
    caplog.set_level(logging.INFO, logger="pretrain")
    ((windows, cursor),) = take(stream_of([["ab"]], 60), 1, 1)
    assert windows[0].tolist() == tokens_of(["ab"] * 20) + [ord("a")]
    assert cursor == Cursor(epoch=20, file=0, row=0, document=20, used=0)
    epochs = [int(record.args[1]) for record in caplog.records if "starts epoch" in record.getMessage()]
    assert epochs[:11] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20]


# Resume.


@pytest.mark.parametrize("ranks", [1, 2, 3])
@settings(max_examples=40, deadline=None)
@given(files=corpora(), length=st.integers(1, 17), share=st.integers(1, 3))
def test_a_run_resumed_at_any_step_reads_what_the_straight_run_reads(ranks, files, length, share):
    for rank in range(ranks):
        straight = take(stream_of(files, length, rank, ranks), share, 10)
        for cut in range(1, 9):
            cursor = Cursor.from_list(json.loads(json.dumps(straight[cut - 1][1].to_list())))
            (resumed,) = continue_cursors([cursor] * ranks, ranks).cursors[:1]
            again = take(stream_of(files, length, rank, ranks), share, 2, resumed)
            for (windows, after), (expected, expected_after) in zip(again, straight[cut : cut + 2]):
                assert np.array_equal(windows, expected)
                assert after == expected_after


def test_resume_tokenizes_and_opens_nothing_before_the_document_of_the_cursor():
    files = [["a" * 50, "b" * 50], ["c" * 50], ["d" * 50, "e" * 70_000], ["f"]]
    cursor = take(stream_of(files, 10), 1, 21)[-1][1]
    assert cursor == Cursor(epoch=0, file=2, row=1, document=4, used=210 - 204)
    seen = []

    class Recording(Characters):
        def encode_batch(self, texts):
            seen.extend(texts)
            return super().encode_batch(texts)

    corpus = Texts(files)
    take(TextStream(corpus, Recording(), 10), 1, 1, cursor)
    assert (seen, corpus.opened) == (["e" * 70_000], 1)


@settings(max_examples=150, deadline=None)
@given(
    files=corpora(),
    length=st.integers(1, 17),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    steps=st.integers(0, 12),
)
def test_another_number_of_ranks_loses_no_document_and_counts_the_repeated(files, length, before, after, steps):
    files = [*files, ["wxyz"]]  # at least as many documents as ranks
    cursors, seen, begun_before = [], Counter(), []
    for rank in range(before):
        batches = take(stream_of(files, length, rank, before), 1, steps)
        cursors.append(batches[-1][1] if batches else START)
        begun_before += begun(rank, before, cursors[-1])
        seen.update(joined(batches)[:-1] if batches else [])
    going_on = continue_cursors(cursors, after)
    assert len(going_on.cursors) == after
    if before == after:
        assert (going_on.cursors, going_on.repeated_documents) == (cursors, 0)
        return
    reached = []
    for rank, cursor in enumerate(going_on.cursors):
        batches = take(stream_of(files, length, rank, after), 1, 12, cursor)
        reached.append(batches[-1][1].document)
        seen.update(joined(batches)[:-1])
    # Every token of the documents that all the new ranks have left behind was seen, in the old ranks or the new ones.
    texts = texts_in(files)
    assert seen >= Counter(tokens_of([texts[number % len(texts)] for number in range(min(reached))]))
    smallest = going_on.cursors[0].document
    again = [n for n in begun_before if n >= smallest and not (n == smallest and going_on.cursors[n % after].used)]
    assert going_on.repeated_documents == len(again)
    assert f"{len(again):,} may be seen twice" in going_on.description


def begun(rank: int, ranks: int, cursor: Cursor) -> list[int]:
    return [n for n in range(cursor.document + (cursor.used > 0)) if n % ranks == rank]


def test_a_long_document_goes_on_where_it_was_on_another_number_of_ranks():
    files = [["a" * 1000, "b" * 1000, "c" * 1000]]
    cursors = [take(stream_of(files, 10, rank, 2), 1, 5)[-1][1] for rank in range(2)]
    going_on = continue_cursors(cursors, 3)
    assert going_on.cursors == [cursors[0], replace(cursors[0], used=0), replace(cursors[0], used=0)]
    assert going_on.cursors[0].used == 50
    assert going_on.repeated_documents == 1  # "b", which rank 1 had begun
    assert continue_cursors(going_on.cursors, 2).cursors == [cursors[0], replace(cursors[0], used=0)]


@pytest.mark.parametrize("values", [None, [], [0, 0, 0, 0], [0, 0, 0, 0, -1], [0, 0, 0, 0, 1.0], [True, 0, 0, 0, 0], "00000"])
def test_a_damaged_cursor_is_refused(values):
    with pytest.raises(CheckpointError, match="expected 5 whole numbers"):
        Cursor.from_list(values)


def test_a_cursor_inside_a_document_of_another_rank_is_refused():
    with pytest.raises(ValueError, match="another rank"):
        take(stream_of([["abc", "def"]], 2, 1, 2), 1, 1, Cursor(used=1))


# A corpus that changes.


@pytest.mark.parametrize(
    "files",
    [[["aaaa", "bbbb"]], [["aaaa", "bbbb", " "], ["dddd"]], [["aaaa"], ["bbbb"], ["cccc"]], []],
    ids=["shorter", "blank", "moved", "gone"],
)
def test_a_corpus_without_the_document_of_the_cursor_is_refused(files):
    cursor = Cursor(epoch=0, file=0, row=2, document=2, used=3)
    with pytest.raises(DataError, match=r"row 2 of file 0 .* no text\s+there any more; restore"):
        take(stream_of(files, 2), 1, 1, cursor)


def test_a_document_that_has_become_shorter_is_refused():
    with pytest.raises(DataError, match="has 4 tokens, but the checkpoint continues at token 4: the corpus has changed"):
        take(stream_of([["aaa", "bbb"]], 2), 1, 1, Cursor(used=4))


def test_a_file_that_changes_or_goes_during_the_run_is_named(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some text")
    corpus = FileCorpus.find([str(tmp_path / "*.txt")])
    (tmp_path / "b.txt").write_text("other text")
    with pytest.raises(DataError, match=r"b\.txt: has 10 bytes, 9 when the run began"):
        take(TextStream(corpus, Characters(), 4), 1, 9)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(DataError, match=r"b\.txt: cannot be read any more"):
        take(TextStream(corpus, Characters(), 4), 1, 9)


def test_the_identity_follows_names_sizes_tokenizer_and_length_but_not_the_folder(tmp_path):
    def identity(folder, files, length=8, field="text", mode="file"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
        corpus = FileCorpus.find([str(tmp_path / folder / "**")], field, mode)
        return TextStream(corpus, Characters(), length, 1, 2).identity()

    base = identity("base", {"a.txt": "one", "deep/b.txt": "two"})
    assert json.loads(json.dumps(base)) == base
    assert identity("moved", {"a.txt": "one", "deep/b.txt": "two"}) == base
    others = [
        identity("renamed", {"a.txt": "one", "deep/c.txt": "two"}),
        identity("longer", {"a.txt": "one", "deep/b.txt": "two!"}),
        identity("more", {"a.txt": "one", "deep/b.txt": "two", "z": ""}),
        identity("window", {"a.txt": "one", "deep/b.txt": "two"}, length=9),
        identity("field", {"a.txt": "one", "deep/b.txt": "two"}, field="content"),
        identity("mode", {"a.txt": "one", "deep/b.txt": "two"}, mode="line"),
    ]
    assert base not in others


# Errors.


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_unreadable_file_in_the_middle_is_named_after_what_came_before_it(tmp_path, ahead):
    (tmp_path / "a.txt").write_text("aaaa" * 10)
    (tmp_path / "b.txt").write_bytes(b"bb\xff\xfe")
    (tmp_path / "c.txt").write_text("cccc")
    batches = TextStream(FileCorpus.find([str(tmp_path / "*.txt")]), Characters(), 8).batches(1, ahead=ahead)
    assert joined([next(batches) for _ in range(5)]) == tokens_of(["aaaa" * 10])
    with pytest.raises(DataError, match=r"b\.txt.*UTF-8"):
        next(batches)
    assert streaming_threads() == []


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_document_that_cannot_be_tokenized_is_named_after_what_came_before_it(ahead):
    batches = stream_of([["aaaa", "bbbb", "c\0c", "dddd"]], 2).batches(1, ahead=ahead)
    assert joined([next(batches) for _ in range(4)]) == tokens_of(["aaaa", "bbbb"])[:9]
    with pytest.raises(DataError, match="file 0, row 2: the vocabulary has no U"):
        next(batches)


def test_a_document_outside_the_vocabulary_is_named(trained, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["ba", "be \ud800", "bi"])
    stream = TextStream(FileCorpus.find([str(path)]), load_tokenizer(trained["byte"]), 2)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2.*surrogate"):
        take(stream, 1, 9)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_fewer_documents_than_ranks_is_an_error_on_every_rank(rank):
    with pytest.raises(DataError, match="has 2 documents with text, fewer than the 3 data ranks; use fewer ranks"):
        take(stream_of([["aaaa", "", " "], ["bbbb"]], 2, rank, 3), 1, 20)


def test_a_corpus_without_text_is_an_error():
    with pytest.raises(DataError, match="has 0 documents with text"):
        take(stream_of([["", " "], []], 2), 1, 1)


def test_blank_lines_do_not_starve_a_rank(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa\n\nbbbb\n\ncccc\n\n")
    corpus = FileCorpus.find([str(tmp_path / "a.txt")], text_mode="line")
    assert joined(take(TextStream(corpus, Characters(), 4, 1, 2), 1, 1)) == tokens_of(["bbbb"])


def test_an_unknown_text_mode_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such input file"):
        FileCorpus.find([str(tmp_path / "*.txt")])
    with pytest.raises(ConfigError, match="text_mode word: expected file or line"):
        FileCorpus.find([__file__], text_mode="word")


# The thread.


def test_close_ends_the_thread_at_once_even_while_it_looks_for_a_document_of_its_rank():
    class Endless(Texts):
        def read(self, start):
            for row in range(1 << 60):
                yield (0, row), Document(text, "endless", f"row {row}")

    text = "a" * 70_000
    batches = TextStream(Endless([]), Characters(), 40_000, 0, 1 << 50).batches(1, ahead=1)
    next(batches)
    assert len(streaming_threads()) == 1
    batches.close()
    assert streaming_threads() == []


def test_close_before_the_first_batch_and_twice_is_harmless():
    batches = stream_of([["abc"]], 4).batches(1, ahead=2)
    batches.close()
    batches.close()
    assert streaming_threads() == []


def test_the_thread_reads_no_further_ahead_than_asked():
    corpus = Texts([[str(number) * 199_999] for number in range(10)])
    batches = TextStream(corpus, Characters(), 200_000).batches(1, ahead=2)
    next(batches)
    deadline = time.monotonic() + 10
    while corpus.opened < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert corpus.opened == 4  # one window and the token after it for each of one given out and two ahead
    batches.close()


def test_a_process_that_forgets_to_close_still_ends():
    code = f"""
from pretrain.data.text.corpus import FileCorpus
from pretrain.data.text.stream import TextStream

class Characters:
    eod_id = 0
    def encode_batch(self, texts):
        return [[ord(character) for character in text] for text in texts]

batches = TextStream(FileCorpus.find([{__file__!r}]), Characters(), 4).batches(1, ahead=2)
print(next(batches)[0].shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 5)\n", "")


# Datasets of the Hub, with local files in their place.


@pytest.fixture(scope="module")
def rows(tmp_path_factory, texts) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("rows")
    files = [write_lines(folder / f"{n}.jsonl", [*texts[n * 20 : n * 20 + 20], " "]) for n in range(3)]
    return tuple(map(str, files))


def test_a_dataset_gives_what_its_files_give_and_resumes(rows):
    of_files = TextStream(FileCorpus.find(rows), Characters(), 100, 1, 2)
    of_dataset = TextStream(HubCorpus("json", data_files=rows), Characters(), 100, 1, 2)
    straight = take(of_dataset, 2, 12, ahead=2)
    assert joined(straight) == joined(take(of_files, 2, 12))
    cursor = straight[5][1]
    assert cursor.row > 0 and cursor.file == 0
    again = take(of_dataset, 2, 6, cursor, ahead=2)
    assert all(np.array_equal(a, b) and c == d for (a, c), (b, d) in zip(again, straight[6:]))
    identity = of_dataset.identity()
    assert json.loads(json.dumps(identity)) == identity


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ({"name": "json", "text_field": "body"}, r"json, row 1: text field 'body' is not among text; name a field"),
        ({"name": "json", "split": "test"}, r"json, row 1: cannot be read .*test.*; check the name"),
        ({"name": "pandas"}, r"pandas: may execute code"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_named(rows, corpus, message):
    with pytest.raises(DataError, match=message):
        take(TextStream(HubCorpus(data_files=rows, **corpus), Characters(), 10), 1, 1)


def test_a_row_of_a_dataset_without_text_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "aaaa"}\n{"text": null}\n')
    stream = TextStream(HubCorpus("json", data_files=(str(tmp_path / "a.jsonl"),)), Characters(), 2)
    with pytest.raises(DataError, match="json, row 2: text field 'text' is NoneType"):
        take(stream, 1, 3)


def test_a_dataset_that_does_not_exist_is_named():
    with pytest.raises(DataError, match="no/such, row 1: cannot be read .*check the name and the network"):
        take(TextStream(HubCorpus("no/such"), Characters(), 2), 1, 1)


def test_what_is_said_of_a_dataset_reaches_its_library(monkeypatch, byte_tokenizer, tmp_path):
    import datasets

    asked = []

    def load(*names, **options):
        asked.append((*names, options["split"], options["revision"]))
        raise FileNotFoundError("not here")

    monkeypatch.setattr(datasets, "load_dataset", load)
    text = Text(
        dataset="some/name", dataset_config="de", revision="abc", split="test", tokenizer=str(byte_tokenizer), text_field="body"
    )
    opened = TextTraining.open(text, 32, tmp_path)
    with pytest.raises(DataError, match="some/name, row 1: cannot be read"):
        take(opened.stream, 1, 1)
    assert asked == [("some/name", "de", "test", "abc")]
    assert opened.stream.corpus.text_field == "body"
