"""Text that a run prepares itself, in the cache."""

import fcntl
import logging
import threading
import time

import numpy as np
import pytest

from pretrain.config.data_schema import CacheOptions, Data, Text
from pretrain.config.schema import Config
from pretrain.data.shards.reader import PreparedData
from pretrain.data.sources import with_prepared_text
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import DataError


def config(tmp_path, **text) -> Config:
    return Config(data=Data(text=Text(**text), cache=CacheOptions(dir=str(tmp_path / "cache"))))


def documents(prepared: Config) -> list[str]:
    [source] = prepared.data.sources
    data, tokenizer = PreparedData.open(source.path), load_tokenizer(f"{source.path}/tokenizer")
    tokens = data.read_joined(np.array([0]), np.array([data.tokens])).tolist()
    return tokenizer.decode([token for token in tokens if token != tokenizer.eod_id]).split("|")[:-1]


def test_what_is_said_of_a_dataset_reaches_its_library(monkeypatch, byte_tokenizer, tmp_path):
    import datasets

    datasets.Dataset.from_dict({"body": ["one|", "two|"]}).save_to_disk(tmp_path / "saved")
    asked = []

    def load(*names, **options):
        asked.append((*names, options))
        return datasets.load_from_disk(tmp_path / "saved")

    monkeypatch.setattr(datasets, "load_dataset", load)
    said = {"dataset": "some/name", "dataset_config": "de", "revision": "abc", "split": "test", "text_field": "body"}
    prepared = with_prepared_text(config(tmp_path, tokenizer=str(byte_tokenizer), **said))
    assert asked == [("some/name", "de", {"split": "test", "revision": "abc"})]
    assert documents(prepared) == ["one", "two"] and prepared.data.text == Text()
    assert with_prepared_text(config(tmp_path, tokenizer=str(byte_tokenizer), **said)) == prepared


def test_a_dataset_that_cannot_be_used_is_named(tmp_path, byte_tokenizer):
    for said, message in (
        ({"dataset": "pandas"}, "data.text: pandas: may execute code that comes with the data"),
        ({"dataset": "no/such"}, "data.text: no/such: cannot be loaded .*check the name and the network"),
        ({"dataset": str(tmp_path), "revision": "abc"}, "is a directory and has no revision abc; leave the revision out"),
    ):
        with pytest.raises(DataError, match=message):
            with_prepared_text(config(tmp_path, tokenizer=str(byte_tokenizer), **said))


def test_what_is_wrong_with_a_text_is_said_with_the_keys_of_the_configuration(tmp_path, byte_tokenizer):
    """It was --text-field, and --max-invalid, which a configuration does not have."""
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    with pytest.raises(DataError) as caught:
        with_prepared_text(config(tmp_path, input=[str(tmp_path / "a.jsonl")], tokenizer=str(byte_tokenizer)))
    assert str(caught.value) == (
        f"data.text: {tmp_path}/a.jsonl, line 1: no field 'text'; it has: body. Name one with data.text.text_field; correct it, or remove it from the input"
    )


def test_other_text_other_options_and_another_tokenizer_are_prepared_anew(tmp_path, byte_tokenizer, trained):
    file = tmp_path / "a.txt"
    file.write_text("one|\ntwo|\n")
    plain = {"input": [str(file)], "tokenizer": str(byte_tokenizer)}
    paths = [
        with_prepared_text(config(tmp_path, **plain | other)).data.sources[0].path for other in ({}, {"documents": "line"})
    ]
    paths.append(with_prepared_text(config(tmp_path, **plain | {"tokenizer": str(trained["bpe"])})).data.sources[0].path)
    file.write_text("three|\n")
    changed = with_prepared_text(config(tmp_path, **plain))
    assert len({*paths, changed.data.sources[0].path}) == 4 and documents(changed) == ["three"]


def test_a_process_waits_for_the_one_that_prepares_and_says_so(tmp_path, byte_tokenizer, caplog):
    (tmp_path / "a.txt").write_text("one|\n")
    own = config(tmp_path, input=[str(tmp_path / "a.txt")], tokenizer=str(byte_tokenizer))
    prepared = with_prepared_text(own)
    path = tmp_path / "cache" / "text" / prepared.data.sources[0].path.rpartition("/")[2]
    path.rename(tmp_path / "finished")
    caplog.set_level(logging.INFO)
    caplog.clear()
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = []
        waiting = threading.Thread(target=lambda: found.append(with_prepared_text(own)))
        waiting.start()
        while "waiting for another process, which prepares the text" not in caplog.text:
            time.sleep(0.01)
        (tmp_path / "finished").rename(path)
    waiting.join(30)
    assert found == [prepared] and "preparing the text" not in caplog.text
