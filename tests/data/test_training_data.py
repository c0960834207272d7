"""One interface for training data: what it is made of, only `data/` knows."""

import ast
from pathlib import Path

import pretrain

PACKAGE = Path(pretrain.__file__).parent
KINDS = {
    "Stream", "PreparedTraining", "PairTraining", "PreparedPairs", "PairOrder", "NextToken", "SpanCorruption", "Windows", "Packed",
    "Loader", "PairLoader", "SampleBatch", "PairBatch",
}  # fmt: skip


def imports(path: Path) -> dict[str, str]:
    """Name -> module of what a file imports from, within functions too."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {name.name: node.module or "" for node in nodes for name in node.names}


def test_the_plan_knows_two_names_of_data():
    found = {name for name, module in imports(PACKAGE / "train" / "plan.py").items() if module.startswith("pretrain.data")}
    assert found == {"TrainingData", "open_data"}


def test_nothing_outside_data_asks_which_kind_of_data_it_is():
    """House.md 1 (a) 2: there were 15 such tests."""
    asked = []
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "data" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked += [f"{path}:{node.lineno}" for name in ast.walk(node.args[1]) if getattr(name, "id", "") in KINDS]
    assert asked == []


def test_data_and_models_do_not_import_each_other():
    """House.md 1 (a) 4."""
    for package, other in (("data", "pretrain.models"), ("models", "pretrain.data")):
        for path in (PACKAGE / package).rglob("*.py"):
            assert not [name for name, module in imports(path).items() if module.startswith(other)], path
