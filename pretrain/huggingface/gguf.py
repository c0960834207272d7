"""Exported directory -> GGUF file for llama.cpp, written by llama.cpp's own converter.

The converter is the user's (`--llama-cpp`), and so may be the Python that runs it. That Python runs gguf_driver.py, which tells the converter
what it cannot find out about a newly trained tokenizer. This file decides whether llama.cpp computes the model at all, and how the vocabulary
has to be written so that llama.cpp gives our ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint import files
from pretrain.data.tokenizers.tokenizer import CONFIG_NAME, JSON_NAME, MODEL_NAME
from pretrain.data.tokenizers.tokenizer_training import SPLIT_PATTERN
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.huggingface.directory import read_config
from pretrain.models.families import family_of_hf
from pretrain.models.families.declare.other_readers import WINDOWS, llama_cpp_problem
from pretrain.models.layer_specs import cycled, has_windows
from pretrain.progress import ByteProgress
from pretrain.storage import flush, refuse_existing

GGUF_DTYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "q8_0": "q8_0"}
CONVERTER = "convert_hf_to_gguf.py"
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "q8_0": 34 / 32}
_DRIVER = Path(__file__).with_name("gguf_driver.py")
# llama.cpp treats the special tokens of a model by such a name otherwise, and may not load it at all.
_NAMES_WITH_RULES = ("phi3", "phi-3", "modern-bert")
# What llama.cpp calls the splitting of our byte-level BPE, which is Llama 3's. Its name for Llama 3 itself would also put a token before
# every text, and look whole words up before it merges.
_SPLITS = {SPLIT_PATTERN: "dbrx"}
_UNTRAINED = -10000.0  # the converter's score of rows that are no token
_ADDED = -1000.0


@dataclass(frozen=True)
class GgufPlan:
    """What a conversion does. `task`: for gguf_driver.py; `problem`: why llama.cpp would compute another model, None where it would not;
    `notes`: what else to tell the user.
    """

    task: dict[str, Any]
    problem: str | None
    notes: list[str]


def to_gguf(
    directory: Path,
    output: Path,
    llama_cpp: Path,
    dtype: str = "fp32",
    name: str | None = None,
    python: Path | None = None,
    inexact: bool = False,
) -> GgufPlan:
    """Convert an exported `directory` to the file `output` with the converter in `llama_cpp`; what was done.

    `name`: of the model, in the file; by default the file's. `python`: what runs the converter, which needs torch, transformers and
    sentencepiece; by default this one. `inexact`: convert also what llama.cpp computes otherwise. Raises ConfigError, DataError or
    CheckpointError, and leaves nothing behind but the converter's own words, when it cannot be done.
    """
    refuse_existing(output)
    if not (llama_cpp / CONVERTER).is_file():
        raise ConfigError(
            f"--llama-cpp {llama_cpp}: has no {CONVERTER}; give a checkout of llama.cpp, or vendor/llama.cpp of llama-cpp-python's source package"
        )
    plan = plan_gguf(directory, name or output.stem)
    if plan.problem and not inexact:
        raise ConfigError(f"{directory}: {plan.problem}; --inexact converts it all the same")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        written, log = Path(folder) / "model.gguf", Path(folder) / "log"
        task = plan.task | {"llama_cpp": str(llama_cpp.resolve()), "output": str(written), "format": GGUF_DTYPES[dtype]}
        weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        total = round(weights * _BYTES[dtype] / _BYTES[_dtype_of(directory)])
        code = _run(task, python or Path(sys.executable), log, written, total)
        if code or not written.is_file():
            raise CheckpointError(_failure(code, log, output))
        os.replace(written, output)
    flush(output)
    flush(output.parent)
    return plan


def plan_gguf(directory: Path, name: str) -> GgufPlan:
    """Decide how a directory is converted, without llama.cpp. Raises ConfigError or DataError where it cannot be."""
    if found := next((part for part in _NAMES_WITH_RULES if part in name.lower()), None):
        raise ConfigError(
            f"{name}: llama.cpp has rules of its own for models with {found} in their name; give another with --name"
        )
    config = read_config(directory)
    notes: list[str] = []
    windows = None
    try:
        family = family_of_hf(config)
        model = family.from_hf(config)
        problem = llama_cpp_problem(family, model)
        flags = has_windows(model)
        usual = family.defaults.get("attention.window_pattern")  # known to llama.cpp where it has windows at all
        if family.llama_cpp and WINDOWS.keys() <= family.llama_cpp.keys() and usual and any(flags):
            windows = flags
            if flags != cycled(usual, model.layers):
                notes.append("which layers have a window is told in the file, in a field that older llama.cpp ignores")
    except ConfigError as error:
        problem = f"whether llama.cpp computes this model as transformers does is not known ({error})"
    vocabulary, expected = _vocabulary(directory, config)
    task = {"model": str(directory.resolve()), "name": name, "vocabulary": vocabulary, "windows": windows, "expected": expected}
    return GgufPlan(task, problem, notes)


# ---- the vocabulary ---------------------------------------------------------------------------------------------------


def _vocabulary(directory: Path, config: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """How to write it, None to leave that to the converter, and fields that the file has to have then. Raises DataError for tokenizers that
    llama.cpp does not have, or that its converter would write wrongly without a word.
    """
    said = files.read_json(directory / CONFIG_NAME) if (directory / CONFIG_NAME).is_file() else {}
    ids = {role: config.get(f"{role}_token_id") for role in ("bos", "eos")}
    expected = {f"tokenizer.ggml.{role}_token_id": id for role, id in ids.items() if isinstance(id, int)}
    if said.get("add_bos_token") is False:
        expected["tokenizer.ggml.add_bos_token"] = False
    if (directory / MODEL_NAME).is_file():
        return _pieces(directory, said, config, expected)
    if not (directory / JSON_NAME).is_file():
        raise DataError(
            f"{directory}: has neither {MODEL_NAME} nor {JSON_NAME}; llama.cpp has no SentencePiece unigram with bytes, and needs a tokenizer"
        )
    content = files.read_json(directory / JSON_NAME)
    model = content.get("model") or {}
    if model.get("type") != "BPE" or not model.get("merges"):
        kind = "BPE without merges" if model.get("type") == "BPE" else model.get("type")
        raise DataError(
            f"{directory / JSON_NAME}: llama.cpp has no tokenizer of this kind ({kind}); train one of type byte_bpe or bpe"
        )
    if model.get("byte_fallback"):
        raise DataError(
            f"{directory}: needs {MODEL_NAME} beside {JSON_NAME}: llama.cpp merges by its scores; export the model again"
        )
    if (pre := _split_of(content)) is None:
        return None, {}  # not ours: the converter knows it, or says that it does not
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    expected |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
    return {"model": "gpt2", "pre": pre}, expected


def _split_of(content: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer.json of ours splits texts; None for others."""
    parts = (content.get("pre_tokenizer") or {}).get("pretokenizers") or []
    if content.get("normalizer") or content["model"].get("ignore_merges") or len(parts) != 2:
        return None
    split, level = parts
    plain = level.get("type") == "ByteLevel" and not level.get("use_regex") and not level.get("add_prefix_space")
    isolated = split.get("type") == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    return _SPLITS.get(split["pattern"].get("Regex")) if plain and isolated else None


def _pieces(
    directory: Path, said: dict[str, Any], config: dict[str, Any], expected: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A SentencePiece model, which llama.cpp reads as pieces with scores."""
    from sentencepiece import sentencepiece_model_pb2

    path, rows, added = directory / MODEL_NAME, config.get("vocab_size"), said.get("added_tokens_decoder") or {}
    if not isinstance(rows, int):
        raise ConfigError(f"{directory / 'config.json'}: has no vocab_size; give a directory that to-hf wrote")
    if beyond := [id for id in added if int(id) >= rows]:
        raise ConfigError(
            f"{directory / CONFIG_NAME}: adds token {beyond[0]}, but config.json has vocab_size={rows}; give a directory that to-hf wrote"
        )
    proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        raise DataError(f"{path}: llama.cpp would read it as BPE, and it is unigram; train a tokenizer of type bpe or byte_bpe")
    if proto.normalizer_spec.precompiled_charsmap or proto.normalizer_spec.remove_extra_whitespaces:
        raise DataError(f"{path}: normalises texts, which llama.cpp does not; train a tokenizer with tools/train_tokenizer.py")
    scores = [piece.score for piece in proto.pieces][:rows]
    scores += [_UNTRAINED] * (rows - len(scores))
    for id in added:
        scores[int(id)] = _ADDED
    space = bool(proto.normalizer_spec.add_dummy_prefix)
    expected |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": space,
    }
    return {"model": "llama", "pre": "default", "space_prefix": space}, expected


# ---- the converter ----------------------------------------------------------------------------------------------------


def _dtype_of(directory: Path) -> str:
    said = str(read_config(directory).get("dtype", "")).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(said, "fp32")


def _run(task: dict[str, Any], python: Path, log: Path, written: Path, total: int) -> int:
    """Run the driver to its end, with all that it says in `log`. Returns its exit code. Raises CheckpointError if it cannot be started."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        with open(log, "wb") as said, ByteProgress("converting", total) as done:
            process = subprocess.Popen(
                [str(python), str(_DRIVER)], stdin=subprocess.PIPE, stdout=said, stderr=said, env=environment
            )
            try:
                process.stdin.write(json.dumps(task).encode())
                process.stdin.close()
                while process.poll() is None:
                    time.sleep(0.1)
                    size = written.stat().st_size if written.is_file() else 0
                    done.add(max(0, min(size, total) - done.done))
            finally:
                process.kill()
                process.wait()
    except BrokenPipeError:
        pass  # it ended at once, which its exit code says
    except OSError as error:
        raise CheckpointError(f"{error.filename or python}: {error.strerror or error}") from error
    return process.returncode


def _failure(code: int, log: Path, output: Path) -> str:
    """The last line that the converter said. All of it is kept beside the output, under a name that no file has."""
    lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
    handle, kept = tempfile.mkstemp(".log", f"{output.name}.", output.parent)
    os.close(handle)
    os.replace(log, kept)
    return f"llama.cpp's converter failed: {lines[-1].strip()}; all that it said is in {kept}"
