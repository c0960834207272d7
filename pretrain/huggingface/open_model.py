"""A model and its tokenizer from any place that holds them: a checkpoint, a run directory or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.checkpoint import files
from pretrain.checkpoint.payload import Payload
from pretrain.config.model_schema import Model
from pretrain.data.tokenizers.tokenizer import CONFIG_NAME, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from pretrain.errors import CheckpointError, ConfigError, DataError, shown
from pretrain.huggingface.directory import HfDirectory, check_sizes, read_config
from pretrain.huggingface.verification import build
from pretrain.models import build_network
from pretrain.models.families import family_of, family_of_hf
from pretrain.models.families.declare.weights import TRAINING_ONLY
from pretrain.models.hf.hf_config import LARGEST_CONFIG

GENERATION_FILE = "generation_config.json"
MODEL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Opened:
    """A network in evaluation, and how text goes into it and comes out.

    `begin`: tokens that the model expects before a text (BOS, mostly). `ends`: tokens that end one: the end of a document, and what
    the model's generation_config.json and config.json name. `notes`: what to tell the user.
    """

    network: nn.Module
    tokenizer: Tokenizer
    begin: list[int]
    ends: frozenset[int]
    notes: list[str] = field(default_factory=list)

    def known(self, ids: list[int], origin: str) -> list[int]:
        """`ids` as they are. Raises DataError, naming their `origin`, for one that the model's vocabulary has no row for."""
        return known_ids(ids, self.network.config.vocab_size, origin)


def known_ids(ids: list[int], rows: int, origin: str) -> list[int]:
    """`ids` as they are. Raises DataError, naming their `origin`, for one that a vocabulary of so many rows does not have."""
    if ids and max(ids) >= rows:
        raise DataError(
            f"{origin}: has token {max(ids)} of the tokenizer, but the model's vocabulary has {rows} rows; change the text, "
            "or take the tokenizer that the model was trained with"
        )
    return ids


def open_model(path: Path | str, device: torch.device | str = "cpu", dtype: str = "fp32", family: str | None = None) -> Opened:
    """Open a run (its newest checkpoint), a checkpoint or a Hugging Face directory that holds a decoder.

    The network is on `device` and computes in `dtype`, a number format of MODEL_DTYPES. Matrices are held in that format. Vectors, and what
    gets no gradient, stay as they are. `family`: as for HfDirectory; without, an architecture that no family knows is read as `hf`.
    """
    path, cast = Path(path), partial(_matrix_in, MODEL_DTYPES[dtype])
    notes: list[str] = []
    if (path / "config.json").is_file():
        source = HfDirectory(path, family or _family_for(path, notes))
        return _opened(source.model, source.read_all(cast), path, path, device, dtype, notes)
    if family and path.is_dir():
        raise ConfigError(
            f"--family {family} has no effect on {path}, which is no Hugging Face directory (no config.json); leave it out"
        )

    def read(checkpoint: Path) -> Opened:
        return _opened(*read_checkpoint(checkpoint, cast), checkpoint / "tokenizer", device, dtype, [])

    return files.read_newest(path, read)


def _opened(
    model: Model,
    weights: dict[str, Tensor],
    place: Path,
    tokens: Path,
    device: torch.device | str,
    dtype: str,
    notes: list[str],
) -> Opened:
    if model.encoder.layers:
        raise ConfigError(f"{place} is an encoder-decoder; use tools/translate.py")
    network = build(model, weights, MODEL_DTYPES[dtype]).to(device)
    tokenizer = load_tokenizer(tokens)
    begin = begin_tokens(tokenizer, place)
    if asked := asked_tokens(tokenizer) if not begin and tokens is not place else []:
        notes.append(
            f"the tokenizer asks for token {', '.join(map(str, asked))} before a text; training had none there, and so has this"
        )
    return Opened(network, tokenizer, begin, frozenset(end_tokens(tokenizer, place)), notes)


def _family_for(directory: Path, notes: list[str]) -> str | None:
    try:
        family_of_hf(read_config(directory))
    except ConfigError:
        notes.append("no family of this program knows the architecture: read as model.family=hf, which transformers builds")
        return "hf"
    return None


def _matrix_in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """A matrix in this format; anything else as it is."""
    return tensor.to(dtype) if tensor.dim() > 1 and tensor.is_floating_point() else tensor


def best_device(name: str | None) -> str:
    """The requested device, or the best available one. Raises ConfigError for one that torch does not have."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.empty(1, device=name).is_meta:
            raise NotImplementedError
    except (NotImplementedError, ImportError) as error:
        raise ConfigError(f"--device={name}: this torch computes nothing there; leave --device out, or take cpu") from error
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device={name}: {str(error).splitlines()[0]}") from error
    return name


def read_hf(directory: Path) -> tuple[Model, dict[str, Tensor]]:
    """Shape and weights (whole, in fp32, by our names) of a Hugging Face model directory."""
    source = HfDirectory(directory)
    return source.model, source.read_all()


def read_checkpoint(path: Path, cast: Callable[[Tensor], Tensor] | None = None) -> tuple[Model, dict[str, Tensor], Path]:
    """Shape, weights (whole, on the CPU, by our names) and directory of a checkpoint, or of a run's newest; hashes verified."""
    checkpoint = files.checkpoints_at(path)[-1]
    files.verify(checkpoint)
    model = recorded_model(checkpoint, files.load_state(checkpoint))
    weights = {name.removeprefix("model."): tensor for name, tensor in Payload(checkpoint).read_all("model.").items()}
    _check_fit(checkpoint, model, weights)
    return model, weights if cast is None else {name: cast(tensor) for name, tensor in weights.items()}, checkpoint


def recorded_model(checkpoint: Path, state: dict[str, Any]) -> Model:
    """The shape of the model in a checkpoint with this state. Raises CheckpointError for one that no configuration gives."""
    model = files.model_of(checkpoint, state)
    try:
        family_of(model.family).complete(model)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint / files.STATE}: {error}; choose another checkpoint") from error
    return model


def _check_fit(checkpoint: Path, model: Model, weights: dict[str, Tensor]) -> None:
    """Raise CheckpointError if these are not the weights of the model that the checkpoint says it holds."""
    if family_of(model.family).is_ours:  # before a network of these sizes is built
        check_sizes(model, len(weights), sum(tensor.numel() for tensor in weights.values()), checkpoint / files.STATE)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in build_network(model).state_dict().items()}
    odd = sorted(name for name in expected.keys() | weights.keys() if expected.get(name) != _shape_of(weights.get(name)))
    if odd := [name for name in odd if not name.startswith(TRAINING_ONLY)]:
        here, there = (
            list(shape) if shape is not None else "none" for shape in (expected.get(odd[0]), _shape_of(weights.get(odd[0])))
        )
        raise CheckpointError(
            f"{checkpoint}: {odd[0]} has the shape {here} by the model of its state.json, and {there} among its weights; choose another checkpoint"
        )


def _shape_of(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def open_translator(path: Path) -> tuple[nn.Module, Tokenizer, Tokenizer]:
    """An encoder-decoder in fp32 on the CPU, and the tokenizers of its two sides. `path`: as for `open_model`."""
    if (path / "config.json").is_file():
        return _translator(*read_hf(path), path, path, path)

    def read(checkpoint: Path) -> tuple[nn.Module, Tokenizer, Tokenizer]:
        model, weights, _ = read_checkpoint(checkpoint)
        source, target = checkpoint / "source_tokenizer", checkpoint / "tokenizer"
        if model.encoder.share_embedding and not source.is_dir():  # trained on spans, or imported
            source = target
        return _translator(model, weights, checkpoint, source, target)

    return files.read_newest(path, read)


def _translator(
    model: Model, weights: dict[str, Tensor], place: Path, source: Path, target: Path
) -> tuple[nn.Module, Tokenizer, Tokenizer]:
    if not model.encoder.layers:
        raise ConfigError(f"{place} is a decoder alone; use tools/generate.py")
    return build(model, weights), load_tokenizer(source), load_tokenizer(target)


# ---- tokens around a text ---------------------------------------------------------------------------------------------

# Classes of transformers that put a BOS before a text unless their configuration says otherwise, of SentencePiece models.
_BEGINNING = ("LlamaTokenizer", "GemmaTokenizer", "CodeLlamaTokenizer")


def begin_tokens(tokenizer: Tokenizer, place: Path) -> list[int]:
    """What a model expects before a text. `place`: a checkpoint or a Hugging Face directory.

    An imported checkpoint remembers what its import found. A checkpoint of a run has no such tokens: in training, a text follows the end of the
    document before. For a Hugging Face directory the tokenizer decides.
    """
    if not (place / files.STATE).is_file():
        return asked_tokens(tokenizer)
    imported = files.load_state(place).get("imported")
    return [] if imported is None else [int(token) for token in imported["begin"]]


def asked_tokens(tokenizer: Tokenizer) -> list[int]:
    """What a tokenizer asks for before a text.

    With a tokenizer.json this is the beginning of its post-processor's template, as in transformers. Without a template it is the bos_token,
    if tokenizer_config.json beside it says add_bos_token. Older files ask in this way, but transformers 5 then puts nothing there. With a
    SentencePiece model, tokenizer_config.json decides: by that key, or by the class it names.
    """
    config = _object(tokenizer.file.parent / CONFIG_NAME)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        template = _template(tokenizer.specification().get("post_processor"))
        if template or config.get("add_bos_token") is not True:
            return template
    elif not config.get("add_bos_token", config.get("tokenizer_class") in _BEGINNING):
        return []
    named = config.get("bos_token") or "<s>"
    token = tokenizer.special_id(named.get("content") if isinstance(named, dict) else named)
    return [] if token is None else [token]


def _template(post: Any) -> list[int]:
    """Tokens that a post-processor of a tokenizer.json puts before a single text."""
    post = post if isinstance(post, dict) else {}
    match post.get("type"):
        case "TemplateProcessing":
            before: list[int] = []
            for piece in post["single"]:
                if "SpecialToken" not in piece:
                    break
                before += post["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
            return before
        case "BertProcessing" | "RobertaProcessing":
            return [post["cls"][1]]
        case "Sequence":
            return [token for inner in post["processors"] for token in _template(inner)]
    return []


def end_tokens(tokenizer: Tokenizer, place: Path) -> set[int]:
    """The end of a document, and every eos_token_id of generation_config.json and config.json: chat models have several."""
    return {tokenizer.eod_id} | named_ends(place)


def named_ends(place: Path) -> set[int]:
    """Every eos_token_id of generation_config.json and config.json. Raises CheckpointError for what is no token, nor a list of them."""
    ends: set[int] = set()
    for name in (GENERATION_FILE, "config.json"):
        said = _object(place / name).get("eos_token_id")
        named = said if isinstance(said, list) else [] if said is None else [said]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in named):
            raise CheckpointError(f"{place / name}: eos_token_id={shown(said)} is no token, nor a list of them")
        ends |= set(named)
    return ends


def _object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty where there is no such file."""
    content = files.read_json(path, 4 * LARGEST_CONFIG) if path.is_file() else {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content
