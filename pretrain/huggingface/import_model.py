"""Hugging Face model directory -> checkpoint with weights only, to start a run from (`run.init_from`) or to look at.

    safetensors --the tensors of one entry of the weight map at a time--> fp32, our layout --pieces of rows--> payload
    config.json --> model.yaml, which a configuration includes to go on with this model

Nothing that executes code is read, and memory holds one entry.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.files import refuse_as_output
from pretrain.checkpoint.planners import on_meta
from pretrain.checkpoint.save import write_alone
from pretrain.config.model_schema import Model
from pretrain.config.read import dump
from pretrain.data.tokenizers.export import save_trimmed
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import CheckpointError, DataError, line_of
from pretrain.huggingface.directory import HfDirectory
from pretrain.huggingface.open_model import GENERATION_FILE, begin_tokens, named_ends
from pretrain.huggingface.verification import Compared, compare_logits
from pretrain.models.families import family_of
from pretrain.progress import ByteProgress
from pretrain.storage import named_if_full

MODEL_FILE = "model.yaml"
CHAT_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class Imported:
    """What an import did. `compared`: the logits, None where they were not; `tokenizer`: a word on it; `notes`: what else to know."""

    parameters: int
    compared: Compared | None
    tokenizer: str
    notes: list[str]


def import_model(directory: Path, output: Path, verify: bool = False, family: str | None = None) -> Imported:
    """Write a Hugging Face model as a checkpoint with weights only. `family`: as for HfDirectory.

    With `verify`, transformers' logits are compared with ours before anything is written, which takes memory for the model. Raises
    CheckpointError, ConfigError or DataError, and leaves nothing behind, when anything fails.
    """
    refuse_as_output(output)
    source = HfDirectory(directory, family)
    named_ends(directory)  # what is attached below must be of use later
    compared = compare_logits(directory, source.model, source.plan.parameters, source.read_all) if verify else None
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "directory": directory.resolve().name,
        "max_logit_difference": None if compared is None else compared.difference,
        "logits_compared": None if compared is None else dataclasses.asdict(compared),
    }
    state = {
        "step": 0,
        "samples": 0,
        "tokens": 0,
        "world_size": 1,
        "layout": "imported",
        "model": dataclasses.asdict(source.model),
        "imported": record,
    }
    shapes = {f"model.{n}": source.plan.ours[n] for line in source.plan.entries for n in line.ours}
    tensors = on_meta(shapes, torch.float32, {f"model.{n}": dtype for n, dtype in source.plan.kept.items()})
    with named_if_full(output), tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        attachments, tokenizer, record["begin"] = _copy_tokenizer(source, Path(folder) / "tokenizer")
        (Path(folder) / MODEL_FILE).write_text(preset(source.model, directory.resolve().name), encoding="utf-8")
        attachments[MODEL_FILE] = Path(folder) / MODEL_FILE
        if (directory / GENERATION_FILE).is_file():  # its end tokens are those of this model
            attachments[GENERATION_FILE] = directory / GENERATION_FILE
        with ByteProgress("converting", source.nbytes) as done:
            write_alone(output, tensors, state, attachments, _EntryByEntry(source, done).read)
    notes = source.plan.family.import_notes(source.config, source.model)
    if (directory / CHAT_FILE).is_file():
        notes = [*notes, f"{CHAT_FILE} stays where it is: training does not use it; copy it into an export that is to chat"]
    return Imported(source.plan.parameters, compared, tokenizer, notes)


def preset(model: Model, name: str) -> str:
    """A file that a configuration includes, with the fewest keys that make this model."""
    section: dict[str, Any] = {}
    for dotted, value in family_of(model.family).smallest_section(model).items():
        *path, last = dotted.split(".")
        place = section
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return f"# The model of {' '.join(name.split())}; a configuration that goes on from its weights includes this file.\n{dump({'model': section})}\n"


class _EntryByEntry:
    """Tensors one by one, in the order of the weight map; holds those of the entry it is at."""

    def __init__(self, source: HfDirectory, done: ByteProgress) -> None:
        self.source, self.done = source, done
        self.line_of = {name: line for line in source.plan.entries for name in line.ours}
        self.current: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        name = name.removeprefix("model.")
        if name not in self.current:
            self.current = {}  # before the next is read
            line = self.line_of[name]
            self.current = self.source.read(line)
            self.done.add(self.source.nbytes_of(line))
        return self.current[name]


def _copy_tokenizer(source: HfDirectory, target: Path) -> tuple[dict[str, Path], str, list[int]]:
    """Attachments of the checkpoint, what to tell the user, and the tokens before a text.

    A model without a tokenizer is no error, because training needs none. Raises CheckpointError for a damaged one.
    """
    if (file := source.directory / "tokenizer.json").is_file():
        try:
            json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{file}: is damaged, no JSON ({line_of(error)}); get it again, or remove it to import the weights alone"
            ) from error
    try:
        tokenizer = load_tokenizer(source.directory)
    except DataError as error:
        return {}, f"none ({error})", []
    try:
        dropped = save_trimmed(tokenizer, source.model.vocab_size, target)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    begin, said = begin_tokens(tokenizer, source.directory), "copied"
    unused = source.model.vocab_size - tokenizer.vocab_size
    if dropped:
        said += f" without {', '.join(dropped)}, which the vocabulary of {source.model.vocab_size} rows lacks"
    elif unused:
        said += f" (the last {unused} rows of the vocabulary are none of its tokens)"
    return {"tokenizer": target}, said, begin
