"""`tools/check_equivalence.py`: a user's model in every layout that fits, its collectives against the formula, and how it is made small."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from running import some_slow, tool
from safetensors.torch import save_file

from pretrain.config.keys import check_effects
from pretrain.config.load import load_config
from pretrain.equivalence import comparison
from pretrain.equivalence.cases import cases, chosen, written
from pretrain.equivalence.comparison import Row, compare, verdict
from pretrain.equivalence.measured_run import Measured, kind_of
from pretrain.equivalence.shrink import shrunk
from pretrain.errors import ConfigError, TrainingError, UserError
from pretrain.models.layer_specs import layer_specs
from pretrain.parallel.legality import check_expert, check_tensor
from pretrain.train.resolve import resolve

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "models"


def run_measured(arguments: list[str]) -> tuple[int, str]:
    """Exit code and last line of a rank that measures its third step."""
    import contextlib
    import io

    import pretrain.errors
    from pretrain.equivalence.measured_run import measured_main

    pretrain.errors.OTHERS_WAIT_SECONDS = 0.0
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = measured_main(arguments)
    return code, printed.getvalue()[-500:]


@pytest.fixture
def check(pool, tmp_path, prepared, capsys):
    """`check(preset, *arguments)`: exit code and standard output of the tool, whose layouts run on ranks that are alive."""

    def start(case, config, overrides):
        for code, printed in pool.launch(case.processes, run_measured, case.arguments(config, overrides)):
            if code:
                raise TrainingError(f"{case.name}: {printed}")

    def check(config, *arguments):
        options = ["--config", str(config), "--output", str(tmp_path / "out"), *arguments]
        code = tool("check_equivalence").main(options, start)
        out = capsys.readouterr()
        return code, out.out + out.err

    return check


def of_data(prepared, preset):
    objective = ["data.objective=span_corruption"] if preset.startswith("t5") else []
    return [f"data.sources=[{{path: {prepared}}}]", "data.sequence_length=512", *objective]


ALL = "every legal layout"
MODELS = {
    "dense": ("llama3.1-8b", ALL),
    "tied": ("qwen2.5-0.5b", ALL),
    "windowed": ("gemma3-1b", ALL),
    "latent": ("deepseek-v3", ALL),
    "linear attention": ("qwen3.5-9b", ALL),
    "one key head of Mamba 2": ("granite4.0-h-micro", ALL),
    "one sublayer per layer": ("nemotron3-nano-30b-a3b", ALL),
    "experts": ("gpt-oss-20b", "strategy=fsdp shard=2 expert=2", "strategy=fsdp shard=1 tensor=2"),
    "encoder and decoder": ("t5-small", ALL),
}  # fmt: skip


@pytest.mark.parametrize("model", some_slow(MODELS, {"dense", "tied", "windowed", "latent", "one key head of Mamba 2", "one sublayer per layer", "encoder and decoder"}))
def test_a_preset_made_small_is_the_same_in_every_layout_of_two_ranks_and_sends_what_the_formula_says(check, prepared, model):
    preset, *layouts = MODELS[model]
    wanted = [] if layouts == [ALL] else ["--layouts", *layouts]
    code, printed = check(PRESETS / f"{preset}.yaml", *of_data(prepared, preset), "--ranks", "2", "--shrink", *wanted)
    assert code == 0, printed
    rows = [
        line
        for line in printed.splitlines()
        if re.match(r"\| strategy=", line) and line.endswith("|") and " fp32 | 2 |" in line
    ]
    counts = {"latent": 10, "one sublayer per layer": 10, "experts": 2, "encoder and decoder": 6}
    assert len(rows) == counts.get(model, 7), printed
    assert all("| equal" in row for row in rows)
    assert not [row for row in rows if ", -" in row], "layouts without a formula"


FOUR_RANKS = (
    "strategy=fsdp replicate=2 shard=2", "strategy=fsdp replicate=2 shard=2 grad_sync=every", "strategy=fsdp shard=2 tensor=2",
    "strategy=fsdp shard=2 context=2 grad_sync=last", "strategy=fsdp replicate=2 pipeline=2", "strategy=fsdp shard=2 pipeline=2",
    "strategy=fsdp shard=1 pipeline=2 tensor=2", "strategy=fsdp shard=4 expert=2", "strategy=fsdp replicate=2 shard=2 expert=2",
    "strategy=fsdp shard=2 context=2 expert=4", "strategy=ddp replicate=4 ddp.bucket_mb=0.05",
    "strategy=fsdp shard=1 pipeline=4 pipeline_schedule=gpipe", "strategy=fsdp shard=2 pipeline=2 pipeline_schedule=zero_bubble",
    "strategy=fsdp replicate=2 pipeline=2 pipeline_schedule=zero_bubble_v",
)  # fmt: skip


def test_a_layout_has_its_own_micro_batches_whatever_the_configuration_says(check, prepared, tmp_path):
    """The configuration's came later and won: single processes had one micro-step each, and were compared with themselves."""
    layouts = ("--layouts", "strategy=ddp replicate=2", "strategy=fsdp shard=2 micro_sequences=2")
    given = (*of_data(prepared, "llama"), "batch={sequences: 32, micro_sequences: 32}", "parallel.strategy=single")
    code, printed = check(PRESETS / "llama3.1-8b.yaml", *given, "--ranks", "2", "--shrink", *layouts)
    assert code == 0, printed
    found = {name: int(count) for name, count in re.findall(r"^\| (single.*?|strategy=.*?) \| fp32 \| (\d+) \|", printed, re.MULTILINE)}
    assert found == {
        "single, accumulation 4": 4, "single, accumulation 8": 8, "strategy=ddp replicate=2": 2, "strategy=fsdp shard=2 micro_sequences=2": 4,
    }  # fmt: skip
    assert "batch.micro_sequences=16" in printed  # what makes the model small says so
    assert re.search(r"^\| strategy=ddp replicate=2 \|.* \| equal \|$", printed, re.MULTILINE)  # no more memory than one process: buckets are the gradients


@pytest.mark.slow
def test_four_ranks_send_what_the_formula_says(check, prepared):
    code, printed = check(
        PRESETS / "moe-40m-a10m.yaml", *of_data(prepared, "moe"), "--ranks", "4", "--shrink", "--layouts", *FOUR_RANKS
    )
    assert code == 0, printed
    assert printed.count("| equal") >= len(FOUR_RANKS)


@pytest.mark.slow
def test_strategies_of_one_process_send_what_the_formula_says(check, prepared):
    """DDP on one rank has an all-reduce, which moves nothing."""
    code, out = check(
        PRESETS / "llama3.1-8b.yaml", *of_data(prepared, "llama"), "--shrink", "--layouts", "strategy=ddp replicate=1", "strategy=fsdp shard=1"
    )
    assert code == 0, out
    assert re.search(r"\| strategy=ddp replicate=1 \| fp32 \| 2 \| all-reduce (\d+) = \1 \| 0 kB \|.*\| equal \|", out), out
    assert re.search(r"\| strategy=fsdp shard=1 \| fp32 \| 2 \| none \| 0 kB \|.*\| equal \|", out), out


def test_the_tool_starts_processes_as_a_user_does(prepared, tmp_path, capsys):
    config = ["--config", str(PRESETS / "llama3.1-8b.yaml"), *of_data(prepared, "llama"), "--output", str(tmp_path)]
    assert tool("check_equivalence").main([*config, "--shrink", "--layouts", "DDP on 2, accumulation 4, no"]) == 0
    assert "| all-reduce 1 = 1 |" in capsys.readouterr().out


# ---- which layouts --------------------------------------------------------------------------------------------------------


def test_layouts_that_are_not_legal_are_listed_with_their_reason(config_file):
    choice = chosen(config_file, ["model.kv_heads=4", "model.heads=4", "model.layers=1"], None, 2, shrink=False)
    said = {line.split(": ")[0].split(maxsplit=1)[1]: line for line in choice.lines if line.startswith("refused")}
    assert set(said) == {
        "strategy=fsdp shard=1 pipeline=2", "strategy=fsdp shard=2 expert=2", "strategy=fsdp shard=1 context=2 expert=2",
        "strategy=fsdp shard=1 context=2 expert=2 context_method=ring",
    }  # fmt: skip
    assert "2 stages need as many layers, but the model has 1" in said["strategy=fsdp shard=1 pipeline=2"]
    named = [case.name for case in choice.cases]
    assert named[:2] == ["single, accumulation 2", "single, accumulation 4"]
    assert named[2:] == [
        "strategy=ddp replicate=2", "strategy=fsdp replicate=2", "strategy=fsdp shard=2", "strategy=fsdp shard=1 context=2",
        "strategy=fsdp shard=1 context=2 context_method=ring", "strategy=fsdp shard=1 tensor=2",
    ]  # fmt: skip


def test_a_layout_is_named_or_written_as_keys(config_file):
    def names(*texts):
        return [(case.name, case.processes, case.micro) for case in chosen(config_file, [], list(texts), 4, shrink=False).cases]

    assert names("ddp on 2") == [
        ("single, accumulation 2", 1, 8), ("single, accumulation 8", 1, 2), ("DDP on 2", 2, 8),
        ("DDP on 2, accumulation 4, no_sync", 2, 2), ("DDP on 2, accumulation 4, sync every", 2, 2), ("DDP on 2, accelerate launch", 2, 8),
    ]  # fmt: skip
    assert names("tensor=2 grad_sync=last")[-1] == ("tensor=2 grad_sync=last", 4, 4)
    assert names("tensor=-1")[-1] == ("tensor=-1", 4, 8)
    assert names("shard=1 tensor=2 micro_sequences=16")[-1] == ("shard=1 tensor=2 micro_sequences=16", 2, 16)
    assert names("strategy=ddp")[-1][1] == 4 and names("strategy=single micro_sequences=2")[-1] == (
        "strategy=single micro_sequences=2",
        1,
        2,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sideways", "--layouts 'sideways' is in no name of the table"),
        ("tensr=2", "tensr=2 is no key of the section parallel"),
        ("tensor=0", "tensor=0 is not a number of ranks; give 1 or more"),
        ("shard=-2", "shard=-2 is not a number of ranks; give 1 or more"),
        ("data.seed=2", "data.seed=2 is no key of the section parallel; write overrides before --layouts"),
        ("micro_sequences=0", "batch.micro_sequences=0: must be at least 1"),
        ("tensor=2 tensor=4", "--layouts 'tensor=2 tensor=4': tensor is there twice; write it once"),
        ("tensor=two", "sizes are numbers of ranks"),
        ("shard=1 tensor=3", "--layouts 'shard=1 tensor=3': parallel.tensor=3: model.heads=4 does not divide by it"),
        ("strategy=ddp tensor=2", "parallel.tensor=2 has no effect"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(config_file, text, message):
    with pytest.raises(ConfigError) as raised:
        chosen(config_file, [], [text], 2, shrink=False)
    assert message in str(raised.value) and "\n" not in str(raised.value)


# ---- the verdict ------------------------------------------------------------------------------------------------------------


def row(case, **measured):
    plain = {
        "collectives": {},
        "expected": {},
        "formula": {},
        "unknown": [],
        "sent": 0,
        "sent_by_ddp": 10,
        "peak": 100,
        "micro_steps": 1,
    }
    return Row(case, "fp32", 0.0, 0.0, 0.0, True, True, 1.0, (Measured(**plain | measured),))


def test_a_verdict_says_what_a_layout_costs_more_and_where_the_formula_is_wrong(config_file):
    config, _ = load_config(config_file)
    alone, two = (written(text, config, 2) for text in ("strategy=single micro_sequences=8", "strategy=ddp micro_sequences=8"))
    rows = [row(alone), row(two, peak=101, sent=11, collectives={"all-reduce": 2}, expected={"all-reduce": 1})]
    assert verdict(rows[0], rows) == "equal"
    assert verdict(rows[1], rows) == "equal; OTHER COLLECTIVES than the formula's; more memory than single; sends more than DDP"
    unknown = row(two, collectives={"all-gather": 2, "all-reduce": 1}, expected={"all-reduce": 1}, unknown=["all-gather"])
    assert verdict(unknown, [*rows, unknown]) == "equal"
    assert verdict(dataclasses.replace(rows[1], gradient=1.0, measured=()), rows).startswith("DIFFERENT; nothing measured")


def test_what_is_no_number_is_not_equal(tmp_path):
    """The largest of 0 and NaN was 0. A step that was skipped has no loss."""
    zeros, numbers = ({"a": torch.zeros(2), "b": torch.full((2,), value)} for value in (1.0, float("nan")))
    record = {"loss": 1.0, "grad_norm": 1.0, "batch": "x"}
    for name, gradients, first in (("a", zeros, record), ("b", numbers, record), ("c", zeros, record | {"loss": None})):
        folder = tmp_path / name / "gradients"
        folder.mkdir(parents=True)
        save_file(gradients, folder / "step-00000001.safetensors")
        lines = [{"step": number, "tokens": 1024 * number} | line for number, line in enumerate((first, record), start=1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    case = comparison.Case("x", 1, 1)

    def equal(one: str, other: str) -> bool:
        return comparison._row(case, "fp32", tmp_path / one, tmp_path / other, True, 1.0).equal

    assert equal("a", "a") and equal("c", "c")
    assert not equal("b", "a") and not equal("a", "b") and not equal("c", "a") and not equal("a", "c")


def test_operators_of_torch_have_kinds():
    kinds = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce", "recv_": "receive",
             "alltoall_base_": "all-to-all", "all_reduce_coalesced": "all-reduce", "broadcast_": "broadcast", "wait_tensor": None}  # fmt: skip
    assert {name: kind_of(name) for name in kinds} == kinds


# ---- models made small ------------------------------------------------------------------------------------------------------


def takes(check, model, ranks):
    try:
        check(model, ranks)
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    "preset", ["deepseek-v3", "qwen3.5-9b", "granite4.0-h-tiny", "nemotron3-nano-30b-a3b", "gemma3-1b", "gpt2-124m", "smollm3-3b", "smollm2-135m", "gpt-oss-20b", "t5-small"]
)
def test_a_small_model_has_the_structure_of_the_large_one(prepared, preset):
    given, _ = load_config(PRESETS / f"{preset}.yaml", of_data(prepared, preset))
    large = resolve(given)
    overrides = shrunk(given, large, 257, 4)
    small = resolve(load_config(PRESETS / f"{preset}.yaml", [*of_data(prepared, preset), *overrides])[0])
    one, other = large.model, small.model
    for check in (check_tensor, check_expert):
        assert [takes(check, one, n) for n in (2, 3, 4)] == [takes(check, other, n) for n in (2, 3, 4)]
    kinds = [{(s.mixer, s.window > 0, s.rope, s.mlp) for s in layer_specs(model)} for model in (one, other)]
    assert kinds[0] == kinds[1] and 4 <= other.layers + other.encoder.layers <= 8
    assert (one.heads // one.kv_heads, one.tie_embeddings, one.experts.groups > 1) == (
        other.heads // other.kv_heads, other.tie_embeddings, other.experts.groups > 1
    )  # fmt: skip
    assert other.dim <= 192 and other.vocab_size < 280 and small.data.sequence_length == 64


@pytest.mark.parametrize("heads", ["{key_heads: 8, value_heads: 24, value_dim: 32}", "{key_heads: 3, value_heads: 96, value_dim: 12}"])
def test_a_small_model_of_granite_4_is_one_that_can_be_exported(prepared, heads):
    """Its values are together as wide as the model, or several times."""
    sizes = ["model.dim=384", "model.heads=12", "model.kv_heads=4", f"model.linear_attention={heads}", *of_data(prepared, "granite")]
    given, _ = load_config(PRESETS / "granite4.0-h-micro.yaml", sizes)
    overrides = shrunk(given, resolve(given), 257, 4)
    small = resolve(load_config(PRESETS / "granite4.0-h-micro.yaml", [*sizes, *overrides])[0]).model.linear_attention
    assert small.value_heads <= 16 and small.value_heads > small.key_heads > 1


def test_what_cannot_be_made_small_is_refused(config_file, tmp_path):
    with pytest.raises(ConfigError, match="has weights of the whole model; leave out one of the two"):
        chosen(config_file, [f"run.init_from={tmp_path}"], None, 2, shrink=True)


@pytest.mark.parametrize(
    "schedule",
    [
        "{name: wsd, warmup_tokens: 512, decay_tokens: 1024}",
        "{name: cosine, warmup_tokens: 512}",
        "{name: piecewise, stages: [{tokens: 1024, ratio: 0.5}, {steps: 2, ratio: 0.1}, {steps: 2, ratio: 0.3}, {steps: 1, ratio: 0}]}",
    ],
)
def test_lengths_in_tokens_are_made_small(config_file, schedule):
    """They ended in `run.steps=3 has no effect with run.tokens`."""
    overrides = ["run.steps=1000", "run.tokens=4096", "schedule.warmup_steps=0", f"schedule={schedule}", "log.gradients_at=[7]", "log.profile=[8]"]
    small, _ = load_config(config_file, [*overrides, *chosen(config_file, overrides, None, 2, shrink=True).overrides])
    assert resolve(small).run.steps == 3 and small.run.tokens is None and resolve(small).schedule.warmup_steps <= 1


def test_a_schedule_by_tokens_is_made_small_without_its_ramp(config_file):
    staged = ["schedule={name: piecewise, warmup_steps: 0, stages: [{steps: 4, ratio: 0.5, by_tokens: true}]}", "batch.ramp=[{until_tokens: 512, sequences: 4}]"]
    assert "batch.ramp=[]" in chosen(config_file, staged, None, 2, shrink=True).overrides


# ---- what is set for another layout, and where runs are kept ----------------------------------------------------------------

OF_OTHER_LAYOUTS = (
    "parallel.join_seconds=30", "parallel.grad_sync=last", "parallel.backend=gloo", "parallel.ddp.bucket_mb=1", "parallel.shard=2",
    "precision.reduce=bf16",
)  # fmt: skip


@pytest.mark.parametrize("name", ["single", "DDP on 2, accumulation 4, no_sync", "FSDP2 on 2", "HSDP 2x2"])
def test_the_check_of_layouts_takes_back_what_is_set_for_another_layout(config_file, tmp_path, name):
    """F10: parallel.join_seconds in the YAML file was refused, because the single process of the comparison has no use for it."""
    [case] = [case for case in cases(16) if case.name == name]
    says_no = SimpleNamespace(returncode=1, communicate=lambda: ("", "error: the run says no\n"))
    with patch("subprocess.Popen") as ran, pytest.raises(TrainingError) as raised:
        ran.return_value.__enter__.return_value = says_no
        compare(config_file, ["batch.sequences=16", *OF_OTHER_LAYOUTS], tmp_path / "out", [case], "fp32")
    assert str(raised.value) == f"{name}: the run says no"  # "error:" stood there twice
    command = ran.call_args.args[0]
    config, _ = load_config(config_file, command[command.index("--config") + 2 :])
    wanted = dict(override.split("=", 1) for override in case.overrides)
    assert config.parallel.strategy == wanted["parallel.strategy"]
    check_effects(config, {"parallel.strategy": config.parallel.strategy})
    assert (config.parallel.replicate, config.parallel.shard) == ((2, 2) if name == "HSDP 2x2" else (None, None))


def test_the_check_of_layouts_does_not_remove_what_it_starts_from(config_file, tmp_path):
    """F14: --from inside --output was deleted by the first comparison."""
    source = tmp_path / "out" / "fp32-0"
    source.mkdir(parents=True)
    with patch("subprocess.Popen") as ran, pytest.raises(ConfigError, match="which it would remove; choose another --output"):
        compare(config_file, [f"run.init_from={source}"], tmp_path / "out", cases(16)[:1], "fp32")
    assert source.is_dir() and not ran.called
