"""Fixtures that all tests share: a small prepared data set, a small configuration, ranks that stay alive."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PET_LOG_DIR", os.devnull)  # torchrun would leave a folder in the temporary directory at each start

from launch_pool import LaunchPool
from running import run_directory, train, write_config, write_prepared
from thorough import mark_thorough

with contextlib.suppress(ImportError):  # the tests for GPUs need no hypothesis
    import hypothesis

    # What `bash tests/run.sh` takes; with --slow it is hypothesis's own 100.
    hypothesis.settings.register_profile("quick", max_examples=25)

# torch logs every save and load of a checkpoint in a failing test's report, which pushes the reason off the screen.
logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure() -> None:
    """A rehearsal of a GPU that has no GPU would skip all it was started for."""
    if "REHEARSAL_LIBRARY" in os.environ:
        import torch

        if not torch.cuda.is_available():
            pytest.exit(
                "REHEARSAL_LIBRARY is set, but PYTHONPATH lacks tests/rehearsal: start it by `bash tests/run.sh --rehearse`", 4
            )


NEEDS_NEWER_TORCH = re.compile(r"install torch 2\.13|_scaled_mm only supports per-tensor scaling")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With torch 2.11 and 2.12, what pretrain or torch refuses because of their age is skipped."""
    report = yield
    if report.failed and (reason := NEEDS_NEWER_TORCH.search(report.longreprtext)) and version("torch") < "2.13":
        report.outcome, report.longrepr = "skipped", (report.location[0], report.location[1], f"Skipped: {reason[0]}")
    return report


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is thorough, and sort.

    Files whose tests wait for processes come first: a worker that got one of them last would end long after the others.
    """
    # Other machines and selections may have other cases; what leaves the list's tests out must know each.
    complete = "not thorough" in config.option.markexpr and not any("::" in argument for argument in config.args)
    mark_thorough(items, complete)
    items.sort(key=lambda item: item.path.parent.name not in ("train", "distributed", "launching", "tests"))


@pytest.fixture(scope="session")
def pool() -> Iterator[LaunchPool]:
    """Up to 4 ranks; `pool.launch(world_size, function, *arguments)`."""
    pool = LaunchPool()
    yield pool
    pool.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread. A test may ask for another number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained_run(pool, tmp_path_factory) -> Callable[..., Path]:
    """`trained_run(world_size, config_file, *overrides)`: like `train`, for runs that a test starts from or compares with.

    Each is computed once per worker and then copied. A test that is about the run itself calls `train`.
    """
    kept: dict[tuple[int | str, ...], Path] = {}

    def trained_run(world_size: int, config_file: Path, *overrides: str) -> Path:
        run = run_directory(config_file, *overrides)
        assert not run.exists()
        # Any other path below the test's own folder makes it another run.
        config = config_file.read_text().replace(str(run.parent), "")
        key = world_size, config, *(o for o in overrides if not o.startswith("run.name="))
        if key not in kept:
            train(pool, world_size, config_file, *overrides)
            kept[key] = tmp_path_factory.mktemp("trained") / "run"
            shutil.copytree(run, kept[key])
        else:
            shutil.copytree(kept[key], run)
        return run

    return trained_run


@pytest.fixture(scope="session")
def shakespeare() -> Path:
    """A real text, where it is at hand."""
    path = SHARED_DATA / "tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip("tinyshakespeare.txt is not beside this checkout (shared/data)")
    return path


@pytest.fixture(scope="session")
def multi30k() -> dict[str, Path]:
    """English sentences, one per line, for training and validation, where they are at hand."""
    files = {name: SHARED_DATA / f"multi30k.{part}.en.gz" for name, part in (("train", "train"), ("validation", "val"))}
    if not all(file.is_file() for file in files.values()):
        pytest.skip("multi30k.*.en.gz are not beside this checkout (shared/data)")
    return files


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory) -> Path:
    """The byte-level tokenizer: 256 bytes and the end of document."""
    from pretrain.data.tokenizers.tokenizer_training import train_tokenizer

    folder = tmp_path_factory.mktemp("byte")
    (folder / "text.txt").write_text("bytes need no corpus")
    train_tokenizer([str(folder / "text.txt")], folder / "tokenizer", "byte")
    return folder / "tokenizer"


@pytest.fixture(scope="session")
def t5_tokenizer(tmp_path_factory) -> Path:
    """A tokenizer.json like T5's: a Unigram model that has its special tokens among its pieces, so that text can forge them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("t5")
    special = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
    letters = ((character, -5.0) for character in "▁abcdefghijklmnopqrstuvwxyz</>_0")
    tokenizer = Tokenizer(models.Unigram([*((token, 0.0) for token in special), *letters], unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, byte_tokenizer) -> Path:
    """60,000 tokens in 3 shards: documents of random letters with a skewed, learnable distribution."""
    return write_prepared(tmp_path_factory.mktemp("data") / "train", byte_tokenizer, seed=0, documents=300)


@pytest.fixture
def config_file(tmp_path, prepared) -> Path:
    """A configuration that trains in a second: 2 layers of 32, 16 samples of 32 tokens per step."""
    return write_config(tmp_path, prepared)
