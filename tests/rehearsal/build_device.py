"""Compile the pretended device against the installed torch; the path of the library is printed. Some 10 seconds, once for each version."""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "pretended_device.cpp"


def build(folder: Path) -> Path:
    """The library in this folder. Raises CalledProcessError with the compiler's words on stderr."""
    torch = Path(str(importlib.metadata.distribution("torch").locate_file("torch")))
    told = importlib.metadata.version("torch") + hashlib.sha256(SOURCE.read_bytes() + str(torch).encode()).hexdigest()[:16]
    library = folder / f"device-{told}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        link = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{torch / 'lib'}"]
        compiler = [os.environ.get("CXX", "g++"), "-O0", "-std=c++20", "-fPIC", "-shared"]
        subprocess.run([*compiler, str(SOURCE), *include, *link, "-o", str(unfinished)], check=True, stdout=sys.stderr)
        unfinished.rename(library)
    return library


if __name__ == "__main__":
    try:
        print(build(Path(sys.argv[1]).resolve()))
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"error: the pretended device cannot be compiled ({error}); a rehearsal needs g++ (or CXX) and a folder that can be written"
        )
