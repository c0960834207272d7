"""Run as a script: converts exports with llama.cpp's converter, as gguf_driver.py does or without it, and asks llama.cpp's library what it
makes of them. Tasks come as JSON on standard input, answers leave as JSON lines; each task has a process of its own.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import sentencepiece  # noqa: F401  imported here, once, and not in the process of every task
import torch
import transformers  # noqa: F401


def module_at(name: str, path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LlamaModel:
    """A GGUF file in llama.cpp: fp32 keys and values, no flash attention, one thread."""

    def __init__(self, bindings: str, library: str, file: str) -> None:
        package = types.ModuleType("llama_cpp")  # without the package's own __init__, which needs more packages
        package.__path__ = [bindings]
        sys.modules["llama_cpp"] = package
        os.environ["LLAMA_CPP_LIB_PATH"] = library
        self.c = importlib.import_module("llama_cpp.llama_cpp")
        self.quiet = self.c.llama_log_callback(lambda level, text, data: None)  # kept: the library holds a pointer
        self.c.llama_log_set(self.quiet, None)
        self.c.llama_backend_init()
        options = self.c.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = self.c.llama_model_load_from_file(file.encode(), options)
        if not self.model:
            raise RuntimeError("llama.cpp does not load it")
        self.vocabulary = self.c.llama_model_get_vocab(self.model)
        self.rows = self.c.llama_vocab_n_tokens(self.vocabulary)

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids with what llama.cpp adds by itself; `special`: read the texts of special tokens as tokens."""
        data = text.encode()
        buffer = (self.c.llama_token * (len(data) + 16))()
        count = self.c.llama_tokenize(self.vocabulary, data, len(data), buffer, len(buffer), True, special)
        return list(buffer[:count])

    def pieces(self, ids: list[int]) -> bytes:
        """The text of ids, token by token, as it is generated."""
        text = b""
        for id in ids:
            buffer = ctypes.create_string_buffer(512)
            count = self.c.llama_token_to_piece(self.vocabulary, id, buffer, 512, 0, True)
            text += buffer.raw[:count]
        return text

    def logits(self, ids: list[int]) -> np.ndarray:
        options = self.c.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = 0
        options.flash_attn_type = 0
        options.swa_full = True
        context = self.c.llama_init_from_model(self.model, options)
        batch = self.c.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, id in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = id, i, 1, 0, 1
        if self.c.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        rows = [
            np.ctypeslib.as_array(self.c.llama_get_logits_ith(context, i), shape=(self.rows,)).copy() for i in range(len(ids))
        ]
        self.c.llama_batch_free(batch)
        self.c.llama_free(context)
        return np.stack(rows)

    def continued(self, text: str, count: int) -> list[int]:
        """Greedy tokens after a text that llama.cpp itself encodes."""
        ids = self.encode(text, False)
        start = len(ids)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[start:]


def answer(task: dict, asked: dict, driver: types.ModuleType, script: types.ModuleType) -> dict:
    file = task["gguf"]["output"]
    if task.get("alone"):  # the converter as its users call it
        sys.argv = ["convert", task["gguf"]["model"], "--outfile", file, "--outtype", "f32"]
        script.main()
    else:
        driver.convert(script, task["gguf"])
    model = LlamaModel(asked["bindings"], asked["library"], file)
    said: dict = {"bos": model.c.llama_vocab_bos(model.vocabulary), "eos": model.c.llama_vocab_eos(model.vocabulary)}
    if "ids" in task:
        torch.save(torch.from_numpy(model.logits(task["ids"])), task["logits"])
    if "texts" in task:
        said["plain"] = [model.encode(text, False) for text in task["texts"]]
        said["special"] = [model.encode(text, True) for text in task["texts"]]
        said["decoded"] = [model.pieces(ids).decode(errors="replace") for ids in said["plain"]]
    if "prompts" in task:
        said["continued"] = [model.continued(text, task["count"]) for text in task["prompts"]]
    return said


def main() -> None:
    asked = json.load(sys.stdin)
    torch.set_num_threads(1)
    driver = module_at("gguf_driver", asked["driver"])
    script = driver.load_converter(Path(asked["sources"]))
    lines = os.dup(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    for task in asked["tasks"]:
        number = os.fork()
        if number == 0:
            try:
                said = answer(task, asked, driver, script)
            except BaseException as error:  # is an answer as well
                said = {"error": f"{type(error).__name__}: {error}"}
            os.write(lines, (json.dumps(said) + "\n").encode())
            os._exit(0)
        _, status = os.waitpid(number, 0)
        if status:
            os.write(lines, (json.dumps({"error": f"ended with status {status}"}) + "\n").encode())
        Path(task["gguf"]["output"]).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
