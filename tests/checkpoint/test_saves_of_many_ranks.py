"""Saves and resumes as thousands of ranks need them: nothing takes the square of their number, and nothing is done twice."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from running import run_main
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from pretrain.checkpoint.planners import HoldingPlanner
from pretrain.distributed.ranks import Ranks
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
