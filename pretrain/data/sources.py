"""From the configuration to the stream of samples: prepare text, open sources, check mixture and stages, make the batch schedule.

This file does not import torch, so that tools which look at data answer at once.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pretrain.config.data_schema import Data, MixtureStage, Source, Text, ValidationSource
from pretrain.config.schema import BatchStage, Config, LengthStage
from pretrain.data.order import Mixture, Stage
from pretrain.data.packing import open_index
from pretrain.data.samples import Packed, Samples, Windows
from pretrain.data.shards.manifest import directory_name
from pretrain.data.shards.reader import Holding, PreparedData
from pretrain.data.shards.shard_cache import ShardCache, default_directory
from pretrain.data.stream import BatchSchedule, Shuffle, Stream
from pretrain.data.tasks import Objective, sentinel_ids
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity
from pretrain.errors import ConfigError, DataError
from pretrain.storage import make_once
from pretrain.transfer import is_url

log = logging.getLogger(__name__)

Opened = TypeVar("Opened")


def cache_folder(data: Data) -> Path:
    """`data.cache.dir`, or the default."""
    return default_directory() if data.cache.dir is None else Path(data.cache.dir)


def with_prepared_text(config: Config, make: bool = True) -> Config:
    """The configuration with `data.text` as a source in the cache, prepared there if it is missing and `make`. Raises ConfigError or DataError."""
    data = config.data
    if data.text == Text():
        return config
    try:
        prepared = _prepared_text(data.text, cache_folder(data), make)
    except (ConfigError, DataError) as error:
        raise type(error)(f"data.text: {_by_keys(str(error))}") from error
    sources = [Source(str(prepared), name="text")]
    return dataclasses.replace(config, data=dataclasses.replace(data, text=Text(), sources=sources))


def _by_keys(message: str) -> str:
    """A message of the preparation that names keys of the configuration in place of options. No key leaves rows out."""
    from pretrain.data.preparation.text_inputs import CORRECT_IT, LEAVE_OUT

    named = {LEAVE_OUT: CORRECT_IT, "--text-field": "data.text.text_field", "--documents": "data.text.documents"}
    named |= {f"--{option}": f"tools/prepare_data.py --{option}" for option in ("ids-dtype", "ids-field", "restart", "workers")}
    return functools.reduce(lambda said, option: said.replace(option, named[option]), named, message)


def _prepared_text(text: Text, cache: Path, make: bool) -> Path:
    """The prepared directory of a text. Its name depends on all that decides the content. With `make`, one process makes it for all."""
    from pretrain.data.preparation.inputs import dataset_files, find_inputs
    from pretrain.data.preparation.preparation_plan import PreparationPlan, Settings
    from pretrain.data.preparation.prepare import prepare
    from pretrain.data.preparation.process_pool import usable_cores
    from pretrain.data.tokenizers.tokenizer import identity_of, load_tokenizer

    if text.dataset is None:
        inputs = find_inputs(text.input)
    else:
        inputs = dataset_files(text.dataset, text.dataset_config, text.split, text.revision)
    settings = Settings(text_field=text.text_field, text_mode=text.documents)
    plan = PreparationPlan.make(settings, identity_of(load_tokenizer(text.tokenizer)), inputs)
    path = cache / "text" / plan.sha256[:24]

    def prepare_it() -> None:
        log.info("data: preparing the text of data.text into %s; later starts find it there", path)
        done = prepare(inputs, text.tokenizer, path, workers=usable_cores(), **dataclasses.asdict(settings))
        log.info("data: %s", done)

    if make:
        make_once(path, "the text of data.text", prepare_it)
    return path


def open_sources(config: Config) -> list[Samples]:
    """The sources of prepared data, opened. Raises ConfigError or DataError."""
    data = config.data
    if not data.sources:
        raise ConfigError(
            "data.sources is empty; name a directory of tools/prepare_data.py (data.sources=[{path: DIR}]), or text (data.text)"
        )
    sources = open_each("data.sources", data.sources, lambda source: open_samples(source, data))
    check_tokenizers(sources)
    _check_room(data, sources)
    fingerprints = [source.data.fingerprint for source in sources]
    for i, fingerprint in enumerate(fingerprints):
        if fingerprint in fingerprints[:i]:
            raise ConfigError(
                f"data.sources.{fingerprints.index(fingerprint)} and data.sources.{i} are the same data; list it once, with both weights"
            )
    available, largest = sum(len(source) for source in sources), max(batch_schedule(config).sizes)
    if available < largest:
        raise DataError(
            f"data.sources hold {available} samples of data.sequence_length={data.sequence_length}, less than one step of "
            f"batch.sequences={largest}; prepare more data, or lower one of the two"
        )
    return sources


def _check_room(data: Data, sources: Sequence[Samples]) -> None:
    """Raise ConfigError if an order that needs any shard at any time would download shards without end."""
    remote = sum(s.data.tokens * s.data.dtype.itemsize for source, s in zip(data.sources, sources) if is_url(source.path))
    if data.shuffle == "full" and remote > data.cache.limit_gb * 1e9:
        raise ConfigError(
            f"data.shuffle=full reads all shards at any time, and data.cache.limit_gb={data.cache.limit_gb:g} holds less than the {remote / 1e9:.3g} GB of "
            "the sources behind URLs: a step would download shards anew; set data.shuffle=shards, or raise data.cache.limit_gb"
        )


def open_each(key: str, sources: Sequence[Any], open_one: Callable[[Any], Opened]) -> list[Opened]:
    """Open every source of a list in the configuration. An error in one names its place in the list."""
    opened = []
    for number, source in enumerate(sources):
        try:
            opened.append(open_one(source))
        except (ConfigError, DataError) as error:
            raise type(error)(f"{key}.{number}: {error}") from error
    return opened


def cut_identity(data: Data, kind: str, tokenizer: TokenizerIdentity, objective: Objective) -> dict[str, Any]:
    """The part of an identity record that all kinds of data share: how documents become samples, and with which tokenizer."""
    return {
        "packing": data.packing,
        "document_mask": data.document_mask,
        "boundary_loss": data.boundary_loss,
        "tokenizer": tokenizer.sha256,
        "tokenizer.eod_id": tokenizer.eod_id,
        "tokenizer.vocab_size": tokenizer.vocab_size,
        "kind": kind,
        "objective": objective.identity(),
    }


def validation_holdings(validation: Sequence[Any]) -> list[tuple[str, Holding]]:
    """The directories of validation sources, each with its key in the configuration."""
    return [(f"data.validation.{number}", held) for number, source in enumerate(validation) for held in source.holdings]


def check_data(config: Config) -> None:
    """Raise ConfigError if the keys of `data` contradict each other or those of `batch`. Nothing is opened."""
    data = config.data
    given = {"data.sources": bool(data.sources), "data.text": data.text != Text(), "data.pairs": data.pairs is not None}
    named = [key for key, is_given in given.items() if is_given]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} both name the training data; keep one")
    for key, sources in (("data.sources", data.sources), ("data.validation", data.validation)):
        _check_names(key, [source_name(source) for source in sources])
    if data.pairs is not None:
        if config.batch.tokens is None:
            raise ConfigError(
                "batch.tokens is missing; with data.pairs, set the tokens of sources and targets in a step, padding included, e.g. 4096"
            )
        return
    if data.text != Text():
        _check_text(data.text)
    _check_objective(data)
    sentinel_ids(data, 0)
    batch_schedule(config)
    _check_weights_are_used(data)
    _check_loss_weights(data)
    if data.sources:
        _mixture(data, [1] * len(data.sources), [None] * len(data.sources))  # without limits, so that sizes do not matter
        _check_sources_are_read(data)


def _check_objective(data: Data) -> None:
    for name, only in (("packing", "concatenate"), ("document_mask", False), ("boundary_loss", True)):
        if data.objective == "span_corruption" and (value := getattr(data, name)) != only:
            said = str(value).lower()
            raise ConfigError(f"data.{name}={said} does not go with data.objective=span_corruption; remove data.{name}")


def _check_text(text: Text) -> None:
    if bool(text.input) == bool(text.dataset):
        raise ConfigError("data.text: give either input (files and globs) or dataset (a Hugging Face dataset)")
    if text.tokenizer is None:
        raise ConfigError(
            "data.text.tokenizer is missing; give a directory or file of tools/train_tokenizer.py, or a tokenizer.json"
        )


def _check_weights_are_used(data: Data) -> None:
    """Raise ConfigError for a weight of a source that no stage takes, and for a source that is never read."""
    named = {source_name(source) for source in data.sources}
    if len(data.sources) == 1 and not data.stages and data.sources[0].weight:
        raise ConfigError(
            f"data.sources.0.weight={data.sources[0].weight:g} has no effect: a weight compares a source with others, and there is one; remove it"
        )
    if data.stages and all(stage.weights and named.issuperset(stage.weights) for stage in data.stages):
        for number, source in enumerate(data.sources):
            if source.weight:
                raise ConfigError(
                    f"data.sources.{number}.weight={source.weight:g} has no effect, because every stage of data.stages has weights of its "
                    "own; remove it, or leave the weights out of a stage that should use it"
                )


def _check_sources_are_read(data: Data) -> None:
    """Raise ConfigError for a source whose weight is 0 wherever it could be read."""
    for number, (source, own) in enumerate(zip(data.sources, _own_weights(data))):
        weights = [stage.weights.get(source_name(source), 0) if stage.weights else own for stage in data.stages] or [own]
        if not any(weights):
            where = "in every stage of data.stages" if data.stages else "and no stage of data.stages names it"
            raise ConfigError(
                f"data.sources.{number}.weight: it is 0 {where}, so nothing of {source_name(source)} is read; remove the source"
            )


def _check_loss_weights(data: Data) -> None:
    weights = [source.loss_weight for source in data.sources]
    if len(weights) == 1 and weights != [1]:
        raise ConfigError(
            f"data.sources.0.loss_weight={weights[0]:g}: a weight compares a source with others, and there is one; remove it, and change "
            "optim.lr if you mean that"
        )
    if weights and not any(weights):
        raise ConfigError(
            "data.sources.0.loss_weight=0: the weight of every source is 0, so nothing would be trained; give one another"
        )


def open_samples(source: Source | ValidationSource, data: Data) -> Samples:
    """A source as samples. Raises DataError if it cannot be read."""
    prepared = open_prepared(source.path, data)
    name = source_name(source)
    if data.packing == "concatenate":
        return Windows(name, prepared, data.sequence_length, data.boundary_loss)
    index = open_index(prepared, data.packing, data.sequence_length, cache_folder(data))
    return Packed(name, prepared, data.sequence_length, index, data.boundary_loss)


def open_prepared(path: str, data: Data) -> PreparedData:
    """A prepared directory, or one behind a URL, which is cached. Raises DataError if it cannot be read. No shard is looked at
    (see `data_of_all_ranks.verify_everywhere`).
    """
    cache = ShardCache(cache_folder(data), int(data.cache.limit_gb * 1e9)) if is_url(path) else None
    return PreparedData.open(path, cache, sizes=False)


def source_name(source: Source | ValidationSource) -> str:
    """The name of a source in logs and stages."""
    return source.name or directory_name(source.path)


def check_tokenizers(sources: Sequence[Samples]) -> None:
    """Raise DataError unless all were prepared with one tokenizer and one end-of-document token, and their copies of it are intact."""
    first = sources[0].data
    for other in (source.data for source in sources):
        if difference := first.tokenizer.difference(other.tokenizer):
            raise DataError(
                f"{first.path} and {other.path} were prepared with {difference}; prepare both with the same tokenizer"
            )
        other.check_tokenizer()


def batch_schedule(config: Config) -> BatchSchedule:
    """`batch` as samples per step, and rows of a sample. Raises ConfigError for stages that do not follow each other, or rows that do not fit."""
    batch, length = config.batch, config.data.sequence_length
    for i, stage in enumerate(batch.lengths):
        if length % stage.length:
            divisors = [n for n in range(1, length + 1) if length % n == 0]
            raise ConfigError(
                f"batch.lengths.{i}.length={stage.length} is not a divisor of data.sequence_length={length}; nearest legal value: "
                f"{min(divisors, key=lambda n: abs(n - stage.length))}"
            )
    ramp = zip(_ends("batch.ramp", batch.ramp, length), [stage.sequences for stage in batch.ramp])
    cuts = zip(_ends("batch.lengths", batch.lengths, length), [length // stage.length for stage in batch.lengths])
    _check_changes("batch.ramp", [stage.sequences for stage in batch.ramp], batch.sequences, "batch.sequences")
    _check_changes("batch.lengths", [stage.length for stage in batch.lengths], length, "data.sequence_length")
    return BatchSchedule(batch.sequences, tuple(ramp), tuple(cuts))


def consumed_after(config: Config) -> Callable[[int], int]:
    """The samples that a run has consumed after a step, if every step had the batch of this configuration."""
    return functools.partial(batch_schedule(config).after, 0)


def _check_changes(key: str, sizes: list[int], last: int, name_of_last: str) -> None:
    """Raise ConfigError for a stage after which all stays as it is."""
    for i, (size, following) in enumerate(zip(sizes, [*sizes[1:], last])):
        if size == following:
            what = f"{name_of_last}={last}" if i == len(sizes) - 1 else f"{key}.{i + 1}"
            raise ConfigError(f"{key}.{i} has no effect, because {what}, which follows it, has the same size; remove it")


def _ends(key: str, stages: Sequence[BatchStage | LengthStage], length: int) -> list[int]:
    """The consumed samples at which each stage ends."""
    ends = [-(-stage.until_tokens // length) for stage in stages]
    for i in range(1, len(ends)):
        if ends[i] <= ends[i - 1]:
            raise ConfigError(
                f"{key}.{i}.until_tokens={stages[i].until_tokens} is not beyond the stage before it, "
                f"{stages[i - 1].until_tokens}, by a sample of {length} tokens; stages follow each other"
            )
    return ends


def open_stream(config: Config, sources: list[Samples]) -> Stream:
    """The stream of a run. Raises ConfigError if its mixture contradicts itself."""
    data = config.data
    window = data.shuffle_shards if data.shuffle == "shards" else None
    mixture = _mixture(data, [len(source) for source in sources], [source.max_epochs for source in data.sources])
    return Stream(sources, mixture, Shuffle(data.seed, window))


def _mixture(data: Data, sizes: list[int], max_epochs: list[int | None]) -> Mixture:
    """The mixture of sources with these numbers of samples. Raises ConfigError if weights, budgets and stages contradict each other."""
    weights = _own_weights(data)
    stages = [_stage(data, i, stage, weights) for i, stage in enumerate(data.stages)] or [Stage(None, tuple(weights))]
    for i, (before, stage) in enumerate(zip(stages, stages[1:]), start=1):
        if before.until is None or (stage.until is not None and stage.until <= before.until):
            raise ConfigError(
                f"data.stages.{i}.until_tokens={_shown(data.stages[i].until_tokens)} is not beyond the stage before it, "
                f"{_shown(data.stages[i - 1].until_tokens)}; stages follow each other, and only the last may have no end"
            )
    return Mixture(stages, sizes, max_epochs, data.seed)


def _shown(tokens: int | None) -> str:
    return "null" if tokens is None else str(tokens)


def _check_names(key: str, names: list[str]) -> None:
    """Raise ConfigError if two sources have one name: logs and stages could not tell them apart."""
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ConfigError(
            f"{key}.{len(names) - 1 - names[::-1].index(double)}: two sources are called {double!r}; give each a {key}[].name"
        )


def _own_weights(data: Data) -> list[float]:
    budgets = [source.tokens is not None for source in data.sources]
    for i, source in enumerate(data.sources):
        if source.tokens is not None and source.weight is not None:
            raise ConfigError(
                f"data.sources.{i} has a weight and a budget of tokens; keep one: weight={source.weight}, tokens={source.tokens}"
            )
    if not any(budgets):
        weights = [1.0 if source.weight is None else source.weight for source in data.sources]
        if not any(weights) and not all(stage.weights for stage in data.stages or [MixtureStage()]):
            raise ConfigError(
                "data.sources: every weight is 0; give one a weight, or every stage of data.stages weights of its own"
            )
        return weights
    if not all(budgets):
        raise ConfigError(
            f"data.sources.{budgets.index(False)} has no tokens, but data.sources.{budgets.index(True)} has; give every source a budget "
            "of tokens, or remove all budgets"
        )
    if data.stages:
        raise ConfigError("data.stages and data.sources[].tokens both say how sources are mixed; keep one")
    return [float(source.tokens) for source in data.sources]


def _stage(data: Data, number: int, stage: MixtureStage, weights: list[float]) -> Stage:
    names = [source_name(source) for source in data.sources]
    for name in stage.weights:
        if name not in names:
            raise ConfigError(f"data.stages.{number}.weights: no source is called {name!r}; they are called {', '.join(names)}")
    own = [stage.weights.get(name, 0.0) for name in names] if stage.weights else weights
    until = None if stage.until_tokens is None else -(-stage.until_tokens // data.sequence_length)
    return Stage(until, tuple(own))
