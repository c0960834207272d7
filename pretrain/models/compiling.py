"""torch.compile without its silent fallback, and without its import where nothing is compiled."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.errors import TrainingError, clipped
from pretrain.storage import real

log = logging.getLogger(__name__)

_STARTED = time.time()

MOST_VERSIONS = 64
"""How often torch may compile one function anew, for other shapes, masks, kinds of layers, with and without gradients. Its own limit is 8."""


_LEAST_ROOM = 1 << 20
"""Bytes that the compiler's files need at least."""


def new_name(result: Tensor) -> Tensor:
    """The result of an autograd Function's forward, for it to return. Under a compiler it is a new tensor over the same memory.

    A Function may change its result in place, or cast it to the format that it has. Then code compiled by torch 2.11 silently loses the gradient
    (pytorch issue 180642).
    """
    return result.view_as(result) if torch.compiler.is_compiling() else result


# `torch.compiler.disable` and `assume_constant_result` import the compiler. That takes as long as importing torch, and most tools never compile.
_put_off: list[Callable[[], None]] = []


def constant_when_compiled(function: Callable) -> Callable:
    """`torch.compiler.assume_constant_result`: compiled code keeps the result of the first call."""
    function._dynamo_marked_constant = True  # all that torch's does, which a test holds
    return function


def never_compiled(function: Callable) -> Callable:
    """`torch.compiler.disable`: compiled code calls this function or method as it is.

    That makes another function, which takes its name in its module or class. What should be compiled calls it by that name, and does not import it alone.
    """

    def replace() -> None:
        *classes, name = function.__qualname__.split(".")
        owner = functools.reduce(getattr, classes, sys.modules[function.__module__])
        setattr(owner, name, torch.compiler.disable(function))

    _put_off.append(replace)
    return function


def compile_strictly(
    function: Callable, remedy: str = "set parallel.compile=none", cuts_for_ddp: bool = False, **options: Any
) -> Callable:
    """`torch.compile(function, **options)`. `cuts_for_ddp`: let torch cut the function at DDP's buckets, so that gradients travel before all of them are
    computed. A block's gradients travel when it is done in any case.

    Raises TrainingError, with the `remedy`, where the compiler fails, or the function needs more than
    `MOST_VERSIONS` versions. With more, torch would run it uncompiled for ever, and only warn: slow blocks, or attention whose scores fill the memory.

    Where a signal has ended the C++ compiler, the function is called once more, from its beginning. So it is where torch's cache has a library that
    a killed process left unfinished, which is removed.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    compiled = torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        while _put_off:  # here, because a module may be imported after this function was made
            _put_off.pop()()
        if not config.fail_on_recompile_limit_hit:  # in torch 2.13, each thread has settings of its own
            config.recompile_limit, config.fail_on_recompile_limit_hit = MOST_VERSIONS, True
            # A model of transformers holds its cast weights in its modules while they compute. Backward need not see that again.
            config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
            # torch would compile backward when it comes to it, where nothing below would meet an error.
            torch._functorch.config.force_non_lazy_backward_lowering = True
            from torch._inductor.graph import GraphLowering

            GraphLowering.save_output_code = staticmethod(check_waits)
            if not torch.cuda.is_available():  # beside a GPU, little is compiled for the CPU
                look_at_the_cpu(remedy)
        if config.optimize_ddp != cuts_for_ddp:
            config.optimize_ddp = cuts_for_ddp
        try:
            return _called(compiled, args, named)
        except FailOnRecompileLimitHit as error:
            raise TrainingError(
                f"{function.__qualname__} needs more than {MOST_VERSIONS} compiled versions, for the reasons that torch has just logged; {remedy}"
            ) from error
        except TorchDynamoException as error:
            if (folder := _full_folder(error)) is not None:
                raise TrainingError(
                    f"torch's compiler finds no room for its files in {folder}; make room there, or set TORCHINDUCTOR_CACHE_DIR to another folder"
                ) from error
            raise TrainingError(
                f"torch's compiler fails at {function.__qualname__} ({_reason_of(error)}); {_remedy_of_folders()}{remedy}"
            ) from error

    return call


def _called(compiled: Callable, args: tuple, named: dict[str, Any]) -> Any:
    """What it returns. It is called again where what went wrong is no fault of the program's."""
    from torch._dynamo.exc import TorchDynamoException

    once_more = True
    while True:
        try:
            return compiled(*args, **named)
        except TorchDynamoException as error:
            torn = _torn_library(error)
            if torn is None or not _removed_as_old(torn):
                if not once_more or (torn is None and not _was_killed(error)):
                    raise
                once_more = False
            from torch._inductor.utils import clear_caches

            clear_caches()  # which keep what has failed


@functools.cache
def look_at_the_cpu(remedy: str) -> None:
    """Let torch find out which vector instructions the CPU has. It compiles a small program for each. A signal to all processes of a run may end that
    compiler. Then torch would believe, as long as the process lives, that the CPU lacks them. So these programs get no signal.

    Raises TrainingError, with the `remedy`, where there is no C++ compiler, or no folder for what it makes.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.exc import InvalidCxxCompiler

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # which the programs inherit
    try:
        pick_vec_isa()
    except InvalidCxxCompiler as error:
        raise TrainingError(
            f"torch's compiler needs a C++ compiler, and {os.environ.get('CXX', 'g++')} does not work here; install g++, name another by the "
            f"variable CXX, or {remedy}"
        ) from error
    except OSError as error:
        raise TrainingError(f"{needs_folder(error)}, or {remedy}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def needs_folder(error: OSError) -> str:
    """What to say where torch cannot write the files of its compiler."""
    return f"torch has no folder for its compiler's files ({error}); set TORCHINDUCTOR_CACHE_DIR to one that can be written"


def _remedy_of_folders() -> str:
    """What to do if the C++ compiler cannot work in torch's folders: torch passes their names without quotes."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folders = {"TMPDIR": tempfile.gettempdir(), "TORCHINDUCTOR_CACHE_DIR": cache_dir()}
    named = [f"{variable} (now {folder})" for variable, folder in folders.items() if re.search(r"[\s'\"\\]", folder)]
    return f"set {' and '.join(named)} to a folder without spaces and quotation marks in its name, or " if named else ""


def _full_folder(error: BaseException) -> str | None:
    """The folder of the compiler's files, if a full disk is why it failed. A linker may end without a word of that."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = cache_dir()
    with contextlib.suppress(OSError):
        if os.strerror(errno.ENOSPC) in str(error) or shutil.disk_usage(folder).free < _LEAST_ROOM:
            return folder
    return None


def _reason_of(error: BaseException) -> str:
    """What a compiler's error begins with, and the line in which a C++ compiler says what is wrong."""
    said, _, printed = str(error).partition("\n\nSet TORCH")[0].partition("\n\nOutput:\n")
    lines = printed.strip().splitlines()
    line = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
    return ": ".join(clipped(text, 300) for text in (said.partition("\n\n")[0], line) if text)


def _torn_library(error: BaseException) -> Path | None:
    """The library in torch's cache that cannot be loaded because it is not whole."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cause = getattr(error, "inner_exception", error)
    found = (
        re.match(r"(.+\.so): (file too short|invalid ELF header)", str(cause))
        if isinstance(cause, (ImportError, OSError))
        else None
    )
    return Path(found[1]) if found and real(Path(found[1])).is_relative_to(real(Path(cache_dir()))) else None


def _removed_as_old(library: Path) -> bool:
    """Remove it if it is older than this process. Whether it is gone; another rank may have removed it.

    The C++ compiler writes a library under its final name. A process that was killed meanwhile would make each later start fail, but a new library may
    be one that another process is writing.
    """
    with contextlib.suppress(FileNotFoundError):
        if library.stat().st_mtime > _STARTED:
            return False
        library.unlink()
        log.warning("removed %s, which a process left unfinished that was killed while it compiled", library)
    return True


def _was_killed(error: BaseException) -> bool:
    """Whether a signal ended the C++ compiler. One that asks the run to stop meets all its processes, and the run has a step to complete."""
    cause = getattr(error, "inner_exception", error).__cause__
    return isinstance(cause, subprocess.CalledProcessError) and cause.returncode < 0


# ---- the order of collectives: Inductor of torch 2.13 has put a fused kernel between a reduce-scatter and its wait, and read what lay in the memory ----

_COLLECTIVE = re.compile(r"\s+(?:(\w+) = )?torch\.ops\._c10d_functional\.(\w+)\.default\((\w+)")
_ALIAS = re.compile(r"\s+(\w+) = (?:reinterpret_tensor\()?(\w+)(?:\[\d+\]|,.*\))?(?:; del \w+)?(?:\s*#.*)?$")
_NO_USE = re.compile(r"\s*(#|del |assert_)")


def check_waits(code: str) -> None:
    """Raise RuntimeError if code of Inductor uses what a collective makes before its `wait_tensor`. `code`: the Python code that calls the kernels."""
    pending: dict[str, str] = {}
    """Collectives by the name of the tensor that they make."""
    names: dict[str, str] = {}
    for line in code.splitlines():
        if re.match(r"\s*(def|class) ", line):
            pending, names = {}, {}
        if _NO_USE.match(line):
            continue
        if found := _COLLECTIVE.match(line):
            result, kind, sent = found.groups()
            if kind == "wait_tensor":
                pending.pop(names.get(sent, sent), None)
                continue
            _refuse_used(line[found.start(3) :], pending, names)
            # One that ends with _ changes the tensor that it is given.
            pending[names.get(sent, sent) if kind.endswith("_") else result] = kind
        elif found := _ALIAS.match(line):
            names[found[1]] = names.get(found[2], found[2])
        elif pending:
            _refuse_used(line, pending, names)


def _refuse_used(text: str, pending: dict[str, str], names: dict[str, str]) -> None:
    for word in re.findall(r"\w+", text):
        if (name := names.get(word, word)) in pending:
            raise RuntimeError(f"its code would use the result of {pending[name]} before that has arrived")
