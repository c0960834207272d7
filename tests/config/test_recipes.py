"""The recipes of configs/pretrain/ can be started, and docs/recipes.md says of them what `--check` says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import write_prepared

from pretrain.config.load import load_config
from pretrain.run import main
from pretrain.train.memory_estimate import estimate_memory

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs" / "pretrain").glob("*.yaml"))
PROCESSES = {  # and what is added on the command line
    "llama-125m": (8, []),
    "smollm2-360m": (8, []),
    "olmo2-1b": (8, []),
    "smollm3-3b": (32, ["parallel.replicate=4"]),
    "llama3.1-8b": (64, ["parallel.replicate=8"]),
}


def test_every_recipe_is_here():
    assert {path.stem for path in RECIPES} == set(PROCESSES)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, byte_tokenizer) -> Path:
    """The sources that recipes read, below `data`: 4.4M tokens together, a step of the largest batch."""
    folder = tmp_path_factory.mktemp("corpus")
    for seed, name in enumerate(("web", "code", "math")):
        (folder / "data" / name).mkdir(parents=True)
        write_prepared(folder / "data" / name / "train", byte_tokenizer, seed, documents=7300)
        write_prepared(folder / "data" / name / "validation", byte_tokenizer, 10 + seed, documents=300)
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_its_check_and_the_page_says_the_same(path, corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus)
    processes, overrides = PROCESSES[path.stem]
    arguments = ["--config", str(path), *overrides, "checkpoint.export_check=false"]
    assert main([*arguments, "--check", "--ranks", str(processes)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert said.endswith("the configuration is valid\n")

    def found(pattern: str) -> str:
        return re.search(pattern, said, re.MULTILINE)[1]

    config = load_config(path, overrides)[0]
    step = config.batch.sequences * config.data.sequence_length
    parameters, tokens = int(found(r"([\d,]+) parameters").replace(",", "")), step * config.run.steps
    assert 20 <= tokens / parameters < 20.5
    layout = ", ".join([found(r"^layout   (.*) on"), found(r"ranks? x (\d+ micro-steps?)")])
    row = [
        f"`{path.stem}`", f"{parameters / 1e6:,.0f}M", f"{tokens / 1e9:.1f}B", f"{step / 1e6:.2f}M tokens", found(r"^layout .* on (\d+) processes"),
        layout, found(r"^memory   ([\d.]+ .B) per rank"), of_page(path.stem)[7],
        found(r"^saves    ([\d.]+ .B) each"), "not known",
    ]  # fmt: skip
    assert row == of_page(path.stem)


def of_page(name: str) -> list[str]:
    """The row of a recipe in the page's table."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    [line] = re.findall(rf"^\| (`{re.escape(name)}` .*) \|$", page, re.MULTILINE)
    return line.split(" | ")


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_page_says_how_much_memory_a_gpu_needs_and_80_gib_are_enough(path):
    processes, overrides = PROCESSES[path.stem]
    most = estimate_memory(load_config(path, overrides)[0], processes, 85e9).most
    assert of_page(path.stem)[7] == f"{most / 1e9:.1f} GB" and most < 80e9


def test_the_shares_of_every_recipe_add_up_to_one():
    for path in RECIPES:
        data = load_config(path)[0].data
        weights = [stage.weights for stage in data.stages] or [{source.name: source.weight for source in data.sources}]
        assert all(sum(each.values()) == pytest.approx(1) for each in weights), path.stem
        comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert re.search(r"20 per parameter.*2203\.15556", " ".join(comments)), path.stem
