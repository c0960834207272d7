"""Every family in vLLM's configuration and weight loader. Its kernels need a GPU: what it computes is not seen here."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from other_programs import CACHE, child_environment, download, exported, made_once, ours_and
from parity import FAMILIES, cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
READER = Path(__file__).with_name("read_with_vllm.py")
VLLM = "vllm==0.33.0"
NOT_LOADED = {
    "gpt_oss": "No Unquantized MoE backend supports the deployment configuration",  # on a CPU
    "olmo_hybrid": "list indices must be integers or slices, not NoneType",  # its loader asks for the part of a filter that it is never told
}
FOR_GPUS = (
    "torch", "flashinfer", "tilelang", "nvidia", "quack", "fastsafetensors", "instanttensor", "tokenspeed", "humming", "PyNvVideo", "nvtx", "apache-tvm",
    "xgrammar", "protobuf", "setuptools", "certifi", "llguidance", "model-hosting", "six",
)  # fmt: skip
"""Packages that vLLM asks for and that its loader does not need, or that we have in another version."""


@pytest.fixture(scope="module")
def vllm() -> Path:
    """A Python with the Python code of vLLM, and the packages that it imports."""
    with made_once("vllm") as folder:
        if folder is not None:
            download(VLLM, folder, wheel=True)
            [wheel] = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                code = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith((".py", ".json"))]
                archive.extractall(folder / "code", code)
                [about] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
                lines = archive.read(about).decode().splitlines()
            wheel.unlink()
            asked = [
                line.removeprefix("Requires-Dist: ")
                for line in lines
                if line.startswith("Requires-Dist: ") and "extra ==" not in line
            ]
            asked = [one.partition(";")[0].strip() for one in asked if not one.startswith(FOR_GPUS)]
            ours_and(folder, "uvloop", *asked, also=folder / "code")
    return CACHE / "vllm" / "venv" / "bin" / "python"


def test_every_family_goes_through_its_loader_with_all_weights(vllm, tokenizers, tmp_path):
    made = {family: exported(tmp_path / family, next(iter(cases(family).values())), tokenizers["byte"]) for family in FAMILIES}
    directories = [str(one.directory) for one in made.values()]
    done = subprocess.run(
        [vllm, READER], input=json.dumps(directories), env=child_environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    said = [json.loads(line.removeprefix("answer:")) for line in done.stdout.splitlines() if line.startswith("answer:")]
    wrong, loaded = {}, 0
    for family, answer in zip(made, said, strict=True):
        if "error" in answer:
            if NOT_LOADED.get(family, "?") not in answer["error"]:
                wrong[family] = answer["error"]
        elif answer["squares"] == pytest.approx(answer["exported"], rel=1e-9):
            loaded += 1
        else:
            wrong[family] = answer
    assert wrong == {}
    assert loaded >= len(FAMILIES) - len(NOT_LOADED) > 15
