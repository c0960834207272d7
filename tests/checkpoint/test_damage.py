"""Checkpoints that are damaged, hostile, or another run's: refused by name, with a fall back to the last good one."""

import json
import os
import pickle
import shutil
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from running import run_main, tool, train
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from pretrain import storage
from pretrain.checkpoint import files, save
from pretrain.checkpoint.payload import Payload, make_whole, read_metadata
from pretrain.checkpoint.retention import outdated, retire
from pretrain.config.schema import Checkpoint
from pretrain.distributed.ranks import ALONE
from pretrain.errors import CheckpointError
from pretrain.train.run_directory import RunDirectory

PERIODIC = ("run.steps=15", "checkpoint.every_steps=5", "checkpoint.keep_last=0")


@pytest.fixture
def run(trained_run, config_file) -> Path:
    return trained_run(1, config_file, *PERIODIC)


def newest(run: Path) -> Path:
    return files.complete_checkpoints(run / "checkpoints")[-1]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip_bit, truncate, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "tokenizer/tokenizer.json"])
def test_a_damaged_file_is_named_and_resume_falls_back_to_the_checkpoint_before(pool, config_file, run, damage, name):
    damage(newest(run) / name)
    with pytest.raises(CheckpointError, match=f"step-00000015/{name}".replace(".", r"\.")):
        files.verify(newest(run))
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *PERIODIC)
    assert code == 0
    assert f"damaged checkpoint: {newest(run) / name}" in printed and "falling back to" in printed
    assert "step-00000010: step 10" in printed and "finished at step 15" in printed
    files.verify(newest(run))  # the damaged one was replaced


@pytest.mark.slow
def test_the_damage_is_found_whichever_rank_hashes_the_file(pool, config_file):
    run = train(pool, 4, config_file, *PERIODIC, "parallel.strategy=fsdp")
    for name in [f"__{rank}_0.distcp" for rank in range(4)]:
        copy = run.parent / "copy"
        shutil.copytree(run, copy)
        flip_bit(newest(copy) / name)
        results = pool.launch(4, run_main, str(config_file), *PERIODIC, "parallel.strategy=fsdp", "run.name=copy")
        assert all(code == 0 for code, _ in results) and name in results[0][1]
        shutil.rmtree(copy)


def test_when_every_checkpoint_is_damaged_nothing_starts_afresh(pool, config_file, run):
    for checkpoint in files.complete_checkpoints(run / "checkpoints"):
        flip_bit(checkpoint / "__0_0.distcp")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *PERIODIC)
    assert code == 1 and "no earlier checkpoint is left to fall back to" in printed


def test_a_named_checkpoint_is_taken_or_refused_never_replaced_by_another(pool, config_file, run):
    flip_bit(newest(run) / "__0_0.distcp")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *PERIODIC, f"run.resume={newest(run)}", "run.name=other")
    assert code == 1 and "step-00000015/__0_0.distcp: its content does not match its sha256" in printed


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_directory_without_its_manifest_is_no_checkpoint(run, name):
    before = files.complete_checkpoints(run / "checkpoints")
    (newest(run) / name).unlink()
    if name == "manifest.json":
        assert files.complete_checkpoints(run / "checkpoints") == before[:-1]
    else:
        with pytest.raises(CheckpointError, match="state.json: missing"):
            files.verify(before[-1])


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 99}, "manifest.json: format version 99, this program reads 2; take the version of the program that wrote it"),
    ({"version": [True]}, "format version .*, this program reads 2"),
    ({"format": "other"}, "not a manifest"),
    ({"files": {"../../outside": {"bytes": 1, "sha256": ""}}}, "list of files is damaged"),
    ({"files": []}, "list of files is damaged"),
    ({"files": {}}, "list of files is damaged: .metadata is not in it"),
    ({"files": {".metadata": {"bytes": 1, "sha256": ""}}}, "list of files is damaged: state.json is not in it"),
])  # fmt: skip
def test_a_foreign_manifest_is_refused(run, change, message):
    path = newest(run) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        files.verify(newest(run))


@pytest.mark.parametrize(("name", "value"), [("step", None), ("world_size", "two"), ("samples", -1), ("tokens", True)])
def test_a_state_without_its_numbers_is_an_error_in_one_line(run, name, value):
    """A state.json without `step` or `world_size` ended a start in a traceback."""
    path = newest(run) / "state.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**content, name: value}.items() if v is not None}))
    with pytest.raises(CheckpointError, match=rf"state\.json: {name} is {value!r}, not a number; choose another checkpoint"):
        files.load_state(newest(run))


def rewrite_state(checkpoint: Path, change) -> None:
    """Change state.json, and the manifest with it."""
    content = json.loads((checkpoint / "state.json").read_text())
    change(content)
    (checkpoint / "state.json").write_text(json.dumps(content))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"] = files.describe_file(checkpoint / "state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(("change", "said"), [
    (lambda state: state.update(identity=5), "identity is 5, which no checkpoint has there"),
    (lambda state: state.update(record=1.5), "record is 1.5, which no checkpoint has there"),
    (lambda state: state.update(useful_seconds="9"), "useful_seconds is '9', which no checkpoint has there"),
    (lambda state: state.pop("identity"), "does not say which run it is of, so it cannot be resumed; use run.init_from="),
    (lambda state: state.update(step=10), "step-00000015 is the checkpoint of step 10, as its state.json says; move it out of this folder"),
])  # fmt: skip
def test_a_state_that_no_run_has_written_is_an_error_in_one_line(pool, config_file, run, change, said):
    """Each but the last ended a start in a traceback. With the last, the run went on from step 10 in the name of step 15."""
    rewrite_state(newest(run), change)
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "run.steps=20", "schedule.name=constant", f"run.resume={newest(run)}")
    assert code == 1 and said in printed and "Traceback" not in printed


ODD_MODELS = [
    ({"max_sequence_length": -5}, "state.json: model.max_sequence_length=-5: must be at least 1; choose another checkpoint"),
    ({"dim": 64}, "embedding.weight has the shape [257, 64] by the model of its state.json, and [257, 32] among its weights"),
    ({"layers": 1}, "has the shape none by the model of its state.json, and ["),
    ({"layers": 3}, "by the model of its state.json, and none among its weights; choose another checkpoint"),
    ({"layers": 10**9}, "model.layers=1000000000: must be at most 4096"),
    ({"layers": 4096}, "state.json says 4096 layers, and the weights are "),
    ({"norm": {"kind": "zzz"}}, "model.norm.kind=zzz: expected one of rms"),
    ({"dim": "x"}, "model.dim=x: expected int"),
    ({"heads": 0}, "model.heads=0: must be at least 1"),
    ({"kv_heads": 3}, "is not divisible by model.kv_heads=3"),
    ({"family": 5}, "model.family=5: expected one of"),
    ({"family": "../x"}, "model.family=../x: expected one of"),
]


@pytest.mark.parametrize("changes, said", ODD_MODELS)
def test_a_model_that_no_configuration_gives_is_an_error_in_one_line(run, changes, said, tmp_path, capsys):
    """A hostile tester changed state.json and its hash in the manifest: tools ended in tracebacks, ran for minutes, or printed a loss of 0."""
    rewrite_state(newest(run), lambda state: state["model"].update(changes))
    for name, *words in (
        ("generate", "--model", str(newest(run)), "--prompt", "a", "--max-tokens", "2"),
        ("evaluate", "--model", str(newest(run)), "--data", str(run.parent.parent / "none")),
    ):
        code = tool(name).main(words)
        printed = capsys.readouterr().err
        assert code == 1 and said in printed and printed.count("\n") == 1, printed
    code = tool("convert_checkpoint").main(["to-hf", "--checkpoint", str(newest(run)), "--output", str(tmp_path / "exported")])
    printed = capsys.readouterr().err
    assert code in (1, 2) and "Traceback" not in printed and not (tmp_path / "exported").exists()


def test_a_misnamed_copy_beside_the_checkpoint_it_is_of_is_to_be_moved_away(pool, config_file, run):
    shutil.copytree(newest(run), newest(run).with_name("step-00000020"))
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "run.steps=20", "schedule.name=constant")
    said = "step-00000020 is the checkpoint of step 15, as its state.json says; move it out of this folder"
    assert code == 1 and said in printed


def test_a_model_of_a_later_version_is_an_error_in_one_line(pool, config_file, run, capsys):
    rewrite_state(newest(run), lambda state: state["model"].update(tomorrow=1))
    said = "`model` is not one of this version of the program (KeyError: 'tomorrow')"
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "run.name=other", f"run.init_from={newest(run)}")
    assert code == 1 and said in printed and "Traceback" not in printed
    assert tool("convert_checkpoint").main(["to-hf", "--checkpoint", str(run), "--output", str(run.parent / "exported")]) == 1
    assert said in capsys.readouterr().err


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_hostile_metadata_is_refused_and_executes_nothing(run, tmp_path):
    fired = tmp_path / "fired"
    (newest(run) / ".metadata").write_bytes(pickle.dumps(Bomb(fired)))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: .*system has no place in checkpoint metadata"):
        read_metadata(newest(run))
    assert not fired.exists()
    pickle.loads(pickle.dumps(Bomb(fired)))
    assert fired.exists()  # the bomb is real


class Attribute:
    """Pickled as a call of getattr, as Python 3.11.0 to 3.11.3 pickle the member of an enumeration."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self.owner, self.name)


def test_members_of_metadatas_enumeration_are_read_as_every_python_writes_them(run):
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

    file = newest(run) / ".metadata"
    member = Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")
    file.write_bytes(pickle.dumps(Metadata(state_dict_metadata={}, planner_data=member)))
    assert read_metadata(newest(run)).planner_data is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    for owner, name in ((Path, "unlink"), (_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__")):
        file.write_bytes(pickle.dumps(Metadata(state_dict_metadata={}, planner_data=Attribute(owner, name))))
        with pytest.raises(CheckpointError, match=r"\.metadata: refused"):
            read_metadata(newest(run))


def test_a_payload_with_an_item_that_is_no_tensor_is_refused(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model.weight": torch.ones(2), "extra": {"an": "object"}}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointError, match="item extra.* is not a tensor, and reading it could execute code"):
        Payload(tmp_path / "c").read_all("model.")


@pytest.mark.parametrize("file", ["/etc/passwd", "../elsewhere/__0_0.distcp", "..", ""])
def test_a_payload_lies_in_its_checkpoint(run, file):
    """A table of contents could name any file of the machine, whose bytes would have been read as weights."""
    metadata = read_metadata(newest(run))
    place = next(iter(metadata.storage_data.values()))
    place.relative_path = file
    (newest(run) / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: it names a file that is not in the checkpoint"):
        read_metadata(newest(run))


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda metadata: setattr(metadata, "storage_data", [1]), "it has no table of places"),
    (lambda metadata: setattr(next(iter(metadata.state_dict_metadata.values())), "properties", None), "has no number format"),
    (lambda metadata: setattr(next(iter(metadata.state_dict_metadata.values())).properties, "dtype", "fp32"), "has no number format"),
    (lambda metadata: metadata.state_dict_metadata.update({7: next(iter(metadata.state_dict_metadata.values()))}), "item 7 is not a tensor"),
])  # fmt: skip
def test_a_table_of_contents_of_other_things_is_refused(run, spoil, said):
    """Each ended a tool in a traceback."""
    metadata = read_metadata(newest(run))
    spoil(metadata)
    (newest(run) / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"\.metadata: refused: .*{said}"):
        read_metadata(newest(run))


def test_tensors_in_a_file_that_the_manifest_does_not_list_are_not_read(run, capsys):
    """Nothing would have proven them: verification goes by the manifest."""
    manifest = json.loads((newest(run) / "manifest.json").read_text())
    del manifest["files"]["__0_0.distcp"]
    (newest(run) / "manifest.json").write_text(json.dumps(manifest))
    files.verify(newest(run))
    with pytest.raises(CheckpointError, match=r"its tensors lie in __0_0\.distcp, which its manifest does not list"):
        Payload(newest(run)).names()
    assert tool("verify_checkpoint").main([str(newest(run))]) == 1
    assert capsys.readouterr().out.startswith("damaged  ")


@pytest.mark.parametrize("config", ["{", 4, "[" * 100_000])
def test_a_model_of_transformers_with_no_configuration_is_an_error_in_one_line(run, config, tmp_path, capsys):
    rewrite_state(newest(run), lambda state: state["model"].update(hf_config=config))
    with pytest.raises(CheckpointError, match="`model` is not one of this version of the program"):
        files.model_of(newest(run), files.load_state(newest(run)))
    others = files.complete_checkpoints(run / "checkpoints")
    assert tool("average_checkpoints").main([str(others[0]), str(newest(run)), "--output", str(tmp_path / "mean")]) == 1
    assert "`model` is not one of this version of the program" in capsys.readouterr().err


def test_pieces_that_do_not_cover_a_tensor_are_refused(run):
    """The rest of the tensor would have kept whatever was in memory."""
    metadata = read_metadata(newest(run))
    next(iter(metadata.state_dict_metadata.values())).chunks.clear()
    (newest(run) / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: the pieces of .* do not make the whole of it"):
        read_metadata(newest(run))


@pytest.mark.parametrize(("size", "pieces", "good"), [
    ((4, 6), [((0, 0), (4, 6))], True),
    ((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6))], True),
    ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))], True),  # a pinwheel
    ((4, 6), [((0, 0), (4, 6)), ((4, 0), (0, 6))], True),  # a rank that has nothing
    ((), [((), ())], True),
    ((0, 5), [((0, 0), (0, 5))], True),
    ((0, 5), [], True),
    ((4, 6), [((0, 0), (2, 6)), ((0, 0), (2, 6))], False),  # one half twice
    ((4, 6), [((0, 0), (2, 6)), ((1, 0), (2, 6))], False),
    ((4, 6), [((0, 0), (2, 6)), ((4, 0), (2, 6))], False),  # beside the tensor
    ((4, 6), [((0, 0), (2, 3)), ((2, 3), (2, 3)), ((0, 3), (2, 3)), ((0, 3), (2, 3))], False),
    ((4, 6), [((0, 0), (4, 6)), ((2, 0), (2, 6)), ((4, 0), (-2, 6))], False),
    ((4, 6), [((0,), (24,))], False),
    ((4, 6), [((0, 0, 0), (4, 6, 1))], False),
    ((), [((), ()), ((), ())], False),
    ((2,) * 30, [((0,) * 30, (1,) * 30)], False),
])  # fmt: skip
def test_pieces_make_a_tensor_if_they_cover_each_element_once(size, pieces, good):
    """Sizes that add up are not enough: two pieces at one place left another as it was in memory."""
    chunks = [ChunkStorageMetadata(torch.Size(begin), torch.Size(length)) for begin, length in pieces]
    assert make_whole(TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)) is good


def test_pieces_that_overlap_are_refused(run):
    metadata = read_metadata(newest(run))
    chunks = next(item.chunks for item in metadata.state_dict_metadata.values() if len(item.size) == 2)
    half = torch.Size((chunks[0].sizes[0] - 1, *chunks[0].sizes[1:]))
    chunks[:] = [ChunkStorageMetadata(chunks[0].offsets, half), ChunkStorageMetadata(chunks[0].offsets, torch.Size((1, *half[1:])))]
    (newest(run) / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: the pieces of .* do not make the whole of it"):
        read_metadata(newest(run))


@pytest.mark.parametrize("how", ["shorter", "other", "gone"])
def test_a_payload_that_does_not_fit_its_table_of_contents_is_an_error_in_one_line(run, how):
    """What verification would have found: a reader that comes after it ends in a line as well."""
    path = newest(run) / "__0_0.distcp"
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:100] if how == "shorter" else bytes(path.stat().st_size))
    tensors = {name: torch.zeros(item.size) for name, item in Payload(newest(run)).items.items() if name.startswith("model.")}
    for read in (lambda: Payload(newest(run)).read_all("model."), lambda: Payload(newest(run)).load(tensors, ALONE)):
        with pytest.raises(CheckpointError, match=r"step-00000015: cannot be read: .") as error:
            read()
        assert "\n" not in str(error.value)


def test_a_missing_name_a_shape_or_a_number_format_that_differs_is_an_error(run):
    name, tensor = next(iter(Payload(newest(run)).read_all("model.embedding").items()))
    assert (name, tensor.shape) == ("model.embedding.weight", (257, 32))
    for tensors, message in (
        ({"model.nothing": tensor}, "has no model.nothing"),
        ({name: torch.empty(257, 33)}, r"has shape \[257, 32\], the run needs \[257, 33\]"),
        ({name: tensor.half()}, "is torch.float32, the run needs torch.float16"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Payload(newest(run)).load(tensors, ALONE)


def test_a_run_directory_that_holds_another_run_is_refused_with_every_difference(pool, config_file, run):
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *PERIODIC, "model.dim=64", "data.seed=3")
    assert code == 1
    assert "holds another run: data.seed was 7 and is 3 (the next samples would come in another order" in printed
    assert "; model.dim was 32 and is 64" in printed
    assert "model.head_dim was 8 and is 16" in printed and "choose another run.name" in printed
    [(code, printed)] = pool.launch(
        1, run_main, str(config_file), "run.name=x", f"run.resume={run}", "optim.lr=1e-3", "data.seed=3"
    )
    assert code == 1 and "holds another run: data.seed was 7 and is 3" in printed


def test_resume_never_refuses_a_used_directory_and_required_an_empty_one(pool, config_file, run):
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *PERIODIC, "run.resume=never")
    assert code == 1 and "has checkpoints up to step-00000015" in printed
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *PERIODIC, "run.resume=required", "run.name=empty")
    assert code == 1 and "has no complete checkpoint" in printed
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *PERIODIC, "run.resume=/nowhere", "run.name=third")
    assert code == 1 and "/nowhere: does not exist" in printed


def test_two_processes_cannot_hold_one_run_directory(pool, config_file, run):
    holder = RunDirectory(run)
    holder.claim()
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *PERIODIC)
    assert code == 1 and f"is in use by process {os.getpid()}" in printed
    holder.release()


def test_retention_keeps_the_newest_and_the_milestones(tmp_path):
    for step in (100, 200, 300, 400):
        path = tmp_path / files.step_name(step)
        path.mkdir()
        files.write_json(path / files.MANIFEST, {})
    policy = Checkpoint(keep_last=1, keep_every_steps=200)
    old = outdated(files.complete_checkpoints(tmp_path), tmp_path / "step-00000400", policy.keep_last, policy.keep_every_steps)
    removed = [files.give_up(path) for path in old]
    assert [p.name for p in removed] == [".removing-step-00000100", ".removing-step-00000300"]
    assert [p.name for p in files.complete_checkpoints(tmp_path)] == ["step-00000200", "step-00000400"]


def test_the_milestones_are_saved_whatever_else_is_saved(pool, config_file):
    """e31: with saves by time, which is the default, or at other steps, keep_every_steps was accepted and kept nothing."""
    options = ("checkpoint.keep_every_steps=2", "checkpoint.keep_last=1", "schedule.warmup_steps=1", "run.steps=5")
    for every in (0, 3):
        run = train(pool, 1, config_file, *options, f"checkpoint.every_steps={every}", f"run.name=every-{every}")
        assert [p.name for p in files.complete_checkpoints(run / "checkpoints")] == [files.step_name(s) for s in (2, 4, 5)]


def test_files_of_older_checkpoints_are_removed_beside_training(tmp_path, monkeypatch):
    """All ranks waited while the main rank removed terabytes. Now the older one is no checkpoint at once, and its files go by and by."""
    for step in (1, 2):
        (tmp_path / files.step_name(step)).mkdir()
        files.write_json(tmp_path / files.step_name(step) / files.MANIFEST, {})
    gate, remove = threading.Event(), files.remove
    monkeypatch.setattr(files, "remove", lambda path: gate.wait(20) and remove(path))
    thread = retire(tmp_path / files.step_name(2), Checkpoint(keep_last=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".removing-step-00000001", "step-00000002"]
    gate.set()
    thread.join(20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def saved(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / files.step_name(step)).mkdir()
        files.write_json(folder / files.step_name(step) / files.MANIFEST, {})


def test_an_old_checkpoint_that_stays_is_named_at_each_save(tmp_path, monkeypatch, caplog):
    """Its files were left behind under a hidden name, without a word."""
    saved(tmp_path, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda path, **options: None)  # as with a read-only folder
        for _ in range(2):
            retire(tmp_path / files.step_name(2), Checkpoint(keep_last=1)).join(20)
    said = f"an older checkpoint could not be removed, which is tried again at the next save: {tmp_path}/.removing-step-00000001 is still there"
    assert [record.message for record in caplog.records] == [said] * 2
    retire(tmp_path / files.step_name(2), Checkpoint(keep_last=1)).join(20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"] and len(caplog.records) == 2


def test_one_checkpoint_that_cannot_be_renamed_does_not_keep_all_others(tmp_path, monkeypatch, caplog):
    """It ended retention for all, as well as the removal of what was left before, so that the disk filled up."""
    saved(tmp_path, 1, 2, 3, 4)
    (tmp_path / ".removing-step-00000000").mkdir()
    rename = os.rename

    def pinned(source, target):
        if Path(source).name == files.step_name(1):
            raise PermissionError(1, "Operation not permitted", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", pinned)
    retire(tmp_path / files.step_name(4), Checkpoint(keep_last=1)).join(20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000004"]
    assert "step-00000001" in caplog.text and caplog.text.count("could not be removed") == 1
    monkeypatch.setattr(os, "listdir", lambda path: (_ for _ in ()).throw(OSError(116, "Stale file handle", str(path))))
    retire(tmp_path / files.step_name(4), Checkpoint(keep_last=1)).join(20)  # the run goes on
    assert caplog.text.count("Stale file handle") == 2


def test_what_a_crashed_save_left_is_ignored_and_removed(pool, config_file, run):
    leftover = run / "checkpoints" / ".writing-step-00000020"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    train(pool, 1, config_file, *PERIODIC)
    assert not leftover.exists()


def test_the_verify_tool_names_what_is_damaged(run, capsys):
    verify_checkpoint = tool("verify_checkpoint")
    assert verify_checkpoint.main([str(run)]) == 0
    assert capsys.readouterr().out.count("good ") == 3
    flip_bit(newest(run) / "__0_0.distcp")
    assert verify_checkpoint.main([str(run)]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("good ") == 2 and "step-00000015/__0_0.distcp" in captured.err


def test_a_checkpoint_that_the_run_removes_while_it_is_verified_is_not_damaged(run, capsys, monkeypatch):
    """Hashing takes minutes, and a run that trains on removes what checkpoint.keep_last no longer keeps."""
    verify, oldest = files.verify, files.complete_checkpoints(run / "checkpoints")[0]
    monkeypatch.setattr(files, "verify", lambda path: (files.remove(oldest), verify(path)))
    assert tool("verify_checkpoint").main([str(run)]) == 0
    printed = capsys.readouterr().out
    assert f"removed  {oldest}: by the run, while it was verified\n" in printed and printed.count("good ") == 2


def needs_of_a_run(config_file: str, *overrides: str) -> tuple[int, list[int]]:
    """Exit code of a run, and the bytes that each of its saves asks for."""
    needs = []
    with patch.object(files, "check_space", lambda writing, needed: needs.append(needed)):
        return run_main(config_file, *overrides)[0], needs


def test_the_look_at_free_space_counts_all_stages_of_a_pipeline(pool, config_file):
    """e13: it counted the stage of the main rank."""
    options = ("parallel.strategy=fsdp", "parallel.pipeline=2", "batch.micro_sequences=4", "run.steps=1", "schedule.warmup_steps=0")
    (code, [needed]), other = pool.launch(2, needs_of_a_run, str(config_file), *options)
    assert code == 0 and other == (0, [])
    payload = Payload(config_file.parent / "runs" / "run" / "checkpoints" / "step-00000001")
    whole = payload.read_all("model.") | payload.read_all("optim.") | payload.read_all("rng.")
    assert needed == sum(tensor.nbytes for tensor in whole.values())


def test_a_save_that_would_not_fit_says_how_much_is_missing_and_leaves_nothing(tmp_path, monkeypatch):
    class Usage:
        free = 1_000_000

    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: Usage)
    tensors = {"model.weight": torch.zeros(1000, 500)}
    missing = r"it takes 2\.0 MB and 1\.0 MB are free; make room"
    with pytest.raises(CheckpointError, match=f"{missing}$"):
        save.write_checkpoint(tmp_path / "step-00000001", tensors, {}, {}, ALONE)
    with pytest.raises(CheckpointError, match=f"{missing}$"):  # a conversion
        save.write_checkpoint(tmp_path / "step-00000001", {name: t.to("meta") for name, t in tensors.items()}, {}, {}, ALONE, tensors.get)
    assert list(tmp_path.iterdir()) == []


def test_the_names_of_new_directories_are_flushed_with_the_first_checkpoint(tmp_path, monkeypatch):
    """A power failure could take checkpoints/ with all that was flushed below it: its name in the run directory was not."""
    flushed = []
    monkeypatch.setattr(storage, "flush", flushed.append)
    save.write_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000001", {"model.weight": torch.ones(4)}, {}, {}, ALONE)
    assert set(flushed) == {tmp_path, tmp_path / "run"}
    flushed.clear()
    save.write_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002", {"model.weight": torch.ones(4)}, {}, {}, ALONE)
    assert not flushed
    RunDirectory(tmp_path / "runs" / "other").claim()
    assert {tmp_path, tmp_path / "runs"} <= set(flushed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # they are what is tested
@pytest.mark.parametrize("error", [MemoryError(), SystemExit(1)])
def test_a_write_that_ends_without_a_word_is_no_checkpoint(tmp_path, error):
    """An error without a message, or one that no handler expects, in the thread that writes: nothing may become visible."""
    saving = save.Saving(tmp_path / "step-00000001", {"model.weight": torch.ones(4)}, {}, {}, ALONE)
    saving.begin()
    with patch.object(saving.writer, "write_data", side_effect=error):
        saving.write_beside()
        saving.thread.join()
    with pytest.raises(CheckpointError, match="MemoryError|not written to the end"):
        saving.finish()
    assert not list(tmp_path.iterdir())


def test_a_link_in_the_place_of_an_unfinished_save_is_removed_and_not_followed(tmp_path):
    (tmp_path / "own").mkdir()
    target = tmp_path / "step-00000001"
    files.writing_directory_of(target).symlink_to(tmp_path / "own")
    save.write_checkpoint(target, {"model.weight": torch.zeros(2)}, {}, {}, ALONE)
    assert files.verify(target) is None and list((tmp_path / "own").iterdir()) == []
