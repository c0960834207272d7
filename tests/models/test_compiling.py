"""What is compiled stays compiled: torch alone would run a function as it is from its ninth version on."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from pretrain.config.model_schema import Model
from pretrain.errors import TrainingError
from pretrain.models import build_network, compiling
from pretrain.models.compiling import compile_strictly
from pretrain.models.families import complete
from pretrain.parallel.blocks import compile_model
from pretrain.parallel.initialise import initialise

ROOT = Path(__file__).resolve().parents[2]


def test_a_function_of_many_versions_stays_compiled_until_it_is_refused(monkeypatch):
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        versions = CompileCounter()
        function = compile_strictly(lambda x: x.sin() + 1, backend=versions, dynamic=False)
        for size in range(2, 22):
            function(torch.ones(size))
        assert versions.frame_count == 20
        monkeypatch.setattr(compiling, "MOST_VERSIONS", 3)
        torch._dynamo.config.fail_on_recompile_limit_hit = False  # as in a thread that has not compiled yet
        function = compile_strictly(lambda x: x.cos() + 1, backend=versions, dynamic=False)
        with pytest.raises(TrainingError, match="<lambda> needs more than 3 compiled versions"):
            for size in range(2, 22):
                function(torch.ones(size))
        assert versions.frame_count == 23


def test_a_whole_model_with_dropout_is_compiled_but_for_its_loss():
    """torch cannot trace the hashes that masks of dropout are made from."""
    model = complete(Model(family="llama", dim=32, layers=2, heads=2, vocab_size=61, dropout=0.1), 16)
    ids = torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(0))
    found = []
    for prepare in (lambda network: None, lambda network: compile_model(network, backend="eager")):
        network = build_network(model)
        initialise(network, 0)
        prepare(network)
        torch._dynamo.utils.counters.clear()
        found.append(network(ids[:, :-1], ids[:, 1:], keys_B=torch.arange(3)))
    torch.testing.assert_close(*found)
    assert ["fused_losses" in reason for reason in torch._dynamo.utils.counters["graph_break"]] == [True]


def test_constants_are_marked_as_torch_marks_them():
    ours, theirs = (lambda: 1), (lambda: 1)
    assert vars(compiling.constant_when_compiled(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}


def test_a_compiler_that_fails_is_told_in_one_line():
    """Without a C++ compiler, for one, the user saw some forty lines of torch's."""

    def broken(graph: torch.fx.GraphModule, inputs: list) -> None:
        raise RuntimeError("C++ compile\nerror\n\nCommand:\ng++\n\nOutput:\nIn file x.cpp:\nx.cpp:1: fatal error: Python.h: No such file\nended")

    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    def two_graphs(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    x = torch.ones(3)
    failing = {square: dict(backend=broken), two_graphs: dict(backend="eager", fullgraph=True)}
    said = {
        square: r"square \(backend='broken' raised: RuntimeError: C\+\+ compile error: x.cpp:1: fatal error: Python.h: No such file\)",
        two_graphs: r"two_graphs \(.*graph_break.*\)",
    }
    for function, options in failing.items():
        with pytest.raises(TrainingError, match=f"^torch's compiler fails at .*{said[function]}; do without$") as caught:
            compile_strictly(function, "do without", **options)(x)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_folder_in_which_torch_cannot_compile_is_named(monkeypatch):
    """The C++ compiler took a folder with a space in its name for two, and said "input file '/home/a' is the same as output file"."""

    def broken(graph: torch.fx.GraphModule, inputs: list) -> None:
        raise RuntimeError("C++ compile error")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/home/a b")
    with pytest.raises(TrainingError, match=r"; set TORCHINDUCTOR_CACHE_DIR \(now /home/a b\) to a folder without spaces and quotation marks in its name, or do without$"):
        compile_strictly(lambda x: x * x, "do without", backend=broken)(torch.ones(3))


@pytest.mark.parametrize(
    "problem, free", [(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 10**9), (RuntimeError("C++ compile error: ld returned 1 exit status"), 2**15)]
)
def test_a_full_disk_is_named_as_the_reason(monkeypatch, tmp_path, problem, free):
    """The message said that the linker returned 1, and to compile nothing."""

    def broken(graph: torch.fx.GraphModule, inputs: list) -> None:
        raise problem

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    said = f"finds no room for its files in {tmp_path}; make room there, or set TORCHINDUCTOR_CACHE_DIR to another folder$"
    with pytest.raises(TrainingError, match=said):
        compile_strictly(lambda x: x * x, backend=broken)(torch.ones(3))


@pytest.mark.parametrize("variables, missing", [({"PATH": "/nowhere"}, "g++"), ({"CXX": "/nowhere/clang++"}, "/nowhere/clang++")])
def test_a_host_without_a_cpp_compiler_is_told_so(variables, missing, tmp_path):
    """torch looks for instructions of the CPU before it compiles, and its error there was a traceback."""
    code = (
        "from pretrain.models.compiling import compile_strictly; from pretrain.errors import TrainingError; import torch\n"
        "try: compile_strictly(lambda x: x * x, 'do without')(torch.ones(3))\n"
        "except TrainingError as error: print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **variables}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.stdout.strip() == (
        f"torch's compiler needs a C++ compiler, and {missing} does not work here; install g++, name another by the variable CXX, or do without"
    ), ended.stderr


def test_a_run_without_a_folder_for_the_compiler_says_so_in_one_line(config_file):
    """torch makes that folder when it is imported by an optimizer, whether or not the run compiles."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": "/proc/nowhere"}
    command = [sys.executable, str(ROOT / "pretrain" / "run.py"), "--config", str(config_file)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and "Traceback" not in ended.stdout + ended.stderr
    line = r"error: torch has no folder for its compiler's files \(.*'/proc/nowhere'\); set TORCHINDUCTOR_CACHE_DIR to one that can be written"
    assert re.search(rf"^{line}$", ended.stderr, re.M), ended.stderr


@pytest.mark.slow  # compiles four programs of torch, half a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_signal_to_all_processes_does_not_hide_what_the_cpu_can(tmp_path):
    """It ended the compiler of torch's trial programs, and torch compiled for a CPU without those instructions, in silence."""
    compiler = tmp_path / "signalled"
    compiler.write_text("#!/bin/bash\n(sleep 0.05; kill -TERM 0) &\nexec g++ \"$@\"\n")
    compiler.chmod(0o755)
    code = (
        "import signal; told = []; signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "from pretrain.models.compiling import look_at_the_cpu; look_at_the_cpu('')\n"
        "from torch._inductor.cpu_vec_isa import pick_vec_isa; print(pick_vec_isa(), bool(told))"
    )
    found = {}
    for name in ("g++", str(compiler)):
        environment = {**os.environ, "CXX": name, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache-{len(found)}")}
        ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, start_new_session=True)
        assert ended.returncode == 0, ended.stderr
        found[name] = ended.stdout.split()
    assert (found["g++"][0] == "INVALID_VEC_ISA") == (torch.backends.cpu.get_cpu_capability() == "DEFAULT")
    assert found[str(compiler)][:-1] == found["g++"][:-1]
    assert (found["g++"][-1], found[str(compiler)][-1]) == ("False", "True")


def test_a_library_that_a_killed_process_left_unfinished_is_compiled_again(tmp_path, monkeypatch, caplog):
    """After kill -9 while it compiled, each later start failed: torch takes a file that exists for a whole one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    cache = tmp_path / "cache"
    gone, of_today = [cache / "a.so", cache / "b.so"], [tmp_path / "elsewhere.so", cache / "being_written.so", cache / "being_written.so"]
    cache.mkdir()
    for path in {*gone, *of_today}:
        path.touch()
    for path in [*gone, of_today[0]]:
        os.utime(path, (1, 1))
    left = [*gone, *of_today, cache / "another_rank_removed_it.so"]

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        if left:
            raise ImportError(f"{left.pop(0)}: file too short")
        return graph

    function, x = compile_strictly(lambda x: x.exp() + 3, backend=backend), torch.ones(3)
    for said in ("elsewhere", "being_written"):  # the second one is met twice: another process may have been writing it
        with pytest.raises(TrainingError, match=f"{said}.so: file too short"):
            function(x)
    assert not any(path.exists() for path in gone) and all(path.exists() for path in of_today)
    assert caplog.text.count("left unfinished") == 2 and len(left) == 1
    assert torch.equal(function(x), x.exp() + 3)


@pytest.mark.parametrize(("code", "times"), [(-signal.SIGTERM, 2), (1, 1)])
def test_a_compiler_that_a_signal_killed_is_started_again(code, times):
    """A signal to a run's whole group, Ctrl-C for one, ends the C++ compiler too. The run completes its step, saves, and ends as preempted."""
    started = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        started.append(graph)
        if len(started) == 1:
            raise RuntimeError("C++ compile error") from subprocess.CalledProcessError(code, "g++")
        return graph

    function, x = compile_strictly(lambda x: x.exp() + 3, backend=backend), torch.ones(3)
    if code < 0:
        assert torch.equal(function(x), x.exp() + 3)
    else:
        with pytest.raises(TrainingError, match="torch's compiler fails"):
            function(x)
    assert len(started) == times
