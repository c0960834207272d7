"""Versions of the packages that the benchmarks measure or compare with. It imports nothing that another environment might lack."""

import importlib.metadata

_PACKAGES = (
    "numpy", "torch", "tokenizers", "tiktoken", "sentencepiece", "datasets", "transformers", "accelerate", "litgpt", "lightning",
)  # fmt: skip


def versions() -> dict[str, str]:
    """By package, of those that this process's environment has."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
