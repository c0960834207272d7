"""What is proved about an exported directory, by programs that others wrote: the safetensors library and transformers."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.checkpoint import files
from pretrain.checkpoint.safetensors_file import Spec, raw_bytes
from pretrain.config.model_schema import Model
from pretrain.errors import CheckpointError, UserError
from pretrain.models.families.weights import TRAINING_ONLY
from pretrain.models.hf_config import decoded, hf_window
from pretrain.models.network import build_network

LOGIT_TOLERANCE = 1e-4


# ---- structure --------------------------------------------------------------------------------------------------------


def expected_by_transformers(config: dict[str, Any]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """The class that transformers makes of a config.json, and the tensors, with shapes, that it has on disk.

    On the meta device: nothing is allocated. Of tied tensors, those that are written once, but a head that is said to be no copy (T5's
    class ties it all the same, unless the file has both).
    """
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion

    # A copy: transformers writes into nested fields.
    fields = {
        name: value
        for name, value in decoded(copy.deepcopy(config)).items()
        if name not in ("architectures", "dtype", "torch_dtype")
    }
    with _as_their_failure("correct the configuration"), torch.device("meta"):
        model = _auto_class(config).from_config(AutoConfig.for_model(**fields))
    tied = set(model.all_tied_weights_keys)
    if config.get("tie_word_embeddings") is False:
        tied.discard("lm_head.weight")
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    # In memory, transformers holds the experts of a layer as one tensor; on disk they are apart.
    return type(model).__name__, {n: tuple(t.shape) for n, t in revert_weight_conversion(model, state).items()}


def check_expected(config: dict[str, Any], theirs: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError naming a tensor that transformers' class of this config.json lacks, misses, or has in another shape."""
    [architecture] = config["architectures"]
    name, expected = expected_by_transformers(config)
    if name != architecture:
        raise CheckpointError(f"config.json: architectures names {architecture}, and transformers makes a {name} of it")
    for tensor in sorted(expected.keys() ^ theirs.keys()):
        problem = "is missing from the export" if tensor in expected else "is unknown to it"
        raise CheckpointError(f"transformers' {name}: {tensor} {problem}")
    for tensor, shape in expected.items():
        if shape != theirs[tensor]:
            raise CheckpointError(
                f"transformers' {name}: {tensor} has shape {list(shape)}, and the export has {list(theirs[tensor])}"
            )


def read_back(directory: Path, shards: dict[str, list[Spec]], hashes: dict[str, str], seen: Callable[[int], object]) -> None:
    """Raise CheckpointError unless the safetensors library reads from each file what was handed to the writer, bit by bit."""
    from safetensors import SafetensorError, safe_open

    for file, specs in shards.items():
        path = directory / file
        try:
            with safe_open(path, framework="pt") as opened:
                if set(opened.keys()) != {spec.name for spec in specs}:
                    raise CheckpointError(f"{path}: holds other tensors than were written")
            for spec in specs:
                # Opened anew for each: the pages of a memory map that was read stay resident until it is closed.
                with safe_open(path, framework="pt") as opened:
                    _compare(path, spec, opened.get_tensor(spec.name), hashes[spec.name])
                seen(spec.nbytes)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: cannot be read back: {str(error).splitlines()[0]}") from error


def _compare(path: Path, spec: Spec, tensor: Tensor, sha256: str) -> None:
    if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
        raise CheckpointError(f"{path}: {spec.name} reads back as {list(tensor.shape)} {tensor.dtype}")
    if hashlib.sha256(raw_bytes(tensor)).hexdigest() != sha256:
        raise CheckpointError(f"{path}: {spec.name} does not read back as it was written")


# ---- logits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """What a comparison of logits was made on: so many sequences of so many random tokens, both models in fp32; the largest absolute
    difference. `beyond`: what such a length reaches that a shorter one does not, None where there is nothing.
    """

    difference: float
    sequences: int
    length: int
    beyond: str | None

    def __str__(self) -> str:
        reach = f", beyond {self.beyond}" if self.beyond else ""
        return (
            f"transformers' logits differ from ours by at most {self.difference:.2e}, in fp32, on {self.sequences} sequence"
            f"{'s' if self.sequences > 1 else ''} of {self.length} random tokens{reach}"
        )


def compare_logits(directory: Path, model: Model, weights: Callable[[], dict[str, Tensor]]) -> Compared:
    """transformers' logits of a directory against ours of `weights`, one model after the other, so that one at a time is in memory.

    Raises CheckpointError where they differ by more than LOGIT_TOLERANCE, or are no numbers. The sequence is longer than the window, or
    than the length from which dynamic scaling changes the rotation, where a model has one.
    """
    sequences, length, beyond = _reach(model)
    generator = torch.Generator().manual_seed(0)
    ids, source = (torch.randint(model.vocab_size, (sequences, length), generator=generator) for _ in range(2))
    theirs = _their_logits(directory, ids, source if model.encoder_layers else None)
    inputs = {"source_BS": source} if model.encoder_layers else {}
    with torch.no_grad():
        difference = float(theirs.sub_(build(model, _in_fp32(weights()))(ids, **inputs)).abs_().max())
    if not difference <= LOGIT_TOLERANCE:
        raise CheckpointError(
            f"transformers' logits differ from ours by {difference:.2e} on {length} tokens (limit {LOGIT_TOLERANCE}); nothing was written"
        )
    return Compared(difference, sequences, length, beyond)


_MORE = 64  # tokens beyond what is to be exercised


def _reach(model: Model) -> tuple[int, int, str | None]:
    """Sequences and their length that reach all that the model computes, and what they reach beyond."""
    longest = model.max_sequence_length
    window, grows_from = model.attention.window or 0, 0
    if model.family == "hf":
        window = hf_window(model)
    elif model.positions == "rope" and model.rope.scaling == "dynamic":
        grows_from = model.rope.original_length
    if grows_from:  # such models go on beyond the length they say
        return 1, max(grows_from, window) + _MORE, f"the {grows_from} positions from which dynamic scaling grows"
    if not window:
        return 2, min(_MORE, longest), None
    length = min(longest, window + _MORE)
    return 1, length, f"the window of {window}" if length > window else None


def _their_logits(directory: Path, ids: Tensor, source: Tensor | None) -> Tensor:
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = _auto_class(files.read_json(directory / "config.json"))
    with _as_their_failure("correct config.json, or leave --verify out; nothing was written"), torch.no_grad():
        model = kind.from_pretrained(
            directory,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            experts_implementation="eager",  # its grouped kernel refuses widths that are no multiple of 4
        ).eval()
        logits = model(ids, use_cache=False) if source is None else model(source, decoder_input_ids=ids, use_cache=False)
        return logits.logits


@contextmanager
def _as_their_failure(remedy: str) -> Iterator[None]:
    """CheckpointError for whatever transformers raises: its models can raise anything for a configuration that nobody thought of."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]  # torch adds its C++ stack
        raise CheckpointError(f"transformers itself fails on this model: {type(error).__name__}: {text}; {remedy}") from error


def _in_fp32(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def _auto_class(config: dict[str, Any]) -> Any:
    """transformers' class of classes for a config.json: of a decoder alone, or of an encoder and a decoder."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.get("is_encoder_decoder") is True else AutoModelForCausalLM


def build(model: Model, weights: dict[str, Tensor], compute: torch.dtype = torch.float32) -> nn.Module:
    """A network that holds these weights as they are, on the CPU, without what is for training only; it computes in `compute`."""
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith(TRAINING_ONLY)}
    with torch.device("meta"):
        network = build_network(dataclasses.replace(model, predict_ahead=0))
    network.load_state_dict(weights, strict=True, assign=True)
    for module in network.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = compute
    return network.eval().requires_grad_(False)
