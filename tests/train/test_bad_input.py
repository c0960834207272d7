"""What cannot be trained is refused with one line that names it, before anything is allocated."""

import shutil
from pathlib import Path

import pytest
from running import run_main, write_prepared

from pretrain.storage import sealed_json, unsealed


@pytest.fixture
def data(prepared, tmp_path) -> Path:
    """A copy that may be damaged."""
    return shutil.copytree(prepared, tmp_path / "copy")


def refused(pool, config_file: Path, *overrides: str, ranks: int = 1) -> tuple[int, str]:
    """Exit code and the one line of the refusal."""
    code, printed = pool.launch(ranks, run_main, str(config_file), *overrides)[0]
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in printed, printed
    return code, lines[0]


def test_missing_data_is_named(pool, config_file):
    code, line = refused(pool, config_file, "data.sources=[{path: /nowhere}]")
    assert code == 1 and line.startswith("error: command line: data.sources.0: /nowhere")
    written = config_file.read_text().splitlines()
    place = next(number for number, text in enumerate(written, 1) if "path: " in text)
    config_file.write_text("\n".join(written).replace("path: ", "path: /nowhere"))
    code, line = refused(pool, config_file)
    assert code == 1 and line.startswith(f"error: {config_file}:{place}: data.sources.0: /nowhere"), line
    code, line = refused(pool, config_file, "data.sources=[]")
    assert code == 2 and "data.sources is empty" in line


ABSENT = "data.sources=[{path: /nowhere}]"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.text.input=[x.txt]", "data.sources and data.text both name the training data"),
        (
            "data.stages=[{until_tokens: 500}, {until_tokens: 400}]",
            "data.stages.1.until_tokens=400 is not beyond the stage before",
        ),
        ("data.stages=[{weights: {other: 1}}]", "no source is called 'other'; they are called"),
        (
            "batch.ramp=[{until_tokens: 9, sequences: 4}, {until_tokens: 9, sequences: 8}]",
            "batch.ramp.1.until_tokens=9 is not beyond",
        ),
        ("schedule={name: wsd, decay_steps: 99}", "schedule.decay_steps=99 do not fit in run.steps"),
        ("schedule={name: wsd, decay_tokens: 99999}", "schedule.decay_tokens=99999 do not fit in the run, which has 10240 tokens (run.steps=20)"),
        ("schedule={name: piecewise, stages: [{ratio: 0.5}]}", "schedule.stages.0 needs one of steps and tokens, and not both"),
        (
            "schedule={name: piecewise, stages: [{ratio: 0.5, steps: 2}, {ratio: 0.1, steps: 2, tokens: 9}]}",
            "schedule.stages.1 needs one of steps and tokens, and not both",
        ),
        ("schedule={name: wsd, decay_tokens: 99999, warmup_steps: 0}", "schedule.decay_tokens=99999 do not fit in the run"),
        ("run.accept_changes=[model.dim]", "run.accept_changes=model.dim: a change of this key cannot be accepted"),
        ("model.attention_backend=flex", "model.attention_backend=flex has no effect"),
        (
            "model={dim: 32, layers: 2, heads: 2, attention_backend: flex, attention: {window: 100}, max_sequence_length: 256, attention_dropout: 0.3}",
            "model.attention_backend=flex drops no weights, as model.attention_dropout=0.3 asks; use sdpa or auto",
        ),
        ("data.objective=span_corruption", "data.objective=span_corruption needs an encoder-decoder"),
        ("model.family=hf", "model.hf_config"),
        ("batch.micro_sequences=3", "batch.sequences=16 is not divisible by batch.micro_sequences=3"),
    ],
)
def test_the_configuration_alone_is_refused_by_print_config_and_by_check_without_data(config_file, override, message):
    """House.md 4.1: `--print-config` printed what `--check` refused, and `--check` of absent data checked nothing else."""
    printing = run_main(str(config_file), "--print-config", ABSENT, override)
    assert printing[0] == 2 and message in printing[1] and printing[1].count("\n") == 1
    assert run_main(str(config_file), "--check", ABSENT, override) == printing


def test_a_check_of_absent_data_says_what_else_is_wrong(pool, config_file):
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", ABSENT)
    assert code == 1 and printed.count("error: ") == 1 and "/nowhere" in printed
    sharded = "parallel.strategy=single", "parallel.shard=2"
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", ABSENT, *sharded)
    first, second = printed.splitlines()
    assert code == 2 and "/nowhere" in first and second.startswith("error: command line: parallel.strategy=single cannot shard")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", "data.sources=[]", *sharded)
    assert code == 2 and "data.sources is empty" in printed and "parallel.strategy=single cannot shard" in printed


def test_an_empty_source_is_named(pool, config_file, tmp_path, byte_tokenizer):
    tiny = write_prepared(tmp_path / "tiny", byte_tokenizer, seed=1, documents=1)
    code, line = refused(pool, config_file, f"data.sources=[{{path: {tiny}}}]", "data.sequence_length=200")
    assert code == 1 and f"{tiny}: 200 tokens are less than one sample of data.sequence_length=200" in line


def test_a_source_smaller_than_a_global_batch_is_refused(pool, config_file, tmp_path, byte_tokenizer):
    tiny = write_prepared(tmp_path / "tiny", byte_tokenizer, seed=1, documents=2)
    code, line = refused(pool, config_file, f"data.sources=[{{path: {tiny}}}]")
    assert code == 1 and "hold 12 samples of data.sequence_length=32" in line and "batch.sequences=16" in line


def test_rows_of_no_token_are_named(pool, config_file, prepared):
    """A newcomer's tokenizer of 2,000 tokens and a preset for 32,000: more than half of the model would never see a token."""
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", "model.vocab_size=32000")
    said = f"note     model.vocab_size=32000: 31,743 of these rows belong to no token of {prepared}; model.vocab_size=null takes as many as it has"
    assert code == 0 and said in printed
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", "model.vocab_size=384")
    assert code == 0 and "belong to no token" not in printed


def test_a_vocabulary_that_does_not_fit_the_model_is_refused(pool, config_file, prepared):
    code, line = refused(pool, config_file, "model.vocab_size=100")
    assert code == 2 and "model.vocab_size=100 is below the 257 tokens" in line and str(prepared) in line


def test_sources_of_two_tokenizers_are_refused(pool, config_file, prepared, data):
    manifest = unsealed((data / "manifest.json").read_bytes())
    (data / "manifest.json").write_text(sealed_json({**manifest, "tokenizer_sha256": "0" * 64}))
    code, line = refused(pool, config_file, f"data.validation=[{{path: {data}}}]")
    assert code == 1 and str(prepared) in line and str(data) in line and "different tokenizers" in line


@pytest.mark.parametrize("file", ["shard-00001.bin", "shard-00002.idx"])
def test_a_truncated_shard_is_refused_by_name(pool, config_file, data, file):
    (data / file).write_bytes((data / file).read_bytes()[:-8])
    code, line = refused(pool, config_file, f"data.sources=[{{path: {data}}}]")
    assert code == 1 and str(data / file) in line


def test_sizes_alone_are_checked_on_request(pool, config_file, data):
    content = bytearray((data / "shard-00000.bin").read_bytes())
    content[1000] ^= 1
    (data / "shard-00000.bin").write_bytes(content)
    options = (f"data.sources=[{{path: {data}}}]", "data.verify=size", "run.steps=1")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *options)
    assert code == 0, printed


def test_a_library_for_gpus_is_refused_without_them(pool, config_file):
    code, line = refused(pool, config_file, "parallel.strategy=ddp", "parallel.backend=nccl", ranks=2)
    assert code == 2 and "parallel.backend=nccl needs GPUs" in line


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("file", ["shard-00000.bin", "shard-00001.bin"])
def test_a_flipped_bit_in_a_shard_is_refused_by_name_whichever_rank_reads_it(pool, config_file, data, file, ranks):
    content = bytearray((data / file).read_bytes())
    content[1000] ^= 1
    (data / file).write_bytes(content)
    strategy = "parallel.strategy=ddp" if ranks > 1 else "parallel.strategy=single"
    code, line = refused(pool, config_file, f"data.sources=[{{path: {data}}}]", strategy, ranks=ranks)
    assert code == 1 and str(data / file) in line
    assert not list((config_file.parent / "runs" / "run").glob("checkpoints/*"))


def test_a_batch_that_does_not_divide_names_both_keys_and_the_nearest_legal_values(pool, config_file):
    code, line = refused(pool, config_file, "batch.sequences=10", "batch.micro_sequences=4")
    assert code == 2 and "batch.sequences=10" in line and "batch.micro_sequences=4" in line
    assert "nearest legal batch.sequences: 8 or 12" in line and "batch.micro_sequences: 5" in line


@pytest.mark.parametrize(("ranks", "overrides", "message"), [
    (1, ("parallel.strategy=ddp",), "expects several processes, 1 started; start them with: torchrun --nproc-per-node 2"),
    (1, ("parallel.strategy=fsdp", "parallel.replicate=2", "parallel.shard=2"), "expects 4 processes, 1 started"),
    (2, ("parallel.strategy=single",), "runs in one process, but 2 were started"),
    (2, ("parallel.strategy=fsdp", "parallel.shard=4"), "2 processes do not divide by 4"),
    (2, ("parallel.strategy=ddp", "parallel.shard=2"), "cannot shard"),
    (2, ("parallel.strategy=ddp", "parallel.offload=true"), "parallel.offload=true has no effect with parallel.strategy=ddp; set parallel.strategy=fsdp"),
])  # fmt: skip
def test_processes_that_do_not_fit_the_configuration_are_refused(pool, config_file, ranks, overrides, message):
    code, line = refused(pool, config_file, *overrides, ranks=ranks)
    assert code == 2 and message in line


def test_check_says_that_a_configuration_is_valid_for_the_processes_it_asks_for(pool, config_file):
    overrides = ("--check", "parallel.strategy=fsdp", "parallel.replicate=2", "parallel.shard=4", "batch.sequences=32")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *overrides)
    assert code == 0 and "hsdp 2x4 on 8 processes" in printed and "the configuration is valid" in printed
    assert not (config_file.parent / "runs").exists()


def test_print_config_loads_back(pool, config_file):
    from pretrain.config.load import load_config

    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--print-config", "optim.lr=1e-4")
    (config_file.parent / "printed.yaml").write_text(printed)
    again, _ = load_config(config_file.parent / "printed.yaml")
    assert code == 0 and again.optim.lr == 1e-4 and again.model.head_dim == 8 and again.data.seed == 7
