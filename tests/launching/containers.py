"""Images built and run by buildah, which needs no daemon. Its `chroot` isolation works where namespaces of a container do not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BASE = "localhost/python"
RELEASE = "bookworm"
"""Debian's release under our base image; its Python is 3.11."""


class Images:
    """Images in a storage of their own below `folder`."""

    def __init__(self, folder: Path) -> None:
        missing = [name for name in ("buildah", "debootstrap", "unshare") if shutil.which(name, path=SYSTEM_PATH) is None]
        if missing or os.geteuid() != 0:
            needed = "apt install --no-install-recommends buildah debootstrap"
            pytest.skip(f"needs root and {', '.join(missing or ['buildah'])} (Debian: {needed})")
        self.folder = folder

    def buildah(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.command(*words), capture_output=True, text=True, env=environment())
        if check and done.returncode:
            output = (done.stdout + done.stderr).splitlines()
            raise AssertionError(f"buildah {' '.join(map(str, words))}:\n" + "\n".join(output[-60:]))
        return done

    def command(self, *words: object) -> list[str]:
        storage = ("--storage-driver", "vfs", "--root", self.folder / "root", "--runroot", self.folder / "run")
        return [str(word) for word in ("buildah", *storage, *words)]

    def make_base(self, tag: str) -> None:
        """Debian with what the official image of Python has: `python` and `pip` in /usr/local, and the headers that compilers need."""
        container = self.buildah("from", "scratch").stdout.strip()
        root = self.buildah("mount", container).stdout.strip()
        # debootstrap mounts /proc there; in a namespace of its own no mount outlives it.
        made = ["unshare", "--mount", "debootstrap", "--variant=minbase", "--include=python3-venv,python3-dev", RELEASE, root]
        done = subprocess.run(made, capture_output=True, text=True, env=environment())
        if done.returncode:
            pytest.skip(f"Debian {RELEASE} cannot be had: {(done.stdout + done.stderr).splitlines()[-1]}")
        # A virtual environment has `pip` and `python` as the official image does.
        self.buildah("run", "--isolation", "chroot", container, "--", "python3", "-m", "venv", "/usr/local")
        write_pip_configuration(Path(root) / "etc" / "pip.conf")
        self.buildah("umount", container)
        self.buildah("commit", "--rm", container, f"{BASE}:{tag}")

    def build(self, file: Path, context: Path) -> str:
        """What `docker build -f FILE -t pretrain CONTEXT` does."""
        mounts = [word for path in pip_folders() for word in ("--volume", f"{path}:{path}:ro")]
        words = ("--isolation", "chroot", "--pull-never", *mounts, "-f", file, "-t", "pretrain", context)
        return self.buildah("bud", *words).stdout

    def configuration(self) -> dict[str, Any]:
        """What the image says of itself, as the OCI's specification of images has it."""
        return json.loads(self.buildah("inspect", "--type", "image", "localhost/pretrain").stdout)["OCIv1"]["config"]

    def container(self) -> str:
        """A container of the image, which is a copy of gigabytes."""
        return self.buildah("from", "--pull-never", "localhost/pretrain").stdout.strip()

    def run_words(
        self, container: str, words: list[str], mounts: dict[str, Path], variables: dict[str, str] | None = None
    ) -> list[str]:
        """The command that runs `words` in a container. `mounts`: folders of this host, by their place in the container."""
        options = [word for place, path in mounts.items() for word in ("--volume", f"{path}:{place}")]
        options += [word for name, value in (variables or {}).items() for word in ("--env", f"{name}={value}")]
        options += ["--env", "PYTHONDONTWRITEBYTECODE=1"]  # a test looks for files that are in the image already
        return self.command("run", "--isolation", "chroot", *options, container, "--", *words)

    def close(self) -> None:
        self.buildah("rm", "--all", check=False)
        inside = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {self.folder}" in line]
        assert not inside, f"something is still mounted: {inside}"  # what is mounted there would be deleted as well
        shutil.rmtree(self.folder)


SYSTEM_PATH = f"/usr/local/sbin:/usr/sbin:/sbin:{os.environ['PATH']}"


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": SYSTEM_PATH}


# ---- pip, as this host has it ---------------------------------------------------------------------------------------------------


def pip_settings() -> dict[str, str]:
    """pip's options of this host, by name; what comes later overrules."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(\S+)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    return {name: value for section, name, value in sorted(found, key=lambda one: one[0] == ":env:")}


def write_pip_configuration(file: Path) -> None:
    file.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in pip_settings().items())]) + "\n")


def pip_folders() -> list[Path]:
    """Folders of this host that pip's options name."""
    found = set()
    for word in " ".join(pip_settings().values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # An index names files beside its own folder.
            found.add(path if path.is_dir() and not word.startswith("file:") else path.parent)
    return sorted(found)
