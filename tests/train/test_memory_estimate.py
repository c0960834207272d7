"""What a GPU will hold, found without one. The measured figures are those of docs/benchmarks.md, of one H200."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from pretrain.config.load import load_config
from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, LaunchError
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.train.memory_estimate import Allocations, MemoryEstimate, estimate_memory

ROOT = Path(__file__).resolve().parents[2]
PURE, BF16 = "precision={compute: bf16, master: bf16, moments: bf16}", "precision.compute=bf16"
BLOCKS, FULL = "parallel.compile=blocks", "parallel.activation_checkpointing=full"
DDP, FSDP = ("parallel.strategy=ddp", "parallel.replicate=1"), ("parallel.strategy=fsdp", "parallel.shard=1")
KEPT = "parallel.reshard_after_forward=never"


def of_model(name: str, micro: int, micro_steps: int, *overrides: str, ranks: int = 1, length: int = 4096) -> MemoryEstimate:
    own = (f"data.sequence_length={length}", f"batch.micro_sequences={micro}", f"batch.sequences={micro * micro_steps * ranks}")
    config, _ = load_config(ROOT / "configs" / "models" / f"{name}.yaml", [*own, *overrides])
    return estimate_memory(config, ranks)


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "micro", "micro_steps", "overrides", "measured"),
    [
        ("llama3.1-8b", 3, 3, (PURE, BLOCKS), 122.9),
        slow("llama3.1-8b", 1, 8, (PURE, BLOCKS), 86.2),
        slow("llama3.1-8b", 2, 4, (PURE, BLOCKS), 104.4),
        slow("llama3.1-8b", 4, 2, (PURE, BLOCKS), 141.3),
        slow("llama3.1-8b", 2, 4, (PURE, BLOCKS, FULL), 70.0),
        slow("llama3.1-8b", 4, 2, (PURE, BLOCKS, FULL), 72.4),
        slow("llama3.2-3b", 4, 2, (BF16, BLOCKS), 102.5),
        slow("llama3.2-1b", 4, 2, (BF16, BLOCKS), 44.7),
        slow("llama3.2-1b", 4, 2, (BF16, BLOCKS, *DDP), 49.6),
        slow("llama3.2-1b", 4, 2, (BF16, BLOCKS, *FSDP), 42.7),
        slow("llama3.2-1b", 4, 2, (BF16, BLOCKS, *FSDP, KEPT), 44.7),
    ],
)
def test_an_h200_held_what_is_found_without_one(model, micro, micro_steps, overrides, measured):
    found = of_model(model, micro, micro_steps, *overrides).most / 1e9
    assert found == pytest.approx(measured, rel=0.025 if FULL in overrides or FSDP[0] in overrides else 0.01)
    written = re.findall(r"([\d.]+) GB(?= \|)", (ROOT / "docs" / "benchmarks.md").read_text())
    assert f"{measured}" in written and f"{found:.1f}" in written


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_are_counted_as_torchs_own_tracker_counts_them(device):
    network = build_network(complete(Model(family="llama", dim=128, layers=4, heads=4, kv_heads=2, vocab_size=512), 128)).to(device)
    tokens = torch.zeros(8, 128, dtype=torch.int64, device=device)

    def micro_step() -> None:
        network(tokens, tokens, with_cross_entropy=True).objective_B.sum().backward()

    micro_step()
    known = [*network.parameters(), *(parameter.grad for parameter in network.parameters()), tokens]
    with Allocations(known) as counted:
        micro_step()
    tracker = MemTracker()
    tracker.track_external(network, tokens)
    with tracker:
        micro_step()
    found = tracker.get_tracker_snapshot("peak")[torch.device(device)]["Total"] - sum(tensor.nbytes for tensor in known)
    assert counted.most == pytest.approx(found, abs=2**14) and counted.most > 2**25


SMALL = ("model.layers=8", "model.vocab_size=1024", BF16)


def test_what_is_recomputed_is_not_held_and_more_sequences_hold_more():
    def activations(micro: int, kind: str) -> int:
        return of_model("llama-60m", micro, 2, *SMALL, f"parallel.activation_checkpointing={kind}", length=512).activations

    none, selective, full = (activations(2, kind) for kind in ("none", "selective", "full"))
    assert none > 1.3 * selective and selective > 2 * full
    assert activations(4, "none") == pytest.approx(2 * none, rel=0.02)


def test_the_state_is_divided_by_the_ranks_that_share_it_and_replicas_hold_all_of_it():
    alone, shared = (of_model("llama-60m", 2, 2, *SMALL, *options, ranks=n, length=512) for n, options in ((1, ()), (4, FSDP[:1])))
    replicated = of_model("llama-60m", 2, 2, *SMALL, DDP[0], ranks=4, length=512)
    assert alone.weights == replicated.weights == 4 * alone.parameters == 4 * shared.weights
    assert alone.moments == 4 * shared.moments == 8 * alone.parameters
    assert replicated.buffers == replicated.gradients == alone.gradients and alone.buffers == 0
    assert alone.activations == replicated.activations


def test_gradients_that_come_while_activations_go_are_not_counted_beside_them():
    several, one = (of_model("llama-60m", 8, n, "precision.keep_casts=false", *SMALL, length=512) for n in (2, 1))
    assert several.gradients == several.all_gradients == one.all_gradients == 4 * one.parameters
    assert one.gradients < one.all_gradients / 4
    assert several.most - one.most == pytest.approx(one.all_gradients - one.gradients, rel=0.02)
    # With few activations the most memory is in use between two steps.
    tiny = of_model("llama-60m", 1, 1, "precision.keep_casts=false", *SMALL, length=32)
    assert 16 * tiny.parameters <= tiny.most < 16.5 * tiny.parameters


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("deepseek-v3", ()),
        ("gemma3-1b", ("data.document_mask=true",)),
        ("gpt2-124m", ("model.dropout=0.1", "model.attention_dropout=0.1")),
        ("gpt-oss-20b", ()),
        ("phi3-mini", ("model.attention_backend=sdpa", "data.document_mask=true")),
    ],
)
def test_models_of_every_kind_run_without_values(model, options):
    few = ("model.layers=4", "model.vocab_size=512", BF16)
    found = [of_model(model, micro, 2, *few, *options, length=128).activations for micro in (1, 2)]
    assert found[0] < found[1] <= 2.01 * found[0]


@pytest.mark.parametrize(
    ("overrides", "ranks", "said", "kind"),
    [
        (("parallel.tensor=2",), 2, "parallel.tensor=2 is not known to the estimate of memory", ConfigError),
        (("parallel.activation_offload=true",), 1, "parallel.activation_offload=true is not known", ConfigError),
        ((BF16, "precision.fp8=tensorwise", BLOCKS), 1, "precision.fp8=tensorwise is not known", ConfigError),
        (("model.vocab_size=null",), 1, "model.vocab_size is not given, and the estimate of memory opens no data", ConfigError),
        (("parallel.strategy=single",), 2, "runs in one process", LaunchError),
    ],
)
def test_what_is_not_known_is_refused_by_name(overrides, ranks, said, kind):
    with pytest.raises(kind, match=re.escape(said)):
        of_model("llama-60m", 2, 2, *overrides, ranks=ranks, length=512)


def the_tool():
    spec = importlib.util.spec_from_file_location("estimate_memory_tool", ROOT / "tools" / "estimate_memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_says_what_fits(capsys):
    small = ["model={family: llama, dim: 64, layers: 2, heads: 4, vocab_size: 512}", "batch={sequences: 8, micro_sequences: 2}"]
    command = ["--config", str(ROOT / "configs" / "models" / "llama-10m.yaml"), *small, "data.sequence_length=128"]
    assert the_tool().main([*command, "--gpu-memory", "24"]) == 0
    printed = capsys.readouterr().out
    parts = [float(size) for size in re.findall(r"^ +([\d.]+) GB", printed, re.M)]
    assert parts[-1] == pytest.approx(sum(parts[:-1]), abs=0.011 * len(parts)) and "fits, with 23.0 to spare" in printed
    assert the_tool().main([*command, "--gpu-memory", "1.05", "--micro-sequences", "8", "64"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["activation_checkpointing", "8", "64"] and [row[0] for row in rows[2:5]] == ["none", "selective", "full"]
    assert not rows[4][1].endswith("!") and rows[2][2].endswith("!")
    assert the_tool().main([*command, "parallel.tensor=2", "--ranks", "2"]) == 2
