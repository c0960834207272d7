"""What does not fit is refused in one line that names it, in both directions, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest
import torch
from converting import SMALL, edit_config, edit_weights, files_of, refused, write
from safetensors.torch import load_file, save_file

from pretrain.checkpoint import files, planners
from pretrain.config.model_schema import Model
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import CheckpointError, ConfigError, DataError, UserError
from pretrain.huggingface import export_model, verification
from pretrain.huggingface.directory import HfDirectory
from pretrain.huggingface.export_model import export
from pretrain.huggingface.import_model import import_model
from pretrain.models.families import complete


def test_a_missing_a_surplus_and_a_misshapen_tensor_are_named(copied, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(copied, lambda w: w.pop(name))
    assert refused(CheckpointError, copied, tmp_path) == f"{copied}: {name} is missing (1 missing, 0 surplus tensors)"
    edit_weights(copied, lambda w: w.update({name: torch.zeros(47, 32)}))
    assert refused(CheckpointError, copied, tmp_path) == f"{copied}: {name} has shape [47, 32], config.json says [48, 32]"
    edit_weights(copied, lambda w: w.update({name: torch.zeros(48, 32), "model.layers.2.extra": torch.zeros(1)}))
    assert "model.layers.2.extra has no place in llama (0 missing, 1 surplus tensors)" in refused(
        CheckpointError, copied, tmp_path
    )


@pytest.mark.parametrize(
    "dtype, code", [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64"), (torch.bool, "BOOL")]
)
def test_weights_in_other_number_formats_are_refused(copied, tmp_path, dtype, code):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(copied, lambda w: w.update({name: torch.zeros(48, 32, dtype=dtype)}))
    assert f"model.safetensors: {name} is {code}; only F32, BF16, F16 are read" in refused(CheckpointError, copied, tmp_path)


@pytest.mark.parametrize("length", [0, 5, 500, -1])
def test_truncated_weights_are_refused(copied, tmp_path, length):
    path = copied / "model.safetensors"
    os.truncate(path, length % path.stat().st_size)
    assert refused(CheckpointError, copied, tmp_path).startswith(f"{path}: damaged: ")


def test_weights_that_are_missing_or_of_another_format_are_refused(copied, tmp_path):
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert refused(CheckpointError, copied, tmp_path) == (
        f"{copied / 'model.safetensors'}: missing; only safetensors are read, other formats can execute code"
    )


@pytest.mark.parametrize("index", ["{}", "[]", "3", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "{"])
def test_a_damaged_index_is_refused(copied, tmp_path, index):
    path = copied / "model.safetensors.index.json"
    path.write_text(index)
    assert refused(CheckpointError, copied, tmp_path).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "outside", ["../outside.safetensors", "{}/outside.safetensors", "inner/../../outside.safetensors", "..", ""]
)
def test_an_index_that_names_a_file_outside_the_directory_is_refused(copied, tmp_path, outside):
    (copied / "model.safetensors").rename(tmp_path / "outside.safetensors")
    name = outside.format(tmp_path)
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    line = refused(CheckpointError, copied, tmp_path)
    assert line.endswith(f"model.norm.weight is said to be in {name!r}, which is no file of this directory")


@pytest.mark.parametrize("content", ["[]", "3", "{", "null"])
def test_a_damaged_config_json_is_refused(copied, tmp_path, content):
    (copied / "config.json").write_text(content)
    assert refused(CheckpointError, copied, tmp_path).startswith(f"{copied / 'config.json'}: ")


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"architectures": ["BertLMHeadModel"]}, "architectures=['BertLMHeadModel'] is not supported"),
        ({"attention_bias": 3}, "attention_bias=3 is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "is not supported for llama; only default, linear"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0 is not known for llama; it may change what is computed"),
        ({"intermediate_size": "remove"}, "intermediate_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size is missing or no whole number"),
    ],
)
def test_a_model_that_we_would_compute_otherwise_is_refused(copied, tmp_path, changes, problem):
    edit_config(copied, **changes)
    assert problem in refused(ConfigError, copied, tmp_path)


def test_a_directory_without_config_json_is_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    assert refused(CheckpointError, tmp_path / "empty", tmp_path).endswith("no config.json; not a Hugging Face model directory")


@pytest.mark.parametrize("missing", [True, False])
def test_a_checkpoint_whose_weights_do_not_fit_its_shape_is_not_exported(tmp_path, byte_tokenizer, missing):
    name = "model.layers.0.mlp.up.weight" if missing else "model.layers.9.mlp.up.weight"
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer, **{name: None if missing else torch.zeros(3)})
    with pytest.raises(CheckpointError, match=f"{name.removeprefix('model.')} is on one side only of llama's weight map"):
        export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path, byte_tokenizer):
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer)
    payload = next(checkpoint.glob("__0_*"))
    content = bytearray(payload.read_bytes())
    content[-100] ^= 1
    payload.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{payload.name}: its content does not match its sha256"):
        export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_an_existing_output_is_left_as_it_is(run, exported, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for action in (
        lambda: export(run, tmp_path / "out"),
        lambda: import_model(exported, tmp_path / "out"),
    ):
        with pytest.raises(DataError, match="already exists"):
            action()
        assert files_of(tmp_path) == {"out/notes.txt": b"mine"}


def test_an_export_that_computes_something_else_is_not_put_in_place(run, exported, tmp_path, monkeypatch):
    vocabulary = json.loads((exported / "config.json").read_text())["vocab_size"]
    monkeypatch.setattr(
        verification, "_their_logits", lambda folder, ids, *rest: torch.full((*ids.shape, vocabulary), torch.nan)
    )
    with pytest.raises(
        CheckpointError, match=r"logits differ from ours by nan on 64 tokens, both in float64 \(limit .*\); nothing was written"
    ):
        export(run, tmp_path / "out", verify=True)
    with pytest.raises(CheckpointError, match="nothing was written"):
        import_model(exported, tmp_path / "out", verify=True)
    assert os.listdir(tmp_path) == []


def test_verification_finds_a_weight_that_went_to_the_wrong_place(run, tmp_path, monkeypatch):
    read = export_model._Source.theirs

    def exchanged(self, line):
        one, other = (next(e for e in self.plan.entries if f"layers.{i}.attention.key.weight" in e.ours) for i in (0, 1))
        return read(self, {one.ours: other, other.ours: one}.get(line.ours, line))

    monkeypatch.setattr(export_model._Source, "theirs", exchanged)
    with pytest.raises(CheckpointError, match="logits differ from ours by"):
        export(run, tmp_path / "out", verify=True)
    assert os.listdir(tmp_path) == []


# ---- several files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(run, tmp_path):
    """An export in several files, to spoil."""
    export(run, tmp_path / "theirs", shard_bytes=20_000)
    return tmp_path / "theirs"


def edit_index(directory, change) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_truncated_or_missing_file_among_several_is_named(sharded, tmp_path):
    second = sorted(sharded.glob("*.safetensors"))[1]
    os.truncate(second, second.stat().st_size - 1)
    assert refused(CheckpointError, sharded, tmp_path).startswith(f"{second}: damaged: ")
    second.unlink()
    assert refused(CheckpointError, sharded, tmp_path).startswith(f"{second}: missing")


def test_a_tensor_in_two_files_is_refused(sharded, tmp_path):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name = "model.layers.0.input_layernorm.weight"
    for path in (first, second):
        save_file(load_file(path) | {name: torch.ones(32)}, path, metadata={"format": "pt"})
    assert f"{second}: {name} is in {first.name} as well" in refused(CheckpointError, sharded, tmp_path)


def test_an_index_that_places_tensors_otherwise_than_the_files_do_is_refused(sharded, tmp_path):
    names = [path.name for path in sorted(sharded.glob("*.safetensors"))]
    index = sharded / "model.safetensors.index.json"
    name = "model.layers.0.input_layernorm.weight"
    edit_index(sharded, lambda places: places.update({name: names[0]}))
    line = refused(CheckpointError, sharded, tmp_path)
    assert line.startswith(f"{index}: {name} is said to be in {names[0]} and is in ")
    edit_index(sharded, lambda places: places.pop(name))
    assert f"{index}: {name} is said to be in no file and is in " in refused(CheckpointError, sharded, tmp_path)
    edit_index(sharded, lambda places: places.update({name: names[-1], "model.norm.bias": names[-1]}))
    assert "model.norm.bias is said to be in" in refused(CheckpointError, sharded, tmp_path)


def test_weights_in_one_file_beside_an_index_of_others_are_refused(sharded, tmp_path):
    save_file({"model.norm.weight": torch.ones(32)}, sharded / "model.safetensors")
    assert "has both model.safetensors and an index of other files" in refused(CheckpointError, sharded, tmp_path)


def test_files_behind_links_are_read_as_the_hub_s_cache_has_them(sharded, tmp_path):
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(tmp_path / "blobs" / str(number))
    import_model(sharded, tmp_path / "imported")


# ---- vocabulary and numbers -------------------------------------------------------------------------------------------


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused_both_ways(byte_tokenizer, exported, tmp_path):
    small = dataclasses.replace(SMALL, vocab_size=200)
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer, small)
    with pytest.raises(CheckpointError, match="the vocabulary has 200 rows and the tokenizer 257 tokens"):
        export(checkpoint, tmp_path / "out")
    export(write(tmp_path / "bare", None, small), tmp_path / "theirs")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "theirs" / name).write_bytes((exported / name).read_bytes())
    line = refused(CheckpointError, tmp_path / "theirs", tmp_path)
    assert line.endswith("the tokenizer has 257 tokens but the vocabulary 200 rows; give this model's tokenizer")


@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_beyond_the_vocabulary_are_left_out_where_no_text_makes_them(copied, tmp_path, special):
    # As Gemma 3 1B has it: one token more, which stands for an image, than rows.
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    image = {
        "id": 257,
        "content": "<image>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
    tokenizer["added_tokens"].append(image)
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((copied / "tokenizer_config.json").read_text())
    more = {
        "image_token": "<image>",
        "extra_special_tokens": ["<image>"],
        "added_tokens_decoder": {"257": {"content": "<image>"}},
    }
    (copied / "tokenizer_config.json").write_text(json.dumps(config | more))
    if not special:
        assert refused(CheckpointError, copied, tmp_path).endswith("but the vocabulary 257 rows; give this model's tokenizer")
        return
    (tmp_path / ".tokenizer-in").mkdir()  # somebody's
    done = import_model(copied, tmp_path / "in", verify=True)
    assert done.tokenizer == "copied without <image>, which the vocabulary of 257 rows lacks"
    kept = load_tokenizer(tmp_path / "in" / "tokenizer")
    assert kept.vocab_size == 257 and kept.encode("a<image>") == load_tokenizer(copied).encode("a<image>")
    assert "<image>" not in (tmp_path / "in" / "tokenizer" / "tokenizer_config.json").read_text()
    export(tmp_path / "in", tmp_path / "out", verify=True)
    assert sorted(os.listdir(tmp_path)) == [".tokenizer-in", "in", "out", "theirs"]


def test_values_that_fp16_cannot_hold_are_refused_and_bf16_holds_them(byte_tokenizer, tmp_path):
    name = "layers.1.mlp.up.weight"
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer, **{f"model.{name}": torch.full((48, 32), -1e5)})
    with pytest.raises(CheckpointError, match=f"{name} has values beyond fp16's range; use --dtype bf16 or fp32"):
        export(checkpoint, tmp_path / "out", "fp16")
    assert os.listdir(tmp_path) == ["checkpoint"]
    export(checkpoint, tmp_path / "out", "bf16")


def test_a_tensor_of_another_shape_than_the_model_s_is_not_exported(byte_tokenizer, tmp_path):
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer, **{"model.norm.weight": torch.ones(31)})
    with pytest.raises(CheckpointError, match=r"norm.weight has shape \[31\], its model needs \[32\]; nothing was written"):
        export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_family_without_export_is_refused(byte_tokenizer, tmp_path):
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer, dataclasses.replace(SMALL, family="custom"))
    with pytest.raises(ConfigError, match="model.family=custom is no model of transformers'"):
        export(checkpoint, tmp_path / "out")


# ---- what verification finds ------------------------------------------------------------------------------------------


def test_a_byte_that_changed_on_the_way_to_the_disk_is_found(run, tmp_path, monkeypatch):
    compare = export_model.read_back

    def spoiled(directory, shards, hashes, seen):
        path = directory / list(shards)[-1]
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        compare(directory, shards, hashes, seen)

    monkeypatch.setattr(export_model, "read_back", spoiled)
    with pytest.raises(CheckpointError, match=r"model.safetensors: \S+ does not read back as it was written"):
        export(run, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_leaves_nothing_behind(run, exported, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_model.ShardedWriter, "write", full)
    with pytest.raises(CheckpointError, match="out: No space left on device"):
        export(run, tmp_path / "out")
    monkeypatch.setattr(planners.StreamingPlanner, "resolve_data", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        import_model(exported, tmp_path / "imported")
    monkeypatch.setattr(Path, "write_text", full)  # of what lies beside the weights
    with pytest.raises(OSError, match="No space left on device") as raised:
        import_model(exported, tmp_path / "imported")
    assert raised.value.filename == str(tmp_path / "imported")
    assert os.listdir(tmp_path) == []


def test_an_import_that_is_interrupted_leaves_nothing_behind(exported, tmp_path, monkeypatch):
    """Ctrl-C left a hidden directory as large as what was written."""
    read, entries = HfDirectory.read, []

    def interrupted(self, line):
        entries.append(line)
        if len(entries) == 5:
            raise KeyboardInterrupt
        return read(self, line)

    monkeypatch.setattr(HfDirectory, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_model(exported, tmp_path / "imported")
    assert os.listdir(tmp_path) == []


def test_an_empty_output_is_taken_by_both_directions(run, exported, tmp_path):
    """An import set an empty directory aside, as `abandoned-imported`, and said that it was of another time line."""
    for name, make in (("exported", lambda out: export(run, out)), ("imported", lambda out: import_model(exported, out))):
        (tmp_path / name).mkdir()
        make(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["exported", "imported"]
    files.verify(tmp_path / "imported")


# ---- hostile files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [None, "hf"])
def test_a_value_of_any_length_is_told_in_a_short_line(copied, tmp_path, family):
    """The message repeated an unknown field's value whole, however long, and a quantisation's whole section."""
    for name, value in (("unknown", "a" * 10**6), ("b" * 10**6, 1), ("quantization_config", {"skip": ["layer"] * 10**5}),
                        ("model_type", "c" * 10**6), ("rope_scaling", {"rope_type": "d" * 10**6, "factor": 2.0}),
                        ("hidden_size", "e" * 10**6), ("intermediate_size", int("9" * 4000))):  # fmt: skip
        before = (copied / "config.json").read_text()
        edit_config(copied, **{name: value})
        with pytest.raises(UserError) as error:
            import_model(copied, tmp_path / "in", family=family)
        assert len(str(error.value)) < 800 and "\n" not in str(error.value)
        (copied / "config.json").write_text(before)
    text = (copied / "config.json").read_text().replace("{", "{" + f'"{"f" * 10**6}": 1, ' * 2, 1)
    (copied / "config.json").write_text(text)
    assert len(refused(CheckpointError, copied, tmp_path)) < 400


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_larger_than_any_of_its_kind_is_not_read(copied, tmp_path, name):
    """A config.json of 200 MB was read, and took 573 MB of memory to be refused."""
    with (copied / name).open("wb") as file:
        file.truncate(10**9)
    assert f"{name}: 1,000,000,000 bytes; such a file has " in refused(CheckpointError, copied, tmp_path)
    if name == "config.json":
        with pytest.raises(ConfigError, match="config.json: 1,000,000,000 bytes; a config.json has 4,194,304 at most"):
            complete(Model(family="hf", hf_config=str(copied)), 32)


def test_names_that_are_there_twice_are_found_without_comparing_all_with_all(copied, tmp_path):
    """Each of 200,000 names was compared with all others to find the one that is there twice."""
    names = ", ".join(f'"{n}": 0' for n in [*range(200_000), 199_999])
    (copied / "config.json").write_text("{" + names + "}")
    begin = time.process_time()
    assert "199999 is there twice" in refused(CheckpointError, copied, tmp_path)
    assert time.process_time() - begin < 20  # 0.2 s where nothing else runs; it was minutes


@pytest.mark.parametrize("family", [None, "hf"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([float("inf"), "x", None], "eos_token_id=[inf, 'x', None] is no token, nor a list of them"),
        ([[1]], "eos_token_id=[[1]] is no token"),
        (True, "eos_token_id=True is no token"),
    ],
)
def test_end_tokens_that_are_none_are_refused_before_they_are_attached(copied, tmp_path, family, value, said):
    """generation_config.json came in as it was, and only tools/generate.py refused it later."""
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError) as error:
        import_model(copied, tmp_path / "in", family=family)
    assert f"generation_config.json: {said}" in str(error.value) and not (tmp_path / "in").exists()


@pytest.mark.parametrize("family", [None, "hf"])
@pytest.mark.parametrize("both", [{"type": "linear", "rope_type": "dynamic"}, {"type": "dynamic", "rope_type": "linear"}])
def test_two_kinds_of_scaling_in_one_field_are_refused(copied, tmp_path, family, both):
    """rope_type won without a word. Published files have both with one value."""
    edit_config(copied, rope_parameters="remove", rope_scaling=both | {"factor": 2.0})
    with pytest.raises(ConfigError, match=f"type='{both['type']}' contradicts rope_type='{both['rope_type']}'"):
        import_model(copied, tmp_path / "in", family=family)
    edit_config(copied, rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2.0})
    assert import_model(copied, tmp_path / "in", family=family).parameters > 0


@pytest.mark.parametrize("family", [None, "hf"])
@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": float("nan")}, {"rms_norm_eps": float("inf")}, {"rms_norm_eps": 1e300}, {"rms_norm_eps": -1},
        {"rms_norm_eps": {"__float__": "NaN"}}, {"rms_norm_eps": {"__float__": "Infinity"}}, {"rope_theta": float("nan")},
        {"rope_theta": 0}, {"rope_theta": -1}, {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        {"rope_scaling": {"rope_type": "linear", "factor": -1}}, {"rope_scaling": {"rope_type": "linear", "factor": float("inf")}},
        {"max_position_embeddings": 0}, {"max_position_embeddings": -1}, {"initializer_factor": float("-inf")},
    ],
)  # fmt: skip
def test_numbers_with_which_nothing_can_be_computed_are_refused(copied, tmp_path, family, changes):
    """With --family hf, they came in without a word."""
    edit_config(copied, rope_parameters="remove", **changes)
    with pytest.raises(ConfigError) as error:
        import_model(copied, tmp_path / "in", family=family)
    name = "factor" if "rope_scaling" in changes else next(iter(changes))
    assert name in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "in").exists()
