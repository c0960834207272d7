"""What `bash tests/run.sh` selects, and the list of what it leaves to `--thorough`."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from thorough import mark_thorough

HERE = Path(__file__).resolve().parent
QUICK, THOROUGH = "not slow and not cuda and not thorough", "not slow and not cuda"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which nothing is set up and Python prints its arguments, one per line."""
    for name, text in (("launch/setup.sh", ""), (".venv/bin/ruff", ""), (".venv/bin/python", 'printf "%s\\n" "$@"')):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/usr/bin/env bash\n{text}\n")
        file.chmod(0o755)
    (tmp_path / "tests").mkdir()
    shutil.copy(HERE / "run.sh", tmp_path / "tests")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "selected", "handed_on"),
    [
        ((), QUICK, ()),
        (("--durations=3", "-x"), QUICK, ("--durations=3", "-x")),
        (("-k", "resume"), QUICK, ("-k", "resume")),
        (("--thorough",), THOROUGH, ()),
        (("--thorough", "-x"), THOROUGH, ("-x",)),
        (("tests/models",), THOROUGH, ("tests/models",)),
        (("-x", "tests/models/test_t5.py::test_x"), THOROUGH, ("-x", "tests/models/test_t5.py::test_x")),
        (("--slow", "tests/models"), "not cuda", ("tests/models",)),
        (("--cuda",), "cuda", ()),
    ],
)
def test_a_path_and_a_word_say_what_runs(checkout: Path, arguments, selected, handed_on) -> None:
    done = subprocess.run(["bash", "tests/run.sh", *arguments], cwd=checkout, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[:4] == ["-m", "pytest", "-m", selected]
    assert [word for word in words[4:] if word in handed_on] == list(handed_on)
    assert not {"--thorough", "--slow", "--cuda"} & set(words)


class Item(SimpleNamespace):
    """A collected test."""

    def __init__(self, file: str, name: str) -> None:
        super().__init__(path=HERE / file, name=name, marks=[])

    def add_marker(self, mark: str) -> None:
        self.marks.append(mark)


def test_what_is_listed_is_marked_but_for_the_cases_that_stay() -> None:
    listed = yaml.safe_load((HERE / "thorough.yaml").read_text())
    file, test, stay = next((f, t, c) for f, tests in listed.items() for t, c in tests.items() if c)
    items = [Item(file, f"{test}[{stay[0]}]"), Item(file, f"{test}[another]"), Item(file, "test_that_is_not_listed"), Item("x.py", test)]
    mark_thorough(items, complete=False)
    assert [item.marks for item in items] == [[], ["thorough"], [], []]


def test_a_name_on_the_list_that_no_test_has_is_an_error() -> None:
    listed = yaml.safe_load((HERE / "thorough.yaml").read_text())
    file, tests = next(iter(listed.items()))
    names = [f"{test}[{case}]" for test, cases in tests.items() for case in (*cases, "another")]
    mark_thorough([Item(file, name) for name in names], complete=True)
    for index, name in enumerate(names):
        if not name.endswith("[another]"):
            with pytest.raises(pytest.UsageError) as refused:
                mark_thorough([Item(file, n) for i, n in enumerate(names) if i != index], complete=True)
            assert str(refused.value) == f"tests/thorough.yaml: {file} has no {name}; name what there is, or take it out"
    test = next(test for test, cases in tests.items() if not cases)
    with pytest.raises(pytest.UsageError, match=f"has no {test};"):
        mark_thorough([Item(file, n) for n in names if not n.startswith(test)], complete=True)


def test_every_test_that_the_list_names_is_there():
    """Only a run without --thorough reads the list, and with several workers its error is not printed."""
    command = [sys.executable, "-m", "pytest", str(HERE), "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--collect-only", "-m", QUICK]
    done = subprocess.run([*command, "-o", "addopts=--strict-markers"], capture_output=True, text=True, cwd=HERE.parent)
    assert done.returncode == 0, done.stderr or done.stdout[-2000:]
