"""Parallel files become pairs; what does not fit is refused or counted, never lost in silence."""

import gzip
import json
from pathlib import Path

import pytest
from pair_files import prepare, sentences, split_of, write_lines
from running import tool

from pretrain.data.pairs.prepared_pairs import PairOptions, PreparedPairs, Split, prepare_pairs
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import DataError
from pretrain.storage import sealed_json, unsealed


def texts(path, tokenizer) -> list[tuple[str, str]]:
    pairs, loaded = PreparedPairs.open(path), load_tokenizer(tokenizer)
    sides = pairs.read(range(len(pairs)))
    assert all(document[-1] == loaded.eod_id for side in sides for document in side)
    return [tuple(loaded.decode(document[:-1].tolist()) for document in pair) for pair in zip(*sides)]


def test_pair_i_is_line_i_of_both_files(tmp_path, byte_tokenizer):
    sources, targets = sentences(300, 1), sentences(300, 2)
    lines = prepare_pairs(tmp_path / "out", split_of(tmp_path, "x", sources, targets), None, byte_tokenizer)
    assert texts(tmp_path / "out", byte_tokenizer) == list(zip(sources, targets))
    assert len(lines) == 1 and "300 pairs of 300 lines" in lines[0] and "0 with an empty side, 0 too long" in lines[0]


def test_several_files_compressed_or_not_follow_each_other(tmp_path, byte_tokenizer):
    (tmp_path / "b.de.gz").write_bytes(gzip.compress(b"drei\nvier"))  # no line feed at the end
    split = Split(
        [write_lines(tmp_path / "a.de", ["eins", "zwei"]), tmp_path / "b.de.gz"],
        [write_lines(tmp_path / "a.en", ["one"]), write_lines(tmp_path / "b.en", ["two", "three", "four"])],
    )
    prepare_pairs(tmp_path / "out", split, None, byte_tokenizer)
    assert texts(tmp_path / "out", byte_tokenizer) == [("eins", "one"), ("zwei", "two"), ("drei", "three"), ("vier", "four")]


def test_a_character_that_is_a_line_end_to_python_only_shifts_nothing(tmp_path, byte_tokenizer):
    sources, targets = ["a\u2028b\x0bc\x85d", "e"], ["x", "y"]
    prepare_pairs(tmp_path / "out", split_of(tmp_path, "x", sources, targets), None, byte_tokenizer)
    assert texts(tmp_path / "out", byte_tokenizer) == list(zip(sources, targets))


def test_windows_line_ends_and_spaces_around_are_no_part_of_a_sentence(tmp_path, byte_tokenizer):
    (tmp_path / "de").write_bytes(b" ein Hund \r\nzwei\r\n")
    split = Split([tmp_path / "de"], [write_lines(tmp_path / "en", ["a dog", "two"])])
    prepare_pairs(tmp_path / "out", split, None, byte_tokenizer)
    assert texts(tmp_path / "out", byte_tokenizer)[0] == ("ein Hund", "a dog")


def test_a_byte_order_mark_is_no_part_of_the_first_sentence(tmp_path, byte_tokenizer):
    for name, first in (("a.de", "Hund"), ("b.de", "Katze"), ("a.en", "dog"), ("b.en", "a\ufeffcat")):
        (tmp_path / name).write_text(f"{first}\nx\n", encoding="utf-8-sig")
    split = Split(*([tmp_path / f"{part}.{side}" for part in "ab"] for side in ("de", "en")))
    [line] = prepare_pairs(tmp_path / "out", split, None, byte_tokenizer)
    found = texts(tmp_path / "out", byte_tokenizer)
    assert found == [("Hund", "dog"), ("x", "x"), ("Katze", "a\ufeffcat"), ("x", "x")]
    assert "0 too long, 4 byte order marks removed" in line


def test_lower_case_and_left_out_pairs_are_written_down(tmp_path, byte_tokenizer):
    sources, targets = ["Über", "", "b", "c" * 9, "d"], ["OVER", "x", "  ", "y", "z" * 9]
    options = PairOptions(lowercase=True, max_source_length=8, max_target_length=9)
    [line] = prepare_pairs(tmp_path / "out", split_of(tmp_path, "x", sources, targets), None, byte_tokenizer, options=options)
    assert texts(tmp_path / "out", byte_tokenizer) == [("über", "over")]
    assert "1 pairs of 5 lines" in line and "left out: 2 with an empty side, 2 too long" in line
    manifest = json.loads((tmp_path / "out" / "pairs.json").read_text())["preparation"]
    assert (manifest["lowercase"], manifest["empty"], manifest["too_long"], manifest["lines"]) == (True, 2, 2, 5)


def test_each_language_can_have_its_own_tokenizer(tmp_path, byte_tokenizer):
    from pretrain.data.tokenizers.tokenizer_training import train_tokenizer

    sources, targets = sentences(50, 1), sentences(50, 2)
    split = split_of(tmp_path, "x", sources, targets)
    train_tokenizer([str(split.target[0])], tmp_path / "chars", "char")
    prepare_pairs(tmp_path / "out", split, None, byte_tokenizer, tmp_path / "chars")
    pairs = PreparedPairs.open(tmp_path / "out")
    assert pairs.source.vocab_size == 257 and pairs.target.vocab_size < 20
    assert load_tokenizer(pairs.target.tokenizer_path).decode(pairs.read([7])[1][0][:-1].tolist()) == targets[7]


BAD = {
    "more sources": (["a", "b", "c"], ["x", "y"], r"x\.source: 3 lines, but .*x\.target: 2; line i of one"),
    "more targets": (["a"], ["x", "y", "z"], r"x\.target: 3 lines, but .*x\.source: 1; line i of one"),
    "nothing left": (["", ""], ["x", "y"], "none of its 2 lines gives a pair|no documents to write"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_do_not_match_are_refused_and_leave_nothing(tmp_path, byte_tokenizer, name):
    sources, targets, message = BAD[name]
    with pytest.raises(DataError, match=message):
        prepare_pairs(tmp_path / "out", split_of(tmp_path, "x", sources, targets), None, byte_tokenizer)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_bad_bytes_are_named_with_file_and_line(tmp_path, byte_tokenizer):
    split = split_of(tmp_path, "x", ["a", "b"], ["x", "y"])
    (tmp_path / "x.target").write_bytes(b"good\nb\xff\n")
    with pytest.raises(DataError, match=r"x\.target, line 2: not valid UTF-8"):
        prepare_pairs(tmp_path / "out", split, None, byte_tokenizer)
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"a\nb\n" * 100)[:-10])
    with pytest.raises(DataError, match=r"x\.gz: cannot be read"):
        prepare_pairs(tmp_path / "out", Split([tmp_path / "x.gz"], [tmp_path / "x.source"]), None, byte_tokenizer)
    with pytest.raises(DataError, match="absent: cannot be read"):
        prepare_pairs(tmp_path / "out", Split([tmp_path / "absent"], split.target), None, byte_tokenizer)


def test_a_character_the_tokenizer_lacks_is_named_with_its_line(tmp_path, byte_tokenizer):
    from pretrain.data.tokenizers.tokenizer_training import train_tokenizer

    train_tokenizer([str(write_lines(tmp_path / "corpus", ["abc"]))], tmp_path / "chars", "char")
    split = split_of(tmp_path, "x", ["abc", "abc"], ["abc", "abß"])
    with pytest.raises(DataError, match=r"x\.target, line 2: character 'ß'"):
        prepare_pairs(tmp_path / "out", split, None, tmp_path / "chars")


def verify(path) -> None:
    for side in PreparedPairs.open(path).holdings:
        side.verify()


def test_damage_is_found(tmp_path, byte_tokenizer):
    path = prepare(tmp_path, byte_tokenizer, 40, seed=3)
    verify(path)
    other = prepare(tmp_path / "b" if (tmp_path / "b").mkdir() is None else tmp_path, byte_tokenizer, 40, seed=4)
    shard = path / "target" / "shard-00000.bin"
    content = bytearray(shard.read_bytes())
    content[10] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="content does not match its hash"):
        verify(path)
    manifest = path / "source" / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_bytes((other / "source" / "manifest.json").read_bytes())
    with pytest.raises(DataError, match="not the manifest that pairs.json ties to the other side"):
        PreparedPairs.open(path)
    manifest.write_bytes(before)
    content = unsealed((path / "pairs.json").read_bytes())
    for change, message in (
        ({"pairs": 39}, "pairs is 39, but source has 40 documents"), ({"version": 9}, "format version 9"),
        ({"extra": 1}, "extra is not a known key"), ({"format": "x"}, "not a pretrain-pairs manifest"),
    ):  # fmt: skip
        (path / "pairs.json").write_text(sealed_json(content | change))
        with pytest.raises(DataError, match=message):
            PreparedPairs.open(path)
    (path / "pairs.json").write_text(sealed_json(content).replace('"lowercase": false', '"lowercase": true'))
    with pytest.raises(DataError, match="pairs.json: damaged, or edited by hand"):
        PreparedPairs.open(path)
    (path / "pairs.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        PreparedPairs.open(path)


SOURCES = [b"a dog", b"the <pad> cat", b"c", b"d\xff", b"", b"e", b"x</s>"]
TARGETS = ["ein hund", "die katze", "<extra_id_0> c", "d", "leer", "e", "<pad>"]
PLACES = ["s, line 2", "t, line 3", "s, line 4", "s, line 7"]
"""The lines above that cannot be used. Line 5 is empty. Both sides of line 7 are bad, which makes one pair."""


@pytest.fixture
def unusable(tmp_path, t5_tokenizer, monkeypatch) -> list[str]:
    """Options of tools/prepare_pairs.py for these lines."""
    monkeypatch.chdir(tmp_path)
    Path("s").write_bytes(b"\n".join(SOURCES))
    write_lines(Path("t"), TARGETS)
    return ["--source", "s", "--target", "t", "--tokenizer", str(t5_tokenizer), "--output", "out"]


def test_pairs_with_an_unusable_side_are_left_out_counted_and_listed(unusable, t5_tokenizer, capsys):
    """With T5's tokenizer.json one line that holds `<pad>` ended the preparation, and prepare_pairs.py had no --max-invalid."""
    assert tool("prepare_pairs").main([*unusable, "--max-invalid", "4"]) == 0
    assert "2 pairs of 7 lines" in (line := capsys.readouterr().out)
    assert "left out: 1 with an empty side, 0 too long, 4 invalid (see out/invalid.jsonl)" in line
    assert texts(Path("out"), t5_tokenizer) == [("a dog", "ein hund"), ("e", "e")]
    listed = [json.loads(line) for line in Path("out/invalid.jsonl").read_text().splitlines()]
    assert [row["where"] for row in listed] == PLACES
    assert "the text holds '<extra_id_0>'" in listed[1]["why"] and "not valid UTF-8" in listed[2]["why"]
    made = json.loads(Path("out/pairs.json").read_text())["preparation"]
    assert (made["invalid"], made["max_invalid"], made["empty"], made["pairs"]) == (4, 4, 1, 2)
    assert tool("inspect_data").main(["--corrupt-check", "out"]) == 0
    Path("out/invalid.jsonl").write_text("{}\n")
    assert tool("inspect_data").main(["--corrupt-check", "out"]) == 1
    assert "out/invalid.jsonl: its content does not match its hash" in capsys.readouterr().err


def test_more_unusable_pairs_than_max_invalid_are_an_error_that_names_the_first_beyond(unusable, capsys):
    both = ["--validation-source", "s", "--validation-target", "t"]
    for number, place in enumerate(PLACES):
        assert tool("prepare_pairs").main([*unusable, "--max-invalid", str(number)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {place}: ") and "up to a number, with --max-invalid" in error and error.count("\n") == 1
    # The number is one of the whole preparation, as that of prepare_data.py.
    assert tool("prepare_pairs").main([*unusable, *both, "--max-invalid", "7"]) == 1
    assert "s, line 7: the text holds '</s>'" in (error := capsys.readouterr().err) and "(after 7 rows" in error
    assert sorted(path.name for path in Path().iterdir()) == ["s", "t"]
    assert tool("prepare_pairs").main([*unusable, *both, "--max-invalid", "8"]) == 0
    assert Path("out/train/invalid.jsonl").read_text() == Path("out/validation/invalid.jsonl").read_text()
    assert tool("prepare_pairs").main([*unusable, "--max-invalid", "-1"]) == 2


def test_where_nothing_is_left_the_first_reason_is_told(unusable, capsys):
    """It pointed to a list that is removed with all the rest."""
    Path("s").write_bytes(b"d\xff\n\n")
    Path("t").write_text("d\n\n")
    assert tool("prepare_pairs").main([*unusable, "--max-invalid", "4"]) == 1
    assert capsys.readouterr().err.startswith(
        "error: s: none of its 2 lines gives a pair (1 with an empty side, 0 too long, 1 invalid); correct the files; the first invalid line is s, line 1: not valid UTF-8"
    )
    assert sorted(path.name for path in Path().iterdir()) == ["s", "t"]


def test_the_tool_writes_both_parts_and_says_what_it_left_out(tmp_path, byte_tokenizer, capsys):
    train, validation = (split_of(tmp_path, n, sentences(30, s), sentences(30, s + 1)) for n, s in (("t", 1), ("v", 5)))
    words = ["--source", train.source[0], "--target", train.target[0], "--validation-source", validation.source[0]]
    words += ["--validation-target", validation.target[0], "--tokenizer", byte_tokenizer, "--output", tmp_path / "out"]
    assert tool("prepare_pairs").main([str(w) for w in words]) == 0
    assert capsys.readouterr().out.count("30 pairs of 30 lines") == 2
    assert [len(PreparedPairs.open(tmp_path / "out" / part)) for part in ("train", "validation")] == [30, 30]
    assert PreparedPairs.open(tmp_path / "out" / "train").name == "out"
    assert tool("prepare_pairs").main([str(w) for w in words]) == 1
    assert "already exists" in capsys.readouterr().err
    with pytest.raises(DataError, match="did you mean .*out/train"):
        PreparedPairs.open(tmp_path / "out")
