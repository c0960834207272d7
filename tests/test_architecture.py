"""Which package may import which, as docs/architecture.md says, and no circle anywhere: a house that is read floor by floor."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "pretrain").rglob("*.py")
}
TABLE = "| package | may import |"


def allowed() -> dict[str, set[str]]:
    """The table of docs/architecture.md: what each package may import."""
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split(TABLE)[1].split("\n\n")[0]
    found: dict[str, set[str]] = {}
    for line in table.splitlines()[2:]:
        packages, imported = (set(re.findall(r"`([^`]+)`", cell)) for cell in line.strip("|").split("|"))
        found |= dict.fromkeys(packages, imported)
    return found


ALLOWED = allowed()


def imports(name: str) -> set[str]:
    """The files of this program that a file imports, at the top or where they are used."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= inner or {node.module}
    return found & FILES.keys()


@functools.cache
def all_imports() -> dict[str, set[str]]:
    return {name: imports(name) for name in FILES}


def package_of(name: str) -> str:
    """The innermost package of the table that a file belongs to."""
    parts = name.split(".")[1:]
    inner = "/".join(parts[:2])
    return inner if inner in ALLOWED else parts[0] if parts else "pretrain"


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups whose members import each other, directly or by way of others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(arrows[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += arrows.get(name, ())
        return seen

    reach = {name: reached(name) for name in arrows}
    groups = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in arrows}
    return sorted(list(group) for group in groups if group)


def test_packages_import_what_the_table_allows_and_the_table_has_every_package():
    wrong = []
    for name, imported in all_imports().items():
        own = package_of(name)
        if own == "pretrain":
            continue
        if own not in ALLOWED:
            wrong.append(f"{name}: docs/architecture.md does not say what {own} may import")
            continue
        others = {other for other in imported if other != "pretrain"}
        wrong += [f"{name} imports {other}" for other in others if package_of(other) not in {own, *ALLOWED[own]}]
    assert wrong == []


def test_the_table_allows_nothing_that_is_not_used_and_no_circle():
    used: dict[str, set[str]] = {own: set() for own in ALLOWED}
    for name, imported in all_imports().items():
        used.get(package_of(name), set()).update(package_of(other) for other in imported)
    assert {own: rest for own, may in ALLOWED.items() if (rest := may - used[own])} == {}
    assert circles(ALLOWED) == []


def test_no_file_imports_itself_by_way_of_others():
    assert circles(all_imports()) == []


@pytest.mark.parametrize(
    ("arrows", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [["b", "c"]]),
        ({"a": {"a"}}, [["a"]]),
    ],
)
def test_circles_are_found(arrows, expected):
    assert circles(arrows) == expected


def test_no_two_files_and_no_two_public_classes_have_one_name():
    """A name that is found once is found at once."""
    files = [path.name for path in FILES.values() if path.name != "__init__.py"]
    classes = [
        node.name
        for path in FILES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted({name for name in files if files.count(name) > 1}) == []
    assert sorted({name for name in classes if classes.count(name) > 1}) == []


def test_files_have_at_most_400_lines_and_functions_60_besides_their_docstring():
    tools = Path(__file__).resolve().parents[1] / "tools"
    for path in [*FILES.values(), *tools.rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                about = node.body[0] if ast.get_docstring(node) is not None else None
                lines = node.end_lineno - node.lineno + 1 - (about.end_lineno - about.lineno + 1 if about else 0)
                assert lines <= 60, f"{path}:{node.lineno} {node.name} has {lines} lines"


def test_nobody_but_the_families_tests_a_familys_name_and_only_networks_know_names_of_parameters():
    """The family or the network answers instead."""
    wrong = []
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            names = {getattr(side, "attr", getattr(side, "id", None)) for side in sides}
            if "family" in names and not name.startswith("pretrain.models.families."):
                wrong.append(f"{name}:{node.lineno} tests a family's name")
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            known = name.startswith(("pretrain.models", "pretrain.huggingface"))
            if not known and " " not in text and re.search(r"\.(weight|bias)$|\.experts\.$|^layers\.", text):
                wrong.append(f"{name}:{node.lineno} names a parameter: {text}")
    assert wrong == []
