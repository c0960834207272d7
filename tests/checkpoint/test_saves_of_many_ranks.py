"""Saves and resumes as thousands of ranks need them: nothing takes the square of their number, and nothing is done twice."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from running import run_directory, run_main, state_of, train
from test_damage import rewrite_state
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from pretrain.checkpoint import files, payload, save
from pretrain.checkpoint.payload import Payload
from pretrain.checkpoint.planners import HoldingPlanner
from pretrain.checkpoint.save import AgreedPlan, Saving
from pretrain.distributed.ranks import ALONE, Ranks
from pretrain.errors import CheckpointError

SHORT = ("run.steps=3", "schedule={name: constant, warmup_steps: 0}", "checkpoint={every_steps: 1, keep_last: 0, export_check: false}")


def plan_of(columns: int, size: tuple[int, int], rows: list[tuple[int, int]]) -> list[SavePlan]:
    """A plan for each rank that has (first row, number of rows) of a matrix."""
    plans = []
    for rank, (first, number) in enumerate(rows):
        chunk = ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([number, columns]))
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=torch.float32), size=torch.Size(size))
        item = WriteItem(MetadataIndex("model.down.weight", chunk.offsets, rank), WriteItemType.SHARD, tensor_data=data)
        plans.append(SavePlan([item], planner_data={"model.down.weight": ("model.down.weight",)}))
    return plans


def test_the_plan_of_many_ranks_compares_no_part_of_a_tensor_with_each_other_part():
    """torch did: of a matrix with more columns than rows, it compared each pair of rows of ranks."""
    plans, looks = plan_of(1024, (256, 1024), [(rank, 1) for rank in range(256)]), []
    apart = default_planner._check_box_overlap
    with patch.object(default_planner, "_check_box_overlap", lambda one, other: looks.append(1) or apart(one, other)):
        shares, metadata = HoldingPlanner().create_global_plan(plans)
    assert len(looks) <= len(plans)
    assert [share.items[0].index.index for share in shares] == list(range(256))
    assert len(metadata.state_dict_metadata["model.down.weight"].chunks) == 256
    with_torch, theirs = default_planner.DefaultSavePlanner().create_global_plan(plans)
    assert with_torch == shares and theirs == metadata


@pytest.mark.parametrize("rows", [[(0, 2), (1, 3)], [(0, 2), (1, 2)], [(0, 2), (3, 1)], [(0, 2), (2, 3)]])
def test_a_plan_whose_parts_overlap_or_leave_rows_out_is_refused(rows):
    with pytest.raises(CheckpointError, match=r"the parts of model\.down\.weight .* do not make the whole of it"):
        HoldingPlanner().create_global_plan(plan_of(8, (4, 8), rows))


def counted(config_file: str, *overrides: str) -> tuple[int, list[str]]:
    """A run's exit code, and the names of what its ranks do while the others wait without a limit."""
    real, names = Ranks.while_alive, []
    with patch.object(Ranks, "while_alive", lambda self, name, action: names.append(name) or real(self, name, action)):
        return run_main(config_file, *overrides)[0], names


def test_the_ranks_wait_for_the_plan_of_all_as_long_as_it_takes(pool, config_file):
    """They waited `parallel.timeout_seconds`, and thousands of ranks ended at each first save."""
    for code, names in pool.launch(2, counted, str(config_file), *SHORT, "run.steps=1", "parallel.strategy=fsdp"):
        assert code == 0 and names.count("plan of all ranks") == 1


def contents_made(config_file: str, *overrides: str) -> tuple[int, list[str], int]:
    """A run's exit code, the folders for which a table of contents was made, and the most tables that Python could find after a save."""
    real, made, kept = Saving._list_contents, [], []
    finish = Saving.finish

    def after(self: Saving) -> str:
        manifest = finish(self)
        kept.append(sum(isinstance(thing, Metadata) for thing in gc.get_objects()))
        return manifest

    with (
        patch.object(Saving, "_list_contents", lambda self, packed: made.append(self.writing.name) or real(self, packed)),
        patch.object(Saving, "finish", after),
    ):
        return run_main(config_file, *overrides)[0], made, max(kept)


def test_the_table_of_contents_is_made_once_and_not_kept_as_objects(pool, config_file):
    """The main rank made it at each save while the others waited, and Python searched its objects for cycles every 50 steps."""
    ranks = pool.launch(2, contents_made, str(config_file), *SHORT, "parallel.strategy=fsdp")
    assert ranks == [(0, [".writing-step-00000001"], 0), (0, [], 0)]
    run = run_directory(config_file)
    for step in (1, 2, 3):
        files.verify(run / "checkpoints" / files.step_name(step))
    states = [state_of(run, step) for step in (1, 2, 3)]
    assert states[0].keys() == states[2].keys() and not torch.equal(*(s["model.embedding.weight"] for s in states[1:]))


def saved(target: Path, agreed: AgreedPlan, value: float, number: int = 1) -> dict[str, torch.Tensor]:
    """What is read back of a save of two tensors that lie in so many files."""
    saving = Saving(target, {name: torch.full((3, 4), value) for name in ("v", "w")}, {}, {}, ALONE, agreed=agreed)
    saving.writer.thread_count = number
    saving.begin()
    saving.write_now()
    saving.finish()
    files.verify(target)
    return Payload(target).read_all("")


def test_tensors_that_lie_elsewhere_than_at_the_save_before_are_listed_anew(tmp_path):
    agreed = AgreedPlan()
    for step, in_files in enumerate([1, 1, 2, 2, 1]):
        target = tmp_path / files.step_name(step)
        assert all(torch.equal(tensor, torch.full((3, 4), float(step))) for tensor in saved(target, agreed, float(step), in_files).values())
        assert len(list(target.glob("*.distcp"))) == in_files


def test_a_save_takes_no_table_of_contents_that_lies_in_its_folder(tmp_path):
    """A save that was interrupted may leave a thread behind, which made one there. It was hashed and committed."""
    agreed = AgreedPlan()
    saved(tmp_path / files.step_name(1), agreed, 1.0)
    saving = Saving(tmp_path / files.step_name(2), {name: torch.full((3, 4), 2.0) for name in ("v", "w")}, {}, {}, ALONE, agreed=agreed)
    saving.begin()
    saving.write_now()
    (saving.writing / ".metadata").write_bytes(b"of another save")
    saving.finish()
    assert torch.equal(Payload(saving.target).read_all("")["w"], torch.full((3, 4), 2.0))


def test_the_table_of_contents_is_that_of_torch(tmp_path):
    saving = Saving(tmp_path / files.step_name(1), {"w": torch.ones(3)}, {}, {}, ALONE)
    saving.begin()
    saving.write_now()
    ours = saving._list_contents([saving.results])
    saving.writer.finish(saving.agreed.metadata, [saving.results])
    assert ours == (saving.writing / ".metadata").read_bytes()


def test_a_checkpoint_has_the_files_that_were_written_and_no_others_of_the_folder(tmp_path):
    """Each rank listed the folder: names of all ranks times the number of ranks."""
    saving = Saving(tmp_path / "step-00000001", {"w": torch.ones(3)}, {}, {}, ALONE)
    saving.begin()
    (saving.writing / "__0_9.distcp").write_bytes(b"of somebody else")
    saving.write_now()
    saving.finish()
    assert sorted(files.read_manifest(saving.target)) == [".metadata", "__0_0.distcp", "state.json"]


@pytest.mark.parametrize("late", ["short", "missing"])
def test_the_main_rank_waits_some_seconds_for_a_file_that_it_does_not_see_as_it_was_written(tmp_path, monkeypatch, late):
    """NFS may say for 3 seconds how large a file was when the main rank looked before. That ended the run."""
    saving = Saving(tmp_path / "step-00000001", {"w": torch.ones(3)}, {}, {}, ALONE)
    saving.begin()
    saving.write_now()
    path, slept = saving.writing / "__0_0.distcp", []
    content = path.read_bytes()
    path.unlink() if late == "missing" else path.write_bytes(content[:10])
    monkeypatch.setattr(save.time, "sleep", lambda seconds: slept.append(seconds) or len(slept) < 3 or path.write_bytes(content))
    saving.finish()
    files.verify(saving.target)
    assert 3 <= sum(slept) <= 10


def test_a_file_that_stays_invisible_ends_the_save(tmp_path, monkeypatch):
    saving = Saving(tmp_path / "step-00000001", {"w": torch.ones(3)}, {}, {}, ALONE)
    saving.begin()
    saving.write_now()
    (saving.writing / "__0_0.distcp").unlink()
    monkeypatch.setattr(save.time, "sleep", lambda seconds: None)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp of another rank is not visible here; the run directory must be on storage shared"):
        saving.finish()
    assert not list(tmp_path.iterdir())


def readings(config_file: str, *overrides: str) -> tuple[int, str, int]:
    """A run's exit code, what it printed, and how often it read a table of contents."""
    real, reads = payload.read_metadata, []
    with patch.object(payload, "read_metadata", lambda directory: reads.append(1) or real(directory)):
        return *run_main(config_file, *overrides), len(reads)


def test_a_resume_reads_the_table_of_contents_once_and_twice_where_an_older_state_does_not_say_what_it_has(pool, config_file):
    """The main rank read gigabytes while the others waited, to ask whether there is a state of the optimizer."""
    overrides = (*SHORT, "run.steps=1")
    checkpoint = train(pool, 1, config_file, *overrides) / "checkpoints" / "step-00000001"
    [(code, printed, reads)] = pool.launch(1, readings, str(config_file), *SHORT, "run.steps=2")
    assert code == 0 and reads == 1 and "step-00000001: step 1" in printed
    rewrite_state(checkpoint, lambda state: state.pop("has_optimizer"))
    [(code, printed, reads)] = pool.launch(1, readings, str(config_file), *SHORT, f"run.resume={checkpoint}", "run.name=other")
    assert code == 0 and reads == 2 and "step-00000001: step 1" in printed


def test_python_searches_for_no_cycles_while_it_reads_a_table_of_contents(tmp_path):
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 4])) for row in range(3000)]
    table = Metadata({"model.w": TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([3000, 4]), chunks)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    searches = []
    gc.callbacks.append(lambda phase, info: searches.append(phase))
    try:
        read = payload.read_metadata(tmp_path)
        found = len(searches)
        (tmp_path / ".metadata").write_bytes(b"nothing")
        with pytest.raises(CheckpointError, match="refused"):
            payload.read_metadata(tmp_path)
    finally:
        gc.callbacks.pop()
    assert read == table and found <= 2 and gc.isenabled()  # begin and end of one, when all is read


@pytest.mark.parametrize("pieces", [[None], torch.Size])
def test_a_table_with_something_else_in_place_of_pieces_is_refused(tmp_path, pieces):
    table = Metadata({"w": TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([2]), pieces)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match="refused"):
        payload.read_metadata(tmp_path)
