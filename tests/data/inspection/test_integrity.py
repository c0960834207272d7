"""The check for corruption names every damaged file of a directory or a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from pair_files import split_of
from running import run_main, tool

from pretrain.config.data_schema import Text, ValidationSource
from pretrain.config.schema import Config
from pretrain.data.inspection.integrity import check_integrity
from pretrain.data.pairs.prepared_pairs import prepare_pairs
from pretrain.data.sources import with_prepared_text


def flip(file: Path) -> str:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    return str(file)


@pytest.fixture
def copy(tmp_path, prepared) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def check(path: Path, capsys) -> tuple[int, dict, str]:
    code = tool("inspect_data").main(["--corrupt-check", str(path), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_intact_data_pass(copy, capsys):
    code, found, err = check(copy, capsys)
    assert code == 0 and err == "" and found["damaged"] == []
    assert found["files"] == len([f for f in copy.rglob("*") if f.is_file() and f.suffix in (".bin", ".idx", ".src")]) + len(
        [name for name in ("inputs.json", "tokenizer") if (copy / name).exists()]
    )


def test_a_flipped_bit_is_found_in_each_kind_of_file(copy, prepared, capsys):
    names = [
        "shard-00000.bin",
        "shard-00001.idx",
        *(f.name for f in copy.glob("shard-00002.src")),
        *(f.name for f in copy.glob("inputs.json")),
    ]
    for name in names:
        flip(copy / name)
        code, found, err = check(copy, capsys)
        assert code == 1 and [damage["file"] for damage in found["damaged"]] == [str(copy / name)]
        assert err.count("\n") == 1 and f"1 damaged: {copy / name}: its content does not match its hash" in err
        shutil.copyfile(prepared / name, copy / name)
    flip(
        next((copy / "tokenizer").glob("*.json"))
        if (copy / "tokenizer" / "tokenizer.json").exists()
        else next((copy / "tokenizer").glob("*.model"))
    )
    assert [Path(damage["file"]).name for damage in check(copy, capsys)[1]["damaged"]] == ["tokenizer"]


def test_every_damaged_file_is_named(copy, capsys):
    damaged = [flip(copy / "shard-00000.bin"), flip(copy / "shard-00002.idx")]
    (copy / "shard-00001.bin").unlink()
    (copy / "shard-00002.bin").write_bytes((copy / "shard-00002.bin").read_bytes()[:-2])
    code = tool("inspect_data").main(["--corrupt-check", str(copy)])
    out, err = capsys.readouterr()
    assert code == 1 and "error: 4 damaged: " in err
    for name in (*damaged, str(copy / "shard-00001.bin"), str(copy / "shard-00002.bin")):
        assert f"damaged  {name}: " in out
    assert f"{copy / 'shard-00001.bin'}: missing, though the manifest lists it" in out


def test_a_run_is_checked_with_its_packing_index(config_file, copy, tmp_path, capsys):
    keys = [f"data.sources.0.path={copy}", f"data.validation=[{{path: {copy}}}]", "data.packing=best_fit"]
    keys += [f"data.cache.dir={tmp_path / 'cache'}", "run.steps=1", "schedule.warmup_steps=0"]
    assert run_main(str(config_file), *keys)[0] == 0
    run = config_file.parent / "runs" / "run"
    before = check(run, capsys)
    assert before[0] == 0
    indices = sorted((tmp_path / "cache").rglob("*.idx"))
    assert len(indices) == 4
    for index in indices:
        content = index.read_bytes()
        flip(index)
        code, found, _ = check(run, capsys)
        assert code == 1 and [damage["file"] for damage in found["damaged"]] == [str(index)]
        index.write_bytes(content)
    manifest = indices[0].parent / "manifest.json"
    manifest.write_text("{")
    (copy / "manifest.json").write_text(json.dumps({"format": "other"}))
    damaged = [damage["file"] for damage in check(run, capsys)[1]["damaged"]]
    assert damaged == [str(copy)]
    shutil.rmtree(tmp_path / "cache")  # an index that is not there is made again


def test_both_splits_are_checked(copy, tmp_path, prepared):
    shutil.copytree(prepared, tmp_path / "both" / "train")
    shutil.copytree(prepared, tmp_path / "both" / "validation")
    damaged = flip(tmp_path / "both" / "validation" / "shard-00001.bin")
    assert [damage.file for damage in check_integrity(str(tmp_path / "both")).damaged] == [damaged]


def test_a_directory_of_something_else_is_refused(tmp_path, capsys):
    assert tool("inspect_data").main(["--corrupt-check", str(tmp_path)]) == 1
    assert "is this a directory written by tools/prepare_data.py?" in capsys.readouterr().err


def run_on_pairs(folder: Path, pairs: Path) -> Path:
    """The directory of a run that trains and validates on pairs, named as a run names them: from the folder where it was started."""
    config = Config()
    config.data.pairs = str((pairs / "train").relative_to(folder))
    config.data.validation = [ValidationSource(str((pairs / "validation").relative_to(folder)))]
    return run_of(folder, config)


def run_of(folder: Path, config: Config) -> Path:
    """The directory of a run that was started in a folder."""
    start = {"step": 0, "samples": 0, "data_size": 1, "config": dataclasses.asdict(config), "folder": str(folder)}
    (folder / "run").mkdir()
    (folder / "run" / "starts.jsonl").write_text(json.dumps(start | {"fingerprints": []}) + "\n")
    return folder / "run"


def test_the_pairs_of_a_run_are_checked_and_so_is_a_directory_of_pairs(tmp_path, byte_tokenizer, capsys):
    train, validation = (split_of(tmp_path, name, ["a b", "c"], ["x", "y z"]) for name in ("train", "validation"))
    prepare_pairs(tmp_path / "pairs", train, validation, byte_tokenizer)
    run = run_on_pairs(tmp_path, tmp_path / "pairs")
    both = tmp_path / "pairs"
    for place in (run, both):
        code, found, _ = check(place, capsys)
        assert code == 0 and found["damaged"] == [] and found["files"] == 20  # of 4 sides: 3 of a shard, inputs, tokenizer
    damaged = [flip(both / "train" / "source" / "shard-00000.bin"), flip(both / "validation" / "target" / "shard-00000.idx")]
    for place, named in ((run, damaged), (both, damaged), (both / "train", damaged[:1])):
        code, found, _ = check(place, capsys)
        assert code == 1 and [damage["file"] for damage in found["damaged"]] == named
    flip(both / "train" / "pairs.json")
    assert str(both / "train") in [damage["file"] for damage in check(run, capsys)[1]["damaged"]]


def test_the_text_of_a_run_is_checked_and_not_prepared_for_that(tmp_path, byte_tokenizer, capsys):
    """A missing one was prepared anew, and was intact."""
    (tmp_path / "a.txt").write_text("some text")
    config = Config()
    config.data.text = Text(input=[str(tmp_path / "a.txt")], tokenizer=str(byte_tokenizer))
    config.data.cache.dir = str(tmp_path / "cache")
    run = run_of(tmp_path, config)
    place = with_prepared_text(config, make=False).data.sources[0].path
    code, found, _ = check(run, capsys)
    assert code == 1 and [damage["file"] for damage in found["damaged"]] == [place] and not (tmp_path / "cache").exists()
    with_prepared_text(config)
    assert check(run, capsys)[0] == 0
    flip(Path(place) / "shard-00000.bin")
    assert [damage["file"] for damage in check(run, capsys)[1]["damaged"]] == [f"{place}/shard-00000.bin"]
