"""Hugging Face export and import: safetensors, config.json and tokenizer files, and nothing that runs code.

Both directions follow a family's one weight map. Output is written aside, verified where asked, and renamed into place.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.checkpoint import files
from pretrain.checkpoint.load import first_damage, load_state, saved_tensors
from pretrain.checkpoint.save import write_checkpoint
from pretrain.config.model_schema import Model
from pretrain.config.recorded import build_section
from pretrain.data.shards.staging import refuse_existing, staged_directory
from pretrain.data.tokenizers.export import export_tokenizer
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, DataError
from pretrain.models.families import family_of, family_of_hf
from pretrain.models.families.family import Family
from pretrain.models.families.weights import resolve
from pretrain.models.network import build_network

log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOGIT_TOLERANCE = 1e-4
ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))

_SAMPLES = ["import os\n\n\ndef main():\n    return 1\n", "To be, or not to be: that is the question.\n"]


def read_checkpoint(path: Path) -> tuple[Model, dict[str, Tensor], Path]:
    """Shape, weights (whole, on the CPU, by our names) and directory of a checkpoint, or of a run's newest; hashes verified."""
    checkpoint = files.resolve(path)[-1]
    if damage := first_damage(checkpoint, ALONE):
        raise CheckpointError(damage)
    state = load_state(checkpoint)
    model = build_section(Model, state["model"])
    weights = saved_tensors(checkpoint, "model.")
    return model, {name.removeprefix("model."): tensor for name, tensor in weights.items()}, checkpoint


def build(model: Model, weights: dict[str, Tensor]) -> nn.Module:
    """The network that holds these weights, in fp32 on the CPU."""
    with torch.device("meta"):
        network = build_network(model)
    network.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True, assign=True)
    return network.eval().requires_grad_(False)


# ---- export -----------------------------------------------------------------------------------------------------------


def export(path: Path, output: Path, dtype: str, verify: bool) -> dict[str, Any]:
    """Write a checkpoint as a directory that transformers loads; what was done, for the user.

    With `verify`, transformers' logits are compared with ours in fp32 before the output is put in place; CheckpointError if
    they differ by more than 1e-4, and nothing is left behind.
    """
    refuse_existing(output)
    model, weights, checkpoint = read_checkpoint(path)
    family = family_of(model.family)
    config = family.to_hf(model)
    entries = resolve(family.weights, model, list(shapes_of(model)))
    names = {name for line in entries for name in line.ours}
    if names != weights.keys():
        odd = sorted(names ^ weights.keys())
        raise CheckpointError(f"{checkpoint}: {odd[0]} is on one side only of {model.family}'s weight map; nothing was written")
    weights = {name: tensor.to(EXPORT_DTYPES[dtype]) for name, tensor in weights.items()}
    with staged_directory(output) as writing:
        tokenizer = checkpoint / "tokenizer"
        # In this order: transformers chooses the tokenizer's class by the config.json beside it.
        _write_config(writing, config, load_tokenizer(tokenizer).eod_id, dtype)
        export_tokenizer(tokenizer, writing, _SAMPLES)
        theirs: dict[str, Tensor] = {}
        for line in entries:
            theirs |= zip(line.theirs, line.layout.to_theirs([weights[name] for name in line.ours], model))
        _write_weights(writing, theirs)
        difference = _verified(writing, model, weights) if verify else None
    return {"checkpoint": checkpoint, "parameters": sum(t.numel() for t in weights.values()), "difference": difference}


def _verified(directory: Path, model: Model, weights: dict[str, Tensor]) -> float:
    difference = logit_difference(directory, model, weights)
    if not difference <= LOGIT_TOLERANCE:
        raise CheckpointError(
            f"transformers' logits differ from ours by {difference:.2e} (limit {LOGIT_TOLERANCE}); nothing was written"
        )
    return difference


def logit_difference(exported: Path, model: Model, weights: dict[str, Tensor]) -> float:
    """Largest absolute difference between transformers' logits and ours, both in fp32 from the exported weights."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    ids = torch.randint(model.vocab_size, (2, min(64, model.max_sequence_length)), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, use_safetensors=True).eval()
    with torch.no_grad():
        return float((theirs(ids).logits - build(model, weights)(ids)).abs().max())


def _write_config(directory: Path, config: dict[str, Any], eod_id: int, dtype: str) -> None:
    config |= {"dtype": str(EXPORT_DTYPES[dtype]).removeprefix("torch."), "bos_token_id": None, "eos_token_id": eod_id}
    files.write_json(directory / "config.json", config)
    files.write_json(directory / "generation_config.json", {"bos_token_id": None, "eos_token_id": eod_id, "do_sample": False})


def _write_weights(directory: Path, weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in weights.values())
        files.write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


# ---- import -----------------------------------------------------------------------------------------------------------


def read_hf(directory: Path) -> tuple[Model, dict[str, Tensor]]:
    """Shape and weights (by our names) of a Hugging Face model directory.

    Raises CheckpointError or ConfigError for an architecture, field, tensor or shape that is missing, surplus or unknown.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: no config.json; not a Hugging Face model directory")
    config = files.read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise CheckpointError(f"{directory / 'config.json'}: not a JSON object")
    family = family_of_hf(config)
    model = family.from_hf(config)
    theirs = _read_safetensors(directory)
    return model, _translate(family, model, theirs, directory)


def _translate(family: Family, model: Model, theirs: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    shapes = shapes_of(model)
    entries = resolve(family.weights, model, list(shapes))
    names = {name for line in entries for name in line.theirs}
    head, embedding = "lm_head.weight", next(line.theirs[0] for line in entries if line.ours == ("embedding.weight",))
    if model.tie_embeddings and head in theirs and torch.equal(theirs[head], theirs.get(embedding, theirs[head])):
        theirs.pop(head)  # the same tensor written twice
    if left := sorted(name for name in set(theirs) - names if family.dropped and family.dropped(name, model)):
        log.warning("%s: left out, as transformers does: %s (%d tensors)", directory, left[0], len(left))
        theirs = {name: tensor for name, tensor in theirs.items() if name not in left}
    missing, surplus = sorted(names - set(theirs)), sorted(set(theirs) - names)
    if missing or surplus:
        which = f"{missing[0]} is missing" if missing else f"{surplus[0]} has no place in {family.name}"
        raise CheckpointError(f"{directory}: {which} ({len(missing)} missing, {len(surplus)} surplus tensors)")
    weights: dict[str, Tensor] = {}
    for line in entries:
        for name in line.theirs:
            if not theirs[name].is_floating_point():
                raise CheckpointError(f"{directory}: {name} is {theirs[name].dtype}; quantised weights cannot be trained")
        expected = [shapes[name] for name in line.ours]
        tensors = line.layout.to_ours([theirs[name].float() for name in line.theirs], expected, model)
        for ours, tensor, shape in zip(line.ours, tensors, expected):
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{directory}: {line.theirs[0]} has shape {list(theirs[line.theirs[0]].shape)}, config.json says {list(shape)}"
                )
            weights[ours] = tensor
    return weights


def shapes_of(model: Model) -> dict[str, torch.Size]:
    """The shape of every parameter of a model, by name."""
    with torch.device("meta"):
        return {name: p.shape for name, p in build_network(model).named_parameters()}


def _read_safetensors(directory: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for name in _shards(directory):
        path = directory / Path(name).name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; only safetensors are read, other formats can execute code")
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged: {error}") from error
    return tensors


def _shards(directory: Path) -> list[str]:
    path = directory / "model.safetensors.index.json"
    if not path.is_file():
        return ["model.safetensors"]
    index = files.read_json(path)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{path}: has no weight_map of tensor names to file names")
    return sorted(set(places.values()))


def import_model(directory: Path, output: Path, verify: bool) -> dict[str, Any]:
    """Write a Hugging Face model as a checkpoint with weights only, to start a run from (`run.init_from`)."""
    refuse_existing(output)
    model, weights = read_hf(directory)
    difference = _verified(directory, model, weights) if verify else None
    output.parent.mkdir(parents=True, exist_ok=True)
    state = {"step": 0, "samples": 0, "tokens": 0, "world_size": 1, "layout": "imported", "model": dataclasses.asdict(model)}
    writing_tokenizer = output.with_name(f".tokenizer-{output.name}")
    try:
        attachments, tokenizer = _copy_tokenizer(directory, writing_tokenizer)
        write_checkpoint(output, {f"model.{name}": tensor for name, tensor in weights.items()}, state, attachments, ALONE)
    finally:
        shutil.rmtree(writing_tokenizer, ignore_errors=True)
    parameters = sum(t.numel() for t in weights.values())
    return {"checkpoint": output, "parameters": parameters, "difference": difference, "tokenizer": tokenizer}


def _copy_tokenizer(directory: Path, target: Path) -> tuple[dict[str, Path], str]:
    """Attachments of the checkpoint, and what to tell the user: training needs no tokenizer, so a model without one is no error."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        load_tokenizer(directory).save(target)
    except DataError as error:
        return {}, f"none ({error})"
    return {"tokenizer": target}, "copied"
