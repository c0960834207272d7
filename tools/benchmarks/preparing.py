"""Speed and memory of preparing text, beside the tokenizers' own libraries and other common programs.

Rates are megabytes (10^6) of text as UTF-8. With one process they are per CPU second, so per core.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from benchmarks.measure import MILLION, ROOT, Options, Row, Turns, environment, in_turns, rate_row, require

from pretrain.data.preparation.prepare import prepare
from pretrain.data.shards.reader import PreparedData
from pretrain.data.tokenizers.engine import choose_engine, ranks_of, split_pattern
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer

_BYTES = 40 * 10**6
_PART = 5  # slow programs get every fifth document
_PIECES = 3000  # of 2 kB, for training the tokenizers
_BATCH_CHARACTERS = 1 << 19
_UNITS = 20  # of work, of about 2 MB as in any preparation of less than 512 MB
_TIMES = 20
_SAMPLE_SECONDS = 0.05
_SHARE = 90.0  # percent of the library's speed
_SPEED = 8.0  # MB/s/core


@dataclass(frozen=True)
class Corpus:
    """Documents in memory, and the same ones as JSON lines."""

    texts: list[str]
    path: Path

    @property
    def megabytes(self) -> float:
        return sum(len(text.encode()) for text in self.texts) / MILLION

    def every(self, step: int) -> Corpus:
        """Every `step`-th document."""
        return Corpus.write(self.texts[::step], self.path.with_stem(f"{self.path.stem}-every-{step}"))

    @classmethod
    def write(cls, texts: list[str], path: Path) -> Corpus:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        return cls(texts, path)


def preparation(options: Options) -> list[Row]:
    """Text to verified shards: speed beside the libraries', and memory at 1 and 20 times the input."""
    corpus = _collect(options)
    options.say(f"preparation: {len(corpus.texts):,} documents, {corpus.megabytes:.1f} MB")
    rows = []
    paths = {kind: _tokenizer(kind, corpus, options) for kind in ("byte_bpe", "bpe")}
    for kind, path in paths.items():
        rows += _speed(kind, path, corpus, options)
    return rows + _memory(paths["byte_bpe"], corpus, options)


def _collect(options: Options) -> Corpus:
    folders = (sysconfig.get_paths()[name] for name in ("stdlib", "purelib"))
    patterns = options.source or tuple(str(Path(folder) / "**" / "*.py") for folder in folders)
    texts, size, most = [], 0, options.scaled(_BYTES, 200_000)
    files = {file for pattern in patterns for file in glob.glob(pattern, recursive=True) if os.path.isfile(file)}
    for file in sorted(files):
        content = Path(file).read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text and not text.isspace() and size + len(content) <= most:
            texts.append(text)
            size += len(content)
    require(bool(texts), f"no text in {', '.join(patterns)}")
    return Corpus.write(texts, options.work / "corpus.jsonl")


def _tokenizer(kind: str, corpus: Corpus, options: Options) -> Path:
    path, size = options.work / kind, 16384 if options.scale > 0.5 else 400
    options.say(f"preparation: training a {kind} tokenizer of {size:,} tokens")
    train_tokenizer([str(corpus.path)], path, kind, size, sample_pieces=options.scaled(_PIECES, 50))
    return path


# ---- speed ------------------------------------------------------------------------------------------------------------


def _speed(kind: str, path: Path, corpus: Corpus, options: Options) -> list[Row]:
    name = {"byte_bpe": "byte-level BPE", "bpe": "SentencePiece BPE"}[kind]
    part, cores = corpus.every(_PART), options.cores
    begin = time.process_time()
    tokenizer = choose_engine(path, corpus.texts)
    proof = time.process_time() - begin
    library = {"byte_bpe": _tiktoken, "bpe": _sentencepiece}[kind](path)
    outputs = (options.work / "output" / f"{kind}-{number}" for number in itertools.count())
    _check_ids(path, part, _prepare(part, path, 1, next(outputs)))
    options.say(f"preparation: {name} on one core")
    alone = in_turns(
        {
            "library": partial(library, corpus.texts, 1),
            "engine": partial(_encode_in_batches, tokenizer, corpus.texts),
            "whole": lambda: _prepare(corpus, path, 1, next(outputs)),
            "part": lambda: _prepare(part, path, 1, next(outputs)),
        },
        options,
    )
    options.say(f"preparation: {name}, other programs")
    others = in_turns(_others(kind, path, part, options.work), options)
    options.say(f"preparation: {name} on {cores} cores")
    together = in_turns(
        {
            "library": partial(library, corpus.texts, cores),
            "whole": lambda: _prepare(corpus, path, cores, next(outputs)),
            "part": lambda: _prepare(part, path, cores, next(outputs)),
        },
        options,
        time.monotonic,
    )
    shutil.rmtree(options.work / "output")
    rows = _rows(name, alone, "cpu", "MB/s/core", corpus, part)
    rows += [
        Row("preparation", f"{name}: choosing and proving the engine, once", proof, "s", "cpu", better="lower"),
        *(
            rate_row("preparation", f"{name}: {other}", turns, part.megabytes, "MB/s/core", "cpu")
            for other, turns in others.items()
        ),
        *_rows(f"{name}, {cores} processes", together, "wall", "MB/s", corpus, part),
    ]
    return rows


def _rows(name: str, turns: dict[str, Turns], clock: Any, unit: str, corpus: Corpus, part: Corpus) -> list[Row]:
    size, least = corpus.megabytes, part.megabytes
    library = turns["library"].rate(size)
    # Start-up and the engine's proof cost the same at both sizes, so a further megabyte shows the speed of a large corpus. The
    # proof reads no more of a large corpus than of 128 MB.
    whole, begin = turns["whole"], turns["part"]
    best = (size - least) / max(whole.best - begin.best, 1e-9)
    median = (size - least) / max(whole.median - begin.median, 1e-9)
    target = _SPEED if unit == "MB/s/core" and "byte" in name else None
    made: dict[str, Any] = {"baseline": library[0], "note": "baseline: the library's batch encode of the same texts"}
    rate = (f"{name}: text to verified shards, per further MB", best, unit, clock, median, target)
    shares = (100 * best / library[0], "%", clock, 100 * median / library[1])
    share = (f"{name}: the same, share of the library's batch encode", *shares)
    alone = f"{100 * best / turns['engine'].rate(size)[0]:.0f}% of encoding alone" if "engine" in turns else ""
    rows = [
        rate_row(
            "preparation", f"{name}: text to verified shards, {size:.0f} MB", whole, size, unit, clock, target=target, **made
        ),
        Row("preparation", *rate, baseline=library[0], note="without the start and the proof of the engine, which do not grow"),
        Row("preparation", *share, target=_SHARE, note=alone),
    ]
    if "engine" in turns:
        rows.append(rate_row("preparation", f"{name}: encoding alone", turns["engine"], size, unit, clock, **made))
    return rows


def _prepare(corpus: Corpus, tokenizer: Path, workers: int, output: Path) -> Path:
    """Prepare and read back: every hash is compared."""
    # The number of units does not depend on the size. So the engine's proof, which reads a sample of each, costs the same.
    prepare([str(corpus.path)], tokenizer, output, workers=workers, unit_bytes=corpus.path.stat().st_size // _UNITS)
    PreparedData.open(output).verify()
    return output


def _check_ids(path: Path, corpus: Corpus, prepared: Path) -> None:
    """Check that the shards hold the ids that the tokenizer's own library gives for each document."""
    data, library = PreparedData.open(prepared), load_tokenizer(path)
    require(data.documents == len(corpus.texts), f"{data.documents:,} documents were prepared of {len(corpus.texts):,}")
    for number, text in enumerate(corpus.texts):
        start, end = data.document_span(number)
        expected = [*library.encode(text), library.eod_id]
        require(np.array_equal(data.read(start, end - start), expected), f"document {number + 1} has other ids in {prepared}")


def _encode_in_batches(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            tokenizer.encode_arrays(batch)
            batch, size = [], 0
    tokenizer.encode_arrays(batch)


# ---- other programs ---------------------------------------------------------------------------------------------------


def _tiktoken(path: Path) -> Callable[[Sequence[str], int], object]:
    import tiktoken

    specification = json.loads((path / "tokenizer.json").read_bytes())
    ranks, _ = ranks_of(specification)
    encoding = tiktoken.Encoding("bench", pat_str=split_pattern(specification), mergeable_ranks=ranks, special_tokens={})
    return lambda texts, threads: encoding.encode_ordinary_batch(texts, num_threads=threads)


def _sentencepiece(path: Path) -> Callable[[Sequence[str], int], object]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    return lambda texts, threads: processor.encode(texts, out_type=int, num_threads=threads)


def _others(kind: str, path: Path, part: Corpus, work: Path) -> dict[str, Callable[[], object]]:
    if kind == "bpe":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
        return {"a loop over sentencepiece's encode": lambda: [processor.encode(text) for text in part.texts]}
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    return {
        "tokenizers' encode_batch_fast": lambda: library.encode_batch_fast(part.texts, add_special_tokens=False),
        "datasets.map with a fast tokenizer": _datasets_map(path, part, work),
    }


def _datasets_map(path: Path, part: Corpus, work: Path) -> Callable[[], object]:
    import datasets
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    datasets.disable_progress_bars()
    cache = work / "datasets"
    loaded = datasets.load_dataset("json", data_files=str(part.path), split="train", cache_dir=str(cache))
    numbers = itertools.count()

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": tokenizer(rows["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]}

    def run() -> None:
        name = f"bench-{next(numbers)}"  # else a turn would find the result of the one before
        file = str(cache / f"{name}.arrow")
        loaded.map(encode, batched=True, remove_columns=["text"], new_fingerprint=name, cache_file_name=file)

    return run


# ---- memory -----------------------------------------------------------------------------------------------------------


def _memory(tokenizer: Path, corpus: Corpus, options: Options) -> list[Row]:
    """Memory for the corpus once and for many copies of it. Each file is the whole corpus."""
    times, peaks = options.scaled(_TIMES, 2), []
    for copies in (1, times):
        options.say(f"preparation: memory at {copies} x {corpus.megabytes:.1f} MB")
        folder = options.work / f"copies-{copies}"
        folder.mkdir()
        for number in range(copies):
            os.link(corpus.path, folder / f"{number:03d}.jsonl")
        peaks.append(_peak_memory(folder, tokenizer, options.work / f"prepared-{copies}", options.cores) / MILLION)
        shutil.rmtree(options.work / f"prepared-{copies}")
    once, more = peaks
    first = f"peak memory, {options.cores} processes, {corpus.megabytes:.0f} MB of text"
    note, of_more = "resident memory of all processes added up; shared memory counts in each", {"baseline": once, "note": "baseline: the text once"}
    return [
        Row("preparation", first, once, "MB", better="lower", note=note),
        Row("preparation", f"peak memory at {times} times the text", more, "MB", target=1.1 * once, better="lower", **of_more),
    ]


def _peak_memory(folder: Path, tokenizer: Path, output: Path, workers: int) -> int:
    typed = [sys.executable, str(ROOT / "tools" / "prepare_data.py"), "--input", f"{folder}/*.jsonl"]
    typed += ["--tokenizer", str(tokenizer), "--output", str(output), "--workers", str(workers)]
    with open(output.with_suffix(".log"), "w+", encoding="utf-8") as log:
        process = subprocess.Popen(typed, stdout=log, stderr=log, env=environment())
        peak = 0
        while process.poll() is None:
            peak = max(peak, _resident_of_tree(process.pid))
            time.sleep(_SAMPLE_SECONDS)
        log.seek(0)
        require(process.returncode == 0, f"preparing fails: {' '.join(log.read().splitlines()[-1:])}")
    return peak


def _resident_of_tree(root: int) -> int:
    """Resident bytes of a process and of all its descendants."""
    size = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                size += one.memory_info().rss
    return size
