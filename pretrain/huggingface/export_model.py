"""Checkpoint -> directory that transformers loads: safetensors, config.json and tokenizer files, and nothing that runs code.

    payload of the checkpoint --the tensors of one entry of the weight map at a time--> number format, layout --> safetensors

The names and shapes of everything follow from the configuration. So files are written from their first byte to their last, and memory
holds one entry. Output is written aside, read back, compared with what transformers expects, and renamed into place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pretrain.checkpoint import files
from pretrain.checkpoint.payload import Payload
from pretrain.config.model_schema import Model
from pretrain.data.tokenizers.export import export_tokenizer, read_added_tokens
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import CheckpointError
from pretrain.huggingface.directory import WeightPlan, check_round_trip, plan_weights, refuse_odd_numbers
from pretrain.huggingface.open_model import GENERATION_FILE, MODEL_DTYPES, named_ends, recorded_model
from pretrain.huggingface.safetensors_file import ShardedWriter, Spec
from pretrain.huggingface.verification import Compared, check_expected, compare_logits, read_back
from pretrain.models.families import family_of
from pretrain.models.families.declare.other_readers import reader_notes
from pretrain.models.families.declare.weights import TRAINING_ONLY, Entry
from pretrain.progress import ByteProgress
from pretrain.storage import refuse_existing, staged_directory

Weights = Literal["model", "ema"]
SHARD_BYTES = 5 * 10**9
RECORD = "pretrain_export.json"
SAMPLES = ("import os\n\n\ndef main():\n    return 1\n", "To be, or not to be: that is the question.\n")


@dataclass(frozen=True)
class Exported:
    """What an export did. `compared`: the logits, None where they were not; `notes`: what its users should know."""

    checkpoint: Path
    parameters: int
    files: int
    compared: Compared | None
    notes: list[str]


def export(
    path: Path,
    output: Path,
    dtype: str = "fp32",
    verify: bool = False,
    shard_bytes: int = SHARD_BYTES,
    weights: Weights = "model",
) -> Exported:
    """Write a checkpoint, or a run's newest, as a directory that transformers loads.

    Every tensor is read back from the output and compared. The output's names and shapes are compared with what transformers' class
    expects. `verify` also compares its logits with ours, which takes memory for the model. pretrain_export.json records what was
    verified. `weights`: the model's, or their running mean (`optim.ema_decay`). When anything of this fails, it raises CheckpointError or
    ConfigError, and leaves nothing behind.
    """
    refuse_existing(output)
    return files.read_newest(path, lambda checkpoint: _export(checkpoint, output, dtype, verify, shard_bytes, weights))


def _export(checkpoint: Path, output: Path, dtype: str, verify: bool, shard_bytes: int, weights: Weights) -> Exported:
    with ByteProgress(
        "verifying the checkpoint", sum(item["bytes"] for item in files.read_manifest(checkpoint).values())
    ) as seen:
        files.verify(checkpoint, seen=seen.add)
    state = files.load_state(checkpoint)
    model = recorded_model(checkpoint, state)
    family_of(model.family).to_hf(model)  # refuses by name what has no export
    tokenizer = checkpoint / "tokenizer" if (checkpoint / "tokenizer").is_dir() else None
    source = _Source(checkpoint, plan_weights(model), MODEL_DTYPES[dtype], weights)
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    added = read_added_tokens(loaded) if loaded else []
    padding = _padding(model, loaded, added, checkpoint)
    with _named(output), staged_directory(output) as writing:
        config, notes = write_description(writing, model, tokenizer, added, dtype)
        _carry_generation(checkpoint, writing)
        check_expected(config, source.plan)
        shards = _write_weights(source, writing, shard_bytes)
        check_round_trip(model, files.read_json(writing / "config.json"))
        compared = compare_logits(writing, model, source.plan.parameters, source.read_all) if verify else None
        record = _record(source, state, tokenizer is not None, compared, padding, notes, writing)
        files.write_json(writing / RECORD, record)
    return Exported(checkpoint, source.plan.parameters, shards, compared, [*filter(None, [padding]), *notes])


def write_description(
    directory: Path, model: Model, tokenizer: Path | None, added: Sequence[str], dtype: str = "fp32"
) -> tuple[dict[str, Any], list[str]]:
    """Write all of an export but its weights: config.json, generation_config.json and the tokenizer, which agree on the special tokens.

    Returns config.json and what users of the export should know. `added`: special tokens beyond the tokenizer's. Raises ConfigError or
    DataError where transformers would read something else than was trained.
    """
    family, number_format = family_of(model.family), str(MODEL_DTYPES[dtype]).removeprefix("torch.")
    # transformers 5 writes `dtype`; older readers, vLLM's and llama.cpp's among them, look for `torch_dtype`.
    config = family.to_hf(model) | {"dtype": number_format, "torch_dtype": number_format}
    notes = reader_notes(family, model)
    # In this order: transformers chooses the tokenizer's class by the config.json beside it.
    files.write_json(directory / "config.json", config)
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": config.get("pad_token_id")}
    if model.encoder.layers:  # a decoder starts from one token, which for T5 is also the one that pads
        eod = load_tokenizer(tokenizer).eod_id if tokenizer else None
        start = eod if model.encoder.decoder_start_id is None else model.encoder.decoder_start_id
        ids |= {"pad_token_id": start, "decoder_start_token_id": start}
    if tokenizer:
        longest, begins, pad = model.max_sequence_length, not model.encoder.layers, ids["pad_token_id"]
        special = export_tokenizer(tokenizer, directory, SAMPLES, added, longest=longest, begins=begins, pad_id=pad)
        ids |= {"bos_token_id": special.bos, "eos_token_id": special.eos}
        if special.pad is not None:
            ids["pad_token_id"] = special.pad
        notes += filter(None, [special.note])
    files.write_json(directory / "config.json", config | ids)
    said = {name: id for name, id in ids.items() if id is not None or name != "pad_token_id"}
    files.write_json(directory / GENERATION_FILE, said | {"do_sample": False})
    return config | ids, notes


def _carry_generation(checkpoint: Path, directory: Path) -> None:
    """Add what the generation_config.json of an imported model says: chat models have further end tokens, and ways to draw."""
    if not (checkpoint / GENERATION_FILE).is_file():
        return
    ours = files.read_json(directory / GENERATION_FILE)
    theirs = files.read_json(checkpoint / GENERATION_FILE)
    own = ours["eos_token_id"]
    ends = [*([] if own is None else [own]), *sorted(named_ends(checkpoint) - {own})]
    known = {name: value for name, value in ours.items() if value is not None and name != "do_sample"}
    ends_of = ends if len(ends) > 1 else ends[0] if ends else None
    said = theirs | known | {"eos_token_id": ends_of}
    files.write_json(directory / GENERATION_FILE, said | {"do_sample": theirs.get("do_sample", False)})


@contextlib.contextmanager
def _named(output: Path) -> Iterator[None]:
    """Say what could not be written, a full disk mostly."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or output}: {error.strerror or error}") from error


class _Source:
    """The tensors of a checkpoint in the export's number format, entry by entry."""

    def __init__(self, checkpoint: Path, plan: WeightPlan, dtype: torch.dtype, weights: Weights) -> None:
        self.checkpoint, self.plan, self.dtype, self.weights = checkpoint, plan, dtype, weights
        self.payload = Payload(checkpoint)
        if weights == "ema" and not self.payload.names("optim.ema."):
            is_mean = self.payload.names("optim.trained.")
            remedy = "its weights are the mean: export them" if is_mean else "train with optim.ema_decay, or export the weights"
            raise CheckpointError(f"{checkpoint}: has no running mean of its weights; {remedy}")
        there = {name.removeprefix("model."): self.payload.items[name] for name in self.payload.names("model.")}
        there = {name: item for name, item in there.items() if not name.startswith(TRAINING_ONLY)}
        if odd := sorted(there.keys() ^ plan.ours.keys()):
            name = plan.model.family
            raise CheckpointError(f"{checkpoint}: {odd[0]} is on one side only of {name}'s weight map; nothing was written")
        for name, item in there.items():
            if tuple(item.size) != plan.ours[name]:
                raise CheckpointError(
                    f"{checkpoint}: {name} has shape {list(item.size)}, its model needs {list(plan.ours[name])}; nothing was written"
                )

    def ours(self, line: Entry) -> list[Tensor]:
        tensors = self.payload.read(self._saved_name(name) for name in line.ours)
        return [self._cast(name, tensor) for name, tensor in zip(line.ours, tensors.values())]

    def _saved_name(self, name: str) -> str:
        """The name in the payload. Running means have names of their own; parameters that are not trained have no mean."""
        mean = f"optim.ema.{name}"
        return mean if self.weights == "ema" and mean in self.payload.items else f"model.{name}"

    def theirs(self, line: Entry) -> list[Tensor]:
        return line.layout.to_theirs(self.ours(line), self.plan.model)

    def read_all(self) -> dict[str, Tensor]:
        """All of them, by our names."""
        return {name: tensor for line in self.plan.entries for name, tensor in zip(line.ours, self.ours(line))}

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        refuse_odd_numbers(self.checkpoint, name, tensor, name in self.plan.kept)
        dtype = self.dtype_of(name)
        if dtype == torch.float16 and max(map(abs, torch.aminmax(tensor))) > torch.finfo(torch.float16).max:
            raise CheckpointError(f"{self.checkpoint}: {name} has values beyond fp16's range; use --dtype bf16 or fp32")
        return tensor.to(dtype)

    def dtype_of(self, name: str) -> torch.dtype:
        """The export's number format, but for tensors without gradient (`WeightPlan.kept`)."""
        return self.plan.kept.get(name, self.dtype)


def _padding(model: Model, tokenizer: Tokenizer | None, added: Sequence[str], checkpoint: Path) -> str | None:
    """What to say of rows of the vocabulary that are no token's. Raises CheckpointError where a token has no row."""
    if tokenizer is None:
        return "the checkpoint has no tokenizer, so none was written, and config.json names no end-of-text token"
    if model.vocab_size < tokenizer.vocab_size:
        raise CheckpointError(
            f"{checkpoint}: the vocabulary has {model.vocab_size} rows and the tokenizer {tokenizer.vocab_size} tokens; "
            "this is not the tokenizer it was trained with"
        )
    unused = model.vocab_size - tokenizer.vocab_size - len(added)
    if not unused:
        return None
    return f"the last {unused} of {model.vocab_size} rows of the vocabulary are no token of the tokenizer; config.json's vocab_size counts them"


def _write_weights(source: _Source, directory: Path, shard_bytes: int) -> int:
    """The number of files."""
    specs = [
        Spec(name, source.plan.theirs[name], source.dtype_of(line.ours[0]))
        for line in source.plan.entries
        for name in line.theirs
    ]
    total = sum(spec.nbytes for spec in specs)
    with ShardedWriter(directory, specs, shard_bytes) as writer, ByteProgress("writing", total) as done:
        for line in source.plan.entries:
            _write_entry(source, line, writer, done)
    with ByteProgress("reading back", total) as done:
        read_back(directory, writer.shards, writer.hashes, done.add)
    return len(writer.shards)


def _write_entry(source: _Source, line: Entry, writer: ShardedWriter, done: ByteProgress) -> None:
    # A function of its own, so that nothing of one entry is alive when the next is read.
    for name, tensor in zip(line.theirs, source.theirs(line)):
        writer.write(name, tensor)
        done.add(tensor.nbytes)


def _record(
    source: _Source,
    state: dict[str, Any],
    tokenizer: bool,
    compared: Compared | None,
    padding: str | None,
    notes: list[str],
    directory: Path,
) -> dict[str, Any]:
    plan = source.plan
    [architecture] = plan.family.to_hf(plan.model)["architectures"]
    return {
        "source": {
            "checkpoint": source.checkpoint.resolve().name,
            "manifest_sha256": files.manifest_hash(source.checkpoint),
            **{name: state.get(name) for name in ("step", "samples", "tokens", "layout")},
            "weights": source.weights,
        },
        "family": plan.family.name,
        "dtype": str(source.dtype).removeprefix("torch."),
        "parameters": plan.parameters,
        "tensors": len(plan.theirs),
        "vocabulary": {"rows": plan.model.vocab_size, "note": padding},
        "notes": notes,
        "verified": {
            "checkpoint": "every file matched its sha256 in the checkpoint's manifest",
            "weights": "every tensor was read back with the safetensors library and is what was written, bit by bit",
            "structure": f"names and shapes are those of transformers' {architecture}",
            "config": "config.json is read as the same model",
            "tokenizer": "transformers' AutoTokenizer gives the same ids on sample texts" if tokenizer else None,
            "logits": None if compared is None else str(compared),
        },
        "max_logit_difference": None if compared is None else compared.difference,
        "logits_compared": None if compared is None else dataclasses.asdict(compared),
        "files": {path.name: files.describe_file(path) for path in sorted(directory.iterdir()) if path.is_file()},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of the libraries that took part."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in ("torch", "transformers", "safetensors", "tokenizers")
    }
