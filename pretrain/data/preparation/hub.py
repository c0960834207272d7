"""The files of a Hugging Face dataset: by name (downloaded here, and only here), or in a directory.

NAME                       downloaded into the cache of `datasets`, as Arrow files
a `save_to_disk` directory its Arrow files, as they are
any other directory        the files that `datasets` would take for the split: Parquet, Arrow, JSON lines, text
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pretrain.data.preparation.inputs import InputFile
from pretrain.errors import DataError


def dataset_files(
    dataset: str, config: str | None = None, split: str = "train", revision: str | None = None
) -> list[InputFile]:
    """The files of one split, in the order of its rows; named `dataset` and then their place in it.

    `revision`: a branch, tag or commit of a dataset on the Hub.

    Raises DataError when there is no such dataset, configuration or split, or when the rows are not files as they are.
    """
    import datasets

    if int(datasets.__version__.split(".")[0]) < 4 or dataset == "pandas":
        raise DataError(f"{dataset}: may execute code that comes with the data; use datasets >= 4, and not its pandas reader")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are ours to report, in one line
    if os.path.isdir(dataset):
        if revision is not None:
            raise DataError(f"{dataset}: is a directory and has no revision {revision}; leave the revision out")
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # otherwise even local files call a server
        saved = any(Path(dataset, name).is_file() for name in ("state.json", "dataset_dict.json"))
        paths = _saved(dataset, config, split) if saved else _resolved(dataset, config, split)
        return [InputFile.found_at(path, os.path.join(dataset, os.path.relpath(path, dataset))) for path in paths]
    try:
        loaded = datasets.load_dataset(dataset, config, split=split, revision=revision)
    except Exception as error:  # the library raises a great many kinds
        raise DataError(f"{dataset}: cannot be loaded ({_line(error)}); check the name and the network") from error
    paths = _files_of(loaded, dataset)
    label = "/".join(filter(None, (dataset, config, split)))
    # The cache is addressed by content; the time at which a machine downloaded it means nothing to the others.
    return [InputFile.found_at(path, f"{label}/{Path(path).name}", check_time=False) for path in paths]


def _saved(dataset: str, config: str | None, split: str) -> list[str]:
    import datasets

    if config:
        raise DataError(f"{dataset}: was saved to disk and has no configurations; leave out --dataset-config")
    try:
        loaded = datasets.load_from_disk(dataset)
    except Exception as error:  # the library raises a great many kinds
        raise DataError(f"{dataset}: cannot be read ({_line(error)})") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"{dataset}: no split {split!r}; name one of {', '.join(loaded)} with --dataset-split")
        loaded = loaded[split]
    return _files_of(loaded, dataset)


def _files_of(loaded: Any, dataset: str) -> list[str]:
    paths = [entry["filename"] for entry in loaded.cache_files]
    if not paths or loaded._indices is not None:
        raise DataError(f"{dataset}: its rows are not those of its files in their order; save it anew with save_to_disk")
    return paths


def _resolved(dataset: str, config: str | None, split: str) -> list[str]:
    import datasets

    try:
        builder = datasets.load_dataset_builder(os.path.abspath(dataset), config)
    except Exception as error:  # the library raises a great many kinds
        raise DataError(f"{dataset}: cannot be read as a dataset ({_line(error)})") from error
    files = builder.config.data_files or {}
    if split not in files:
        raise DataError(f"{dataset}: no split {split!r}; name one of {', '.join(files)} with --dataset-split")
    return list(files[split])


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
