"""What README and docs tell people to type: every command is run, or at least understood by the program it names."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from running import tool

from pretrain.config.load import load_config
from pretrain.config.read import Tree, apply_override
from pretrain.config.schema import Config
from pretrain.equivalence.cases import cases
from pretrain.run import main

ROOT = Path(__file__).resolve().parents[1]
FOR_DEVELOPERS = [ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md"]
PAGES = [ROOT / "README.md", *FOR_DEVELOPERS, *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


WRITTEN_BY_A_PAGE = ("runs/launching/tiny.yaml", "continued.yaml", "small.yaml", "gpt2.yaml")
"""Configurations that a block of the same page writes."""


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every line that runs one of our programs."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash", ""):
            for line in block.replace("\\\n", " ").splitlines():
                if re.search(r"(pretrain/run\.py +-|tools/\w+\.py +\S)", line) and not line.lstrip().startswith("#"):
                    found.append((page.name, shlex.split(line, comments=True)))
    return found


def test_the_pages_have_commands():
    assert len(commands()) > 15


@pytest.mark.parametrize(
    ("page", "words"), commands(), ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60]
)
def test_every_command_names_files_and_options_that_exist(page, words):
    script = next(i for i, word in enumerate(words) if re.fullmatch(r"(pretrain/run|tools/\w+)\.py", word))
    assert (ROOT / words[script]).is_file()
    arguments = words[script + 1 :]
    if words[script] == "pretrain/run.py":
        check_run_arguments(arguments)
    else:
        has_subjects = words[script].endswith(("bench.py", "convert_checkpoint.py", "inspect_data.py", "prepare_data.py"))
        direction = [word for word in arguments[:1] if has_subjects and not word.startswith("-")]
        text = help_of(words[script], *direction)
        for option in (word for word in arguments if word.startswith("--")):
            assert option in text, f"{page}: {words[script]} has no {option}"


@functools.cache
def help_of(*words: str) -> str:
    return subprocess.run([sys.executable, *words, "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def check_run_arguments(arguments: list[str]) -> None:
    config = arguments[arguments.index("--config") + 1]
    assert config in WRITTEN_BY_A_PAGE or (ROOT / config).is_file()
    tree = Tree()
    for word in arguments:
        if "=" in word and not word.startswith("-"):
            apply_override(tree, word)
        assert not word.startswith("--") or word in (
            "--config",
            "--check",
            "--ranks",
            "--print-config",
            "--origins",
            "--explain",
        )
    unknown = set(tree.values) - set(Config.__dataclass_fields__)
    assert not unknown


def runs() -> list[tuple[str, list[str]]]:
    """(page, words) of every line that starts a run, or checks one, with a configuration of this repository."""
    scripts, found = ("pretrain/run.py", "docs/extending.py"), []
    for page in PAGES:
        for block in blocks(page, "bash", ""):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True) if re.search(rf"({'|'.join(scripts)}) +-", line) else []
                if set(scripts) & set(words) and "--print-config" not in words and not set(WRITTEN_BY_A_PAGE) & set(words):
                    found.append((page.name, words))
    return found


def processes(words: list[str]) -> str | None:
    """How many a line starts; None where it asks `--check` for the configuration's."""
    if "--check" in words:
        return words[words.index("--ranks") + 1] if "--ranks" in words else None
    if words[0] == "accelerate":
        return str(yaml.safe_load((ROOT / words[words.index("--config_file") + 1]).read_text())["num_processes"])
    if words[0] == "torchrun":
        number = words[words.index("--nproc-per-node") + 1]
        return "8" if number == "gpu" else number
    return "1"


@pytest.mark.parametrize(("page", "words"), runs(), ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60])
def test_every_run_of_a_page_lacks_nothing_but_its_data(page, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the paths of data are relative
    script = next(i for i, word in enumerate(words) if word in ("pretrain/run.py", "docs/extending.py"))
    arguments = [word for word in words[script + 1 :] if word not in ("--check", "--explain")]
    config = arguments.index("--config") + 1
    own_name = any(word.startswith("run.name=") for word in arguments) or arguments[config] != "configs/quickstart.yaml"
    assert own_name or len(arguments) == 2, "beside the run of launch/quickstart.sh it would be another one in the same directory"
    arguments[config] = str(ROOT / arguments[config])
    number = processes(words)
    if number is not None and "--ranks" not in arguments:
        arguments += ["--ranks", number]
    if main([*arguments, "--check"]) != 0:
        refusal = capsys.readouterr().err.splitlines()[-1]
        assert re.search(r"(no such directory|missing); prepare (it|pairs) with", refusal), refusal


def test_every_yaml_snippet_is_a_valid_configuration(tmp_path):
    count = 0
    for page in PAGES:
        for block in blocks(page, "yaml"):
            lines = block.splitlines()
            # Alternatives for one key stand line by line; anything else is one document.
            same_key = len({line.split(":")[0] for line in lines}) == 1
            for text in lines if same_key else [block]:
                (tmp_path / "snippet.yaml").write_text(text)
                assert yaml.safe_load(text)
                load_config(tmp_path / "snippet.yaml")
                count += 1
    assert count >= 4


def test_no_name_stands_for_another_one():
    """`configs/X.yaml` cannot be typed: what people are told to run has a real name."""
    files = [*PAGES, ROOT / "pretrain" / "run.py"]
    for folder, pattern in (("launch", "*"), ("tools", "*.py"), ("pretrain", "*.py"), ("configs", "*.yaml")):
        files += [path for path in (ROOT / folder).rglob(pattern) if path.is_file() and path.suffix != ".pyc"]
    for path in files:
        assert not re.search(r"(configs|runs)/X\b|--config X\b", path.read_text(encoding="utf-8")), path


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def developer_commands() -> list[list[str]]:
    lines = [line for page in FOR_DEVELOPERS for block in blocks(page, "bash") for line in block.splitlines()]
    return [list(words) for words in dict.fromkeys(tuple(shlex.split(line, comments=True)) for line in lines) if words]


@pytest.mark.parametrize("words", developer_commands(), ids=" ".join)
def test_every_command_for_developers_can_be_given(words):
    program, *arguments = words[: words.index(">")] if ">" in words else words
    if program == "bash":
        script, *options = arguments
        text = (ROOT / script).read_text(encoding="utf-8")
        assert all(re.search(rf"{re.escape(option)}\b", text) for option in options)
    elif program.endswith("/ruff"):
        assert subprocess.run([sys.executable, "-m", "ruff", *arguments], cwd=ROOT, capture_output=True).returncode == 0
    elif arguments[0] == "-m" and arguments[1] == "pytest":
        targets = [word for before, word in zip(arguments[1:], arguments[2:]) if not word.startswith("-") and before != "-m"]
        assert targets and all((ROOT / target).exists() for target in targets)
    elif arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) and all((ROOT / path).exists() for path in arguments[2:])
    elif arguments[0].startswith("tools/"):
        with pytest.raises(SystemExit) as ended:
            tool(Path(arguments[0]).stem).main([*arguments[1:], "--help"])
        assert ended.value.code == 0
    else:
        assert arguments[0] == "pretrain/run.py"
        assert main(arguments[1:]) == 0
    if ">" in words:
        assert (ROOT / words[-1]).is_file()


@pytest.mark.parametrize("page", FOR_DEVELOPERS, ids=lambda page: page.name)
def test_every_path_for_developers_exists(page):
    named = re.findall(r"`((?:pretrain|tests|configs|docs|tools|launch)/[\w./-]*)`", page.read_text(encoding="utf-8"))
    assert named
    for path in named:
        assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_what_messages_advise_to_install_exists():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for path in [*PAGES, *(ROOT / "pretrain").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert "pretrain[" not in text, f"{path}: the package is on no index"
        for extra in re.findall(r"""pip install[^\n"]*"\.\[([^\]{]+)\]|install_command\(['"](\w+)""", text):
            assert all(f"\n{name} = [" in project for name in "".join(extra).split(",")), (path, extra)


def test_the_license_is_the_whole_official_text():
    # The sha256 of LICENSE-2.0.txt, which apache.org publishes.
    official = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == official


def test_the_citation_names_the_package_as_it_is():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # what the format 1.2.0 requires
    assert f'version = "{citation["version"]}"' in project and f'license = "{citation["license"]}"' in project


def table_after(page: Path, start: str) -> list[list[str]]:
    """The cells of a page's first table after a text, without its head."""
    text = page.read_text(encoding="utf-8").split(start)[1]
    lines = text[text.index("|") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[2:] if line.startswith("|")]


def test_every_row_of_the_comparison_has_its_sources():
    rows = table_after(ROOT / "README.md", "<!-- comparison -->")
    sources = table_after(ROOT / "docs" / "comparison.md", "A dash means")
    assert len(rows) == 14 == len(sources)
    for (row, *cells), (named, text) in zip(rows, sources):
        assert set(cells) <= {"✓", "~", "–"} and len(cells) == 7 and len(text) > 30
        assert set(named.split()) & set(row.split()) - {"the", "of", "a", "and"}, (row, named)
    # Honest in both directions: what is not built here is a dash, and what is a tick can be found.
    ours = {row: cells[0] for row, *cells in rows}
    assert ours["has trained models on GPUs"] == "–" and ours["pipeline, expert parallelism"] == "✓"


def test_the_python_of_the_readme_runs(trained_run, config_file, capsys):
    [code] = blocks(ROOT / "README.md", "python")
    run = trained_run(1, config_file, "run.steps=2", "schedule.warmup_steps=1")
    exec(compile(code.replace("runs/quickstart", str(run)), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("class Reader:\n")


def test_importing_the_package_is_light_and_has_what_the_readme_imports():
    code = "import sys, pretrain; print([m for m in ('torch', 'omegaconf', 'transformers') if m in sys.modules], pretrain.open_model.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[] open_model\n"


@pytest.mark.slow
def test_the_blocks_of_data_and_exports_run_as_they_stand(tmp_path):
    # In a copy of the tree, so that what they write does not stay; launching.md's first run is what exports.md converts.
    for name in ("pretrain", "tools", "configs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    launching = blocks(ROOT / "docs" / "launching.md", "bash")
    script = [*launching[:2], *blocks(ROOT / "docs" / "data.md", "bash"), *blocks(ROOT / "docs" / "exports.md", "bash")[:1]]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the configuration is valid" in done.stdout
    assert done.stdout.count("verified: transformers' logits differ from ours by at most") == 2


def equivalence_rows(page: Path, name: str = "equivalence") -> list[str]:
    table = page.read_text(encoding="utf-8").split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    return [row for row in table.strip().splitlines()[2:] if row]


def test_the_table_of_expert_parallelism_keeps_the_limits_but_where_the_page_says_so():
    rows = equivalence_rows(ROOT / "docs" / "equivalence.md", "experts")
    names = [row.strip("| ").split(" | ")[0] for row in rows]
    assert names[-6:] == [case.name for case in cases(16, experts=True)][-6:] and len(names) == 10
    for row in rows:
        name, *figures, samples = (cell.strip() for cell in row.strip("| ").split("|"))
        gradient, loss, norm, *bf16 = map(float, figures)
        assert max(gradient, norm) <= 5e-6 and loss <= 2e-6 and samples == "same", name
        assert (max(bf16) <= 2**-6) == ("tensor" not in name) and bf16[1] <= 2**-8, name


def test_the_equivalence_table_keeps_the_limits_and_what_the_readme_says_of_it():
    whole = equivalence_rows(ROOT / "docs" / "equivalence.md")
    assert [row.strip("| ").split(" | ")[0] for row in whole] == [case.name for case in cases(16)]
    said = re.search(r"within (\S+) in fp32, tensor and context parallelism within (\S+)\.", (ROOT / "README.md").read_text(encoding="utf-8"))
    for row in whole:
        name, *figures, samples = (cell.strip() for cell in row.strip("| ").split("|"))
        gradient, loss, norm, bf16_gradient, bf16_loss, bf16_norm = map(float, figures)
        if "tensor" in name or "context" in name:  # ranks that share matrices or positions round elsewhere
            assert gradient <= float(said[2]) and norm <= 5e-6 and loss <= 2e-6 and samples == "same", name
            assert max(bf16_gradient, bf16_norm) <= 2**-6 and bf16_loss <= 2**-8, name
            continue
        assert gradient <= 5e-6 and max(loss, norm) <= 2e-6 and samples == "same", name
        assert gradient <= float(said[1]) and (bf16_gradient == 0 or "on 2" not in name or "accumulation" in name), name
        alone = name.startswith("single")  # with other micro-batches
        assert (
            bf16_gradient <= (2**-6 if alone else 5e-6) and bf16_loss <= 2**-8 and bf16_norm <= (2**-6 if alone else 2**-8)
        ), name
