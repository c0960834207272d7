"""The programs and tokenizers that these tests share. All of them are slow."""

from __future__ import annotations

import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from hard_texts import real_texts

sys.path += [
    str(Path(__file__).parent),
    str(Path(__file__).resolve().parents[1] / "models"),
]  # parity: the configurations of every family

from other_programs import CACHE, LLAMA_CPP_PYTHON, TOKENIZERS, LlamaCpp, build_llama_cpp, download, environment, made_once  # noqa: E402

from pretrain.data.tokenizers.tokenizer_training import train_tokenizer  # noqa: E402


@pytest.fixture(scope="session")
def transformers_4() -> Path:
    """A Python with transformers 4."""
    return environment("transformers-4", "transformers==4.57.6")


@pytest.fixture(scope="session")
def evaluation() -> Path:
    """A Python with lm-evaluation-harness."""
    return environment("lm-eval", "lm_eval[hf]==0.4.13")


@pytest.fixture(scope="session")
def llama_cpp() -> LlamaCpp:
    """llama.cpp as llama-cpp-python's source package has it: its converter, and its library built from source."""
    with made_once("llama.cpp") as folder:
        if folder is not None:
            download(LLAMA_CPP_PYTHON, folder, wheel=False)
            [archive] = folder.glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
            archive.unlink()
            [package] = folder.glob("llama_cpp_python-*")
            package.rename(folder / "package")
            build_llama_cpp(folder / "package" / "vendor" / "llama.cpp", folder / "built")
    folder = CACHE / "llama.cpp"
    return LlamaCpp(folder / "package" / "vendor" / "llama.cpp", folder / "package" / "llama_cpp", folder / "built" / "bin")


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory) -> dict[str, Path]:
    """Tokenizers of every type, trained on real texts where they are at hand, and on Python's sources."""
    folder = tmp_path_factory.mktemp("tokenizers")
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    texts = [*real_texts(), *(path.read_text(encoding="utf-8", errors="ignore") for path in library)]
    (folder / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    for kind, size in TOKENIZERS.items():
        special = ["<|fim_prefix|>"] if kind in ("bpe", "byte_bpe") else []
        train_tokenizer([str(folder / "text.txt")], folder / kind, kind, size, special_tokens=special)
    return {kind: folder / kind for kind in TOKENIZERS}
