"""What is proved about an exported directory, by programs that others wrote: the safetensors library and transformers."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pretrain.checkpoint import files
from pretrain.config.model_schema import Model
from pretrain.errors import CheckpointError, UserError
from pretrain.huggingface.directory import WeightPlan
from pretrain.huggingface.safetensors_file import Spec, raw_bytes
from pretrain.models import build_network
from pretrain.models.families import family_of
from pretrain.models.families.declare.weights import TRAINING_ONLY
from pretrain.models.hf.hf_config import decoded

MOST_IN_FP64 = 10**9
"""Weights of a model that is compared in fp64, where it takes 8 GB. Larger ones are compared in fp32, which finds less: see LOGIT_TOLERANCE.
"""
LOGIT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3}
"""Largest difference of logits, as a share of their root mean square, by the format that both models compute in.

Measured, as a share of the standard deviation:

    right models          initial weights   6 layers of random weights of std 0.2   24 such layers
    fp32                  2e-6              5e-5                                    2e-4
    fp64                  5e-15             1e-13                                   3e-13

    planted errors, in fp64 and gemma2: 3e-8 (soft cap of the attention off by 10 %, initial weights), 2.5e-6 (eps twice as large, std 0.2),
    1e-4 (last soft cap off by 10 %), 6e-4 (rotary base off by 1 %)

So 1e-10 is 300 times above the noise, and 300 times below the smallest error. In fp32 no
limit finds them all: 1e-3 is 5 times above the noise of 24 layers, which grows with depth.
"""


# ---- structure --------------------------------------------------------------------------------------------------------


def expected_by_transformers(config: dict[str, Any]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """The class that transformers makes of a config.json, and the tensors, with shapes, that it has on disk.

    On the meta device: nothing is allocated. Tied tensors are written once. A head that is said to be no copy is written too: T5's class ties it
    all the same, unless the file has both.
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


def check_expected(config: dict[str, Any], plan: WeightPlan) -> None:
    """Raise CheckpointError naming a tensor that transformers' class of this config.json lacks, misses, or has in another shape."""
    [architecture] = config["architectures"]
    name, expected = expected_by_transformers(config)
    if name != architecture:
        raise CheckpointError(f"config.json: architectures names {architecture}, and transformers makes a {name} of it")
    expected = {plan.name_of(tensor): shape for tensor, shape in expected.items()}
    for tensor in sorted(expected.keys() ^ plan.theirs.keys()):
        problem = "is missing from the export" if tensor in expected else "is unknown to it"
        raise CheckpointError(f"transformers' {name}: {tensor} {problem}")
    if misfit := plan.misfit(expected):
        tensor, theirs, ours = misfit
        raise CheckpointError(f"transformers' {name}: {tensor} has shape {theirs}, and the export has {ours}")


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
    """The largest absolute difference of logits, the `limit` that is accepted, and what was compared: `sequences` of `length` random tokens. Both
    models computed in one number format. `beyond`: what this length reaches that a shorter one does not; None if nothing.
    """

    difference: float
    limit: float
    computed_in: str
    sequences: int
    length: int
    beyond: str | None

    def __str__(self) -> str:
        reach = f", beyond {self.beyond}" if self.beyond else ""
        return (
            f"transformers' logits differ from ours by at most {self.difference:.2e} (limit {self.limit:.2e}), in {self.computed_in}, on "
            f"{self.sequences} sequence{'s' if self.sequences > 1 else ''} of {self.length} random tokens{reach}"
        )


def compare_logits(directory: Path, model: Model, parameters: int, weights: Callable[[], dict[str, Tensor]]) -> Compared:
    """transformers' logits of a directory against ours of `weights`, one model after the other, so that one at a time is in memory.

    In fp64 where the model has at most MOST_IN_FP64 `parameters`, else in fp32. Raises CheckpointError where they differ by more than
    LOGIT_TOLERANCE, or are no numbers. The sequence is longer than the window, or than the length from which dynamic scaling changes the
    rotation, where a model has one.
    """
    sequences, length, beyond = _reach(model)
    dtype = torch.float64 if parameters <= MOST_IN_FP64 else torch.float32
    generator = torch.Generator().manual_seed(0)
    ids, source = (torch.randint(model.vocab_size, (sequences, length), generator=generator) for _ in range(2))
    inputs = {"source_BS": source} if model.encoder.layers else {}
    with _computing_in(dtype):
        fields = family_of(model.family).not_obeyed
        theirs = _their_logits(directory, ids, source if model.encoder.layers else None, dtype, fields)
    held = _cast(weights(), dtype)
    with torch.no_grad(), _computing_in(dtype):
        network = build(model, held, dtype)
        family_of(model.family).use_plain_kernels(network)
        ours = network(ids, **inputs)
    size = float(ours.square().mean().sqrt())
    difference, limit = float(theirs.sub_(ours).abs_().max()), LOGIT_TOLERANCE[dtype] * size
    computed_in = str(dtype).removeprefix("torch.")
    if not difference <= limit:
        raise CheckpointError(
            f"transformers' logits differ from ours by {difference:.2e} on {length} tokens, both in {computed_in} (limit {limit:.2e}: "
            f"{LOGIT_TOLERANCE[dtype]:g} of the root mean square of ours, {size:.3g}); nothing was written"
        )
    return Compared(difference, limit, computed_in, sequences, length, beyond)


_MORE = 64  # tokens beyond what is to be exercised, and as many as a chunk of linear attention


def _reach(model: Model) -> tuple[int, int, str | None]:
    """Sequences and their length that reach all that the model computes, and what they reach beyond."""
    longest = model.max_sequence_length
    window, grows_from = family_of(model.family).reach(model)
    if grows_from:  # such models go on beyond the length they say
        return 1, max(grows_from, window) + _MORE, f"the {grows_from} positions from which dynamic scaling grows"
    if not window:
        chunks = 2 if any(model.linear_attention.pattern or []) else 1
        return 2, min(chunks * _MORE, longest), None
    length = min(longest, window + _MORE)
    return 1, length, f"the window of {window}" if length > window else None


class _InFp64(TorchFunctionMode):
    """What a model's code casts to fp32 (norms, rotations, softmax, routers) goes to fp64 instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Everything in this format: what has no other, and in fp64 what asks for fp32 too."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _InFp64() if dtype == torch.float64 else nullcontext():
            yield
    finally:
        torch.set_default_dtype(usual)


def _their_logits(directory: Path, ids: Tensor, source: Tensor | None, dtype: torch.dtype, fields: dict[str, Any]) -> Tensor:
    """`fields`: of config.json, to be taken in place of what it says."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = _auto_class(files.read_json(directory / "config.json"))
    with _as_their_failure("correct config.json, or leave --verify out; nothing was written"), torch.no_grad():
        model = kind.from_pretrained(
            directory,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            experts_implementation="eager",  # its grouped kernel refuses widths that are no multiple of 4
            **fields,
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


def _cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights in a format; those that are given are gone, so that they are in memory once."""
    names = list(weights)
    return {name: (t := weights.pop(name)).to(dtype if t.is_floating_point() else t.dtype) for name in names}


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
