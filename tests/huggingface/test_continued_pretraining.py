"""docs/continued_pretraining.md as it stands, on a small published model: import, preparation, training, export."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from running import tool
from safetensors.torch import load_file

from pretrain.observe.metrics import read_metrics
from pretrain.run import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "continued_pretraining.md"
SMALL = [
    "run.steps=3", "data.sequence_length=32", "batch.sequences=4", "batch.micro_sequences=2", "schedule.warmup_steps=1", "optim.lr=1e-3",
    "validation.every_steps=0", "log.every_steps=1", "log.tensorboard=false", "parallel.strategy=single", "precision.compute=fp32",
    "checkpoint.export_check=false",
]  # fmt: skip


def commands() -> list[list[str]]:
    """The words of every command of the page, after the configuration that its first block writes."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = re.sub(r"<<'YAML'\n.*?^YAML\n", "\n", "".join(blocks), flags=re.DOTALL | re.MULTILINE).splitlines()
    return [shlex.split(line) for line in lines if ".py" in line]


@pytest.fixture
def folder(tmp_path, exported, monkeypatch) -> Path:
    """Where somebody follows the page: a published model, a text, and the configuration."""
    (tmp_path / "published").symlink_to(exported)
    (tmp_path / "corpus" / "sub").mkdir(parents=True)
    for i in range(40):
        (tmp_path / "corpus" / "sub" / f"{i}.txt").write_text(
            f"document {i}: the sum of {i} and {i * i} is {i + i * i}.\n" * 20
        )
    configuration = re.search(r"<<'YAML'\n(.*?)^YAML\n", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "continued.yaml").write_text(configuration[1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_continues_a_published_model(folder, capsys):
    convert, prepare, train, check, export = commands()
    assert [words[0] for words in (convert, prepare, train, check, export)] == [
        "python",
        "python",
        "torchrun",
        "python",
        "python",
    ]
    assert tool("convert_checkpoint").main(convert[2:]) == 0, capsys.readouterr().err
    assert (folder / "imported" / "model.yaml").is_file()
    # 40 documents: a hundredth of them may be none at all.
    assert tool("prepare_data").main([*["0.2" if word == "0.01" else word for word in prepare[2:]], "--workers", "1"]) == 0
    assert main([*check[2:], *SMALL[:5], "checkpoint.export_check=false", "batch={sequences: 8, micro_sequences: 1}"]) == 0
    assert "fsdp 8 on 8 processes" in capsys.readouterr().out
    assert main([*train[train.index("--config") :], *SMALL]) == 0, capsys.readouterr().err
    losses = [record["loss"] for record in read_metrics(folder / "runs" / "continued")]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert tool("convert_checkpoint").main(export[2:]) == 0, capsys.readouterr().err
    before, after = load_file(folder / "published" / "model.safetensors"), load_file(folder / "exported" / "model.safetensors")
    assert before.keys() == after.keys() and any(not before[name].equal(after[name]) for name in before)


def test_a_model_that_was_typed_wrongly_is_named_by_its_keys_and_the_file_to_include(folder, capsys):
    convert, prepare, train, *_ = commands()
    assert tool("convert_checkpoint").main([word for word in convert[2:] if word != "--verify"]) == 0
    assert tool("prepare_data").main([*["0.2" if word == "0.01" else word for word in prepare[2:]], "--workers", "1"]) == 0
    written = yaml.safe_load((folder / "continued.yaml").read_text())
    del written["include"]
    (folder / "continued.yaml").write_text(yaml.safe_dump(written))
    capsys.readouterr()
    for mode in ([], ["--check"]):
        assert main([*train[train.index("--config") :], *SMALL, *mode]) == 1
        [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert "run.init_from=imported holds another model: " in line and "model.dim was 32 and is 384" in line
        assert "include imported/model.yaml in the configuration, in place of its section `model`" in line
        assert "query_scalar" not in line and "head_dim" not in line
