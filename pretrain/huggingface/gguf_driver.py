"""Runs llama.cpp's own converter, told what it cannot find out: run as a script, by a Python that has what the converter needs.

    python gguf_driver.py < TASK    an object of JSON, which gguf.py makes

The converter recognises a byte-level BPE by a hash of the ids that it gives for one text. A newly trained vocabulary never matches. The
converter also asks each family where its vocabulary may be. So this script writes the vocabulary by what it is, whatever the family, and reads
it back from the file. It imports nothing of this package, because the Python may be another.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def main() -> None:
    """Read the task as JSON from standard input, and carry it out."""
    task: dict[str, Any] = json.load(sys.stdin)
    convert(load_converter(Path(task["llama_cpp"])), task)


def convert(script: ModuleType, task: dict[str, Any]) -> None:
    """Convert as the task says, with the module that `load_converter` gives; once in a process."""
    base = sys.modules.get("conversion.base", script)
    teach(base.ModelBase, base.TextModel, task)
    sys.argv = [script.__name__, task["model"], "--outfile", task["output"], "--outtype", task["format"]]
    sys.argv += ["--model-name", task["name"]]
    script.main()
    check(script.gguf.GGUFReader(task["output"]), task)


def load_converter(directory: Path) -> ModuleType:
    """llama.cpp's convert_hf_to_gguf.py, with the gguf package that lies beside it."""
    sys.path[:0] = [str(directory), str(directory / "gguf-py")]
    path = directory / "convert_hf_to_gguf.py"
    spec = importlib.util.spec_from_file_location("convert_hf_to_gguf", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    for name in ("ModelBase", "TextModel"):
        if not hasattr(sys.modules.get("conversion.base", script), name):
            raise SystemExit(f"{path}: has no {name}; this version of the converter is not known here")
    return script


def teach(model_base: Any, text_model: Any, task: dict[str, Any]) -> None:
    """Replace what the converter guesses by what the task says."""
    load, create = model_base.load_hparams, text_model.__init__

    def load_hparams(directory: Path, *rest: Any, **options: Any) -> dict[str, Any]:
        # transformers 5 drops fields that the converter reads, such as GPT-NeoX's rotary_pct.
        return {**json.loads((Path(directory) / "config.json").read_text("utf-8")), **load(directory, *rest, **options)}

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        if task["vocabulary"] is not None:
            self.get_vocab_base_pre = lambda tokenizer: task["vocabulary"]["pre"]
            self.set_vocab = lambda: set_vocab(self, task["vocabulary"])
        set_parameters = self.set_gguf_parameters
        self.set_gguf_parameters = lambda: (set_parameters(), set_windows(self, task["windows"]))

    model_base.load_hparams = staticmethod(load_hparams)
    text_model.__init__ = __init__


def set_vocab(model: Any, vocabulary: dict[str, Any]) -> None:
    """Let llama.cpp's converter write the tokenizer, with the reader for its kind."""
    if vocabulary["model"] == "gpt2":
        model._set_vocab_gpt2()
    else:
        model._set_vocab_sentencepiece()
        model.gguf_writer.add_add_space_prefix(vocabulary["space_prefix"])


def set_windows(model: Any, windows: list[bool] | None) -> None:
    """Which layers have the sliding window; without it llama.cpp takes the pattern of the published models."""
    if windows is not None:
        model.gguf_writer.add_sliding_window_pattern(windows)


def check(reader: Any, task: dict[str, Any]) -> None:
    """Read back what decides how text is read. SystemExit names the first field that is not as it should be."""
    expected = dict(task["expected"])
    if task["windows"] is not None:
        expected[f"{reader.fields['general.architecture'].contents()}.attention.sliding_window_pattern"] = task["windows"]
    for name, value in expected.items():
        field = reader.fields.get(name)
        found = None if field is None else field.contents()
        if found != value:
            raise SystemExit(
                f"{name} is {str(found)[:80]} in the file that the converter wrote, and should be {str(value)[:80]}"
            )


if __name__ == "__main__":
    main()
