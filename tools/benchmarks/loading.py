"""Speed of the loader, and of the start."""

from __future__ import annotations

import cProfile
import itertools
import json
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.corpora import byte_tokenizer, link_shards, write_tokens
from benchmarks.measure import MILLION, TOOLS, Options, Row, Turns, environment, in_turns, rate_row, require, resident_bytes

import pretrain
from pretrain.data.order import Mixture, Stage
from pretrain.data.packing import open_index
from pretrain.data.samples import Packed, Samples, Windows
from pretrain.data.shards.reader import PreparedData
from pretrain.data.stream import BatchSchedule, Shuffle, Stream
from pretrain.data.tasks import NextToken
from pretrain.data.training_data import Loader, SampleBatch

BATCH_TOKENS = 1 << 19
SHARD_COUNTS = (16, 1_000, 10_000)


def _stream_of(samples: Samples) -> Stream:
    return Stream([samples], Mixture([Stage(None, (1.0,))], [len(samples)], [None], 0), Shuffle(0, None))


def _loader(data: PreparedData, packing: str, length: int, mask: bool, work: Path) -> Loader:
    samples: Samples = Windows("data", data, length)
    if packing == "best_fit":
        samples = Packed("data", data, length, open_index(data, "best_fit", length, work))
    objective = NextToken(data.eod_id if mask else None)
    return Loader(_stream_of(samples), BatchSchedule(max(1, BATCH_TOKENS // length)), 0, 1, 0, objective)


def loader(options: Options) -> list[Row]:
    """Tokens per second of one process from the page cache, for each packing, with and without document masks."""
    size = options.scaled(128 << 20, 1 << 20)
    options.say(f"loader: writing {2 * size / MILLION:.0f} MB of tokens")
    path = write_tokens(options.work / "loader", byte_tokenizer(options.work), size, max(1 << 16, size // 16))
    data = PreparedData.open(path)
    data.verify()  # also loads it into the page cache
    raw = data.read(0, BATCH_TOKENS + 1).astype(np.uint16)
    rows = []
    for length in (1024, 2048, 8192):
        options.say(f"loader: sequences of {length}")
        kinds = list(itertools.product(("concatenate", "best_fit"), (False, True)))
        loaders = {_kind(*kind): _loader(data, kind[0], length, kind[1], options.work) for kind in kinds}
        _check_batches(loaders)
        batches = {name: one.batches(0) for name, one in loaders.items()}
        functions: dict[str, Callable[[], object]] = {name: partial(next, batch) for name, batch in batches.items()}
        functions["numpy"] = lambda: (raw[:-1].astype(np.int64), raw[1:].astype(np.int64))
        turns = in_turns(functions, options)
        baseline = turns.pop("numpy").rate(BATCH_TOKENS / MILLION)[0]
        for name, its in turns.items():
            note = f"{_profile(loaders[name])}; baseline: numpy converts as many tokens twice"
            rows.append(_speed("loader", f"sequences of {length}, {name}", its, baseline=baseline, note=note))
    return rows


def shards(options: Options) -> list[Row]:
    """Tokens per second of one process by the number of shards: random reads of the same bytes, from few files and from many."""
    size = options.scaled(128 << 20, 1 << 20)
    counts = dict.fromkeys(options.scaled(count, number) for number, count in enumerate(SHARD_COUNTS, 16))
    first: dict[int, float] = {}
    functions: dict[int, Callable[[], object]] = {}
    original = write_tokens(options.work / "shards", byte_tokenizer(options.work), size, size // 16)
    for count in counts:
        options.say(f"shards: making {count:,}")
        data = PreparedData.open(link_shards(original, options.work / f"shards-{count}", count))
        first[count] = _timed(lambda data=data: _read_each(data), time.process_time) / count
        functions[count] = partial(next, _loader(data, "concatenate", 2048, False, options.work).batches(0))
    turns = in_turns(functions, options)
    note = "random reads of the same bytes, from the page cache"
    rows = [_speed("shards", f"{count:,} shards: sequences of 2048, concatenate", its, note=note) for count, its in turns.items()]
    for count, seconds in first.items():
        rows.append(Row("shards", f"{count:,} shards: first read of each", MILLION * seconds, "us", "cpu", note="opens it"))
    return rows


def _speed(part: str, name: str, turns: Turns, **more: Any) -> Row:
    """A row of the tokens per second of one process, whose turns have `BATCH_TOKENS` each."""
    return rate_row(part, name, turns, BATCH_TOKENS / MILLION, "M tokens/s/process", "cpu", target=100.0, **more)


def _read_each(data: PreparedData) -> None:
    """Read a sequence from the beginning of every shard."""
    begin = 0
    for shard in data.manifest.shards:
        data.read(begin, min(2048, shard.tokens))
        begin += shard.tokens


def _kind(packing: str, mask: bool) -> str:
    return f"{packing}{', document mask' if mask else ''}"


def _check_batches(loaders: dict[str, Loader]) -> None:
    """Check that a mask changes no token, and that the tokens are those of the files."""
    for packing in ("concatenate", "best_fit"):
        plain, masked = (loaders[_kind(packing, mask)].read(0) for mask in (False, True))
        require(plain.digest == masked.digest, f"{packing}: other tokens under a document mask")
        require(_is_as_stored(plain, loaders[_kind(packing, False)].stream), f"{packing}: other tokens than in the files")


def _is_as_stored(batch: SampleBatch, stream: Stream) -> bool:
    samples, data = stream.locate(batch.positions[:4])[1], stream.sources[0].data
    for row, sample in enumerate(samples.tolist()):
        stored = np.concatenate([data.read(start, size) for start, size in stream.sources[0].pieces(sample)])
        if not np.array_equal(batch.inputs["tokens_BT"][row, : len(stored)].numpy(), stored):
            return False
    return True


def _profile(one: Loader, batches: int = 8) -> str:
    """How a loader spends its time, in shares, by a profiler."""
    iterator, profiler = one.batches(0), cProfile.Profile()
    next(iterator)
    profiler.enable()
    for _ in range(batches):
        next(iterator)
    profiler.disable()
    package = str(Path(pretrain.__file__).parent)
    spent = {name: values[3] for (file, _, name), values in pstats.Stats(profiler).stats.items() if file.startswith(package)}
    shares = {
        "reading and converting": spent["read_joined"],
        "laying out": spent["fill"] - spent["read_joined"],
        "order": spent["locate"],
        "digest": spent["digest"],
        "documents": spent.get("documents_of", 0.0),
    }
    shares["rest"] = spent["read_ahead"] - sum(shares.values())
    return ", ".join(f"{name} {seconds / spent['read_ahead']:.0%}" for name, seconds in shares.items())


# ---- the start --------------------------------------------------------------------------------------------------------


def start(options: Options) -> list[Row]:
    """From a directory of 10^4 shards to the first batch, in a separate process, and the memory that this takes."""
    shards = options.scaled(10_000, 10)
    options.say(f"start: making {shards:,} shards")
    path = options.work / "start"
    link_shards(write_tokens(options.work / "one_shard", byte_tokenizer(options.work), 1 << 20, 1 << 21), path, shards)
    begin, runs = time.monotonic(), []
    while len(runs) < options.turns or time.monotonic() - begin < options.seconds:
        start = f"from benchmarks.loading import measure_start; measure_start({str(path)!r})"
        typed = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TOOLS)!r}); {start}"]
        done = subprocess.run(typed, capture_output=True, text=True, check=True, env=environment())
        runs.append(json.loads(done.stdout))

    def row(name: str, key: str, target: float, beside: str, note: str) -> Row:
        values, baseline = sorted(run[key] for run in runs), min(run[beside] for run in runs)
        return Row("start", f"{shards:,} shards: {name}", values[0], "s", "wall", values[len(values) // 2], target, "lower", baseline, note)

    opening, before = (max(run[name] for run in runs) / MILLION for name in ("memory", "before"))
    note = f"of {before:.0f} MB with what is imported"
    json_alone = "baseline: the standard library alone parses its JSON and asks for the sizes of the files"
    by_numpy = "baseline: numpy reads as many windows from as many files"
    return [
        row("open", "open", 2.0, "listing", json_alone),
        row("opened to first batch of 512 x 1,024 tokens", "first", 0.3, "numpy", by_numpy),
        Row("start", f"{shards:,} shards: memory that opening takes", opening, "MB", better="lower", note=note),
    ]


def measure_start(path: str) -> None:
    """Print as JSON the seconds and the bytes of memory that the start took in this process."""
    before, begin = resident_bytes(), time.perf_counter()
    data = PreparedData.open(path)
    opened = time.perf_counter()
    after = resident_bytes()
    samples = Windows("data", data, 1024)
    batches = Loader(_stream_of(samples), BatchSchedule(BATCH_TOKENS // 1024), 0, 1, 0).batches(0)
    next(batches)
    first = time.perf_counter()
    listing = _timed(lambda: _list_files(Path(path)))
    numpy_reads = _timed(lambda: _read_files(data))
    seconds = {"open": opened - begin, "first": first - opened, "listing": listing, "numpy": numpy_reads}
    print(json.dumps({**seconds, "before": before, "memory": after - before}))


def _timed(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    function()
    return clock() - begin


def _list_files(path: Path) -> None:
    for shard in json.loads((path / "manifest.json").read_bytes())["shards"]:
        for key, name in shard.items():
            if key.endswith("file"):
                (path / name).stat()


def _read_files(data: PreparedData) -> None:
    for shard in data.manifest.shards[: BATCH_TOKENS // 1024]:
        np.memmap(data.path / shard.file, dtype=data.dtype, mode="r")[:1025].astype(np.int64)
