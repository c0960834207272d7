"""The cells of docs/platforms.md in real notebooks: nbformat writes them, nbclient and a kernel of Jupyter execute them."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import threading
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from running import losses

from pretrain import generate, open_model

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED, IN_KERNEL, OPENED = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8"), re.DOTALL
)
DDP = ("parallel.strategy=ddp",)
STEPS = ("run.steps=60", "checkpoint.every_steps=0")


@pytest.fixture
def client(tmp_path, config_file, monkeypatch):
    """`client(cell, ...)`: a client for a notebook of these cells, which has a kernel and a folder of its own and the small configuration."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the kernel is a process of its own, in the folder of its notebook
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))  # a kernel of this interpreter, and of no other
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    def client(*cells: str) -> NotebookClient:
        file = tmp_path / "notebook.ipynb"
        cells = [cell.replace("configs/quickstart.yaml", str(config_file)) for cell in cells]
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), file)
        notebook = nbformat.read(file, as_version=4)
        nbformat.validate(notebook)
        return NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})

    return client


def with_overrides(cell: str, *overrides: str) -> str:
    changed = cell.replace('"]', "".join(['"', *(f', "{override}"' for override in overrides), "]"]))
    assert changed != cell
    return changed


def values(notebook: nbformat.NotebookNode) -> list[object]:
    """The value of each cell's last line, as its output shows it."""
    found = []
    for cell in notebook.cells:
        shown = [output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result"]
        found.append(ast.literal_eval(shown[0]) if shown else None)
    return found


def state(run: Path) -> str:
    return json.loads((run / "status.json").read_text())["state"]


def interrupt_after(steps: int, run: Path, client: NotebookClient) -> None:
    """What the stop button of a notebook does."""
    end = time.monotonic() + 100
    while not (run / "metrics.jsonl").is_file() or len(losses(run)) < steps:
        if time.monotonic() > end:
            return
        time.sleep(0.02)
    asyncio.run(client.km.interrupt_kernel())


@pytest.mark.slow
def test_the_cell_with_a_launcher_trains_on_two_processes_to_the_losses_of_torchrun(client, trained_run, config_file):
    straight = trained_run(2, config_file, *DDP, "run.name=straight")
    client(with_overrides(LAUNCHED, *DDP)).execute()
    run = config_file.parent / "runs" / "notebook"
    assert state(run) == "finished"
    [start] = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert start["world_size"] == 2
    assert len(losses(run)) == 20
    assert losses(run) == pytest.approx(losses(straight), abs=2e-6)


def test_a_kernel_trains_survives_an_error_and_its_stop_button_and_opens_the_run(client, trained_run, config_file):
    """A stop button that killed the kernel, or left torch's signal handlers in it, would lose what the other cells made."""
    run = config_file.parent / "runs" / "in_kernel"
    train = with_overrides(IN_KERNEL, *STEPS)
    handler = "import signal; signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    opened = OPENED.replace("runs/in_kernel", str(run))
    cells = client(with_overrides(IN_KERNEL, "optim.lrr=1"), train, f"open('{run}/status.json').read()", handler, train, opened)
    button = threading.Thread(target=interrupt_after, args=(3, run, cells))
    button.start()
    notebook = cells.execute()
    button.join()
    refused, stopped, status, restored, finished, text = values(notebook)
    assert (refused, stopped, finished, restored) == (2, 0, 0, True)
    [error] = [output.text for output in notebook.cells[0].outputs if output.output_type == "stream"]
    assert error == "error: command line: unknown key optim.lrr; the nearest valid name is optim.lr\n"
    assert json.loads(status)["state"] == "preempted" and state(run) == "finished"
    alone, two = (trained_run(n, config_file, *STEPS, f"run.name=straight-{n}", *more) for n, more in ((1, ()), (2, DDP)))
    assert len(losses(run)) == 60
    assert losses(run) == losses(alone)
    assert losses(run) == pytest.approx(losses(two), abs=2e-6)
    model = open_model(str(alone))
    prompt = model.begin + model.tokenizer.encode("class ")
    assert text == model.tokenizer.decode(prompt + generate(model.network, prompt, max_tokens=16, seed=1))
