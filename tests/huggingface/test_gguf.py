"""What to-gguf tells llama.cpp's converter, held with a stand-in for it; tests/clients/ has the real one, built from source."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from converting import SMALL, write
from running import tool

from pretrain.config.attention_schema import AttentionConfig
from pretrain.config.model_schema import MlpConfig, Model
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.huggingface.export_model import export
from pretrain.huggingface.gguf import CONVERTER, plan_gguf, to_gguf
from pretrain.models.families import complete, family_of

STAND_IN = """
import argparse, json, sys
from pathlib import Path
import gguf

class ModelBase:
    @staticmethod
    def load_hparams(directory, is_mistral_format=False):
        config = json.loads((Path(directory) / "config.json").read_text())
        return {name: value for name, value in config.items() if name != "rotary_pct"}  # as transformers 5 does

class TextModel(ModelBase):
    def __init__(self, directory, file):
        self.directory, self.file, self.gguf_writer = Path(directory), Path(file), gguf.Writer()
        self.hparams = ModelBase.load_hparams(directory, is_mistral_format=False)
    def set_vocab(self):
        raise SystemExit("the family's own vocabulary was written")
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
    def _set_vocab_gpt2(self):
        content = json.loads((self.directory / "tokenizer.json").read_text())
        fields = self.gguf_writer.fields
        fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"] = "gpt2", self.get_vocab_base_pre(None)
        fields["tokenizer.ggml.merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    def _set_vocab_sentencepiece(self):
        from sentencepiece import SentencePieceProcessor
        model = SentencePieceProcessor(model_file=str(self.directory / "tokenizer.model"))
        fields, rows = self.gguf_writer.fields, self.hparams["vocab_size"]
        scores = [model.get_score(id) for id in range(len(model))]
        fields["tokenizer.ggml.scores"] = SCORES(scores + [-10000.0] * (rows - len(scores)))
        fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"] = "llama", "default"
    def set_gguf_parameters(self):
        self.gguf_writer.fields["hparams"] = self.hparams
    def write(self):
        self.set_vocab()
        self.set_gguf_parameters()
        fields = self.gguf_writer.fields | {"general.architecture": "stand-in", "general.name": arguments.model_name}
        for role in ("bos", "eos"):
            fields[f"tokenizer.ggml.{role}_token_id"] = self.hparams[f"{role}_token_id"]
        fields["tokenizer.ggml.add_bos_token"] = json.loads((self.directory / "tokenizer_config.json").read_text())["add_bos_token"]
        fields["outtype"] = arguments.outtype
        self.file.write_text(json.dumps(fields))

SCORES = list

def main():
    global arguments
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("--outfile", "--outtype", "--model-name"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    print("a lot of words")
    TextModel(arguments.model, arguments.outfile).write()
"""
GGUF = """
import json
class Writer:
    def __init__(self):
        self.fields = {}
    def add_add_space_prefix(self, flag):
        self.fields["tokenizer.ggml.add_space_prefix"] = flag
    def add_sliding_window_pattern(self, flags):
        self.fields["stand-in.attention.sliding_window_pattern"] = flags
class Field:
    def __init__(self, value):
        self.value = value
    def contents(self):
        return self.value
class GGUFReader:
    def __init__(self, path):
        self.fields = {name: Field(value) for name, value in json.load(open(path)).items()}
"""


@pytest.fixture
def llama_cpp(tmp_path) -> Path:
    """A directory that looks like llama.cpp's."""
    folder = tmp_path / "llama.cpp"
    (folder / "gguf-py" / "gguf").mkdir(parents=True)
    (folder / "gguf-py" / "gguf" / "__init__.py").write_text(GGUF)
    (folder / CONVERTER).write_text(STAND_IN)
    return folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text.txt").write_text(
        "".join(f"def f{i}(x):\n    return x + {i * i}  # the sum of things\n" for i in range(300))
    )
    sizes = {"bpe": 320, "unigram": 290, "byte_bpe": 320, "byte": None, "char": None}
    for kind, size in sizes.items():
        train_tokenizer([str(folder / "text.txt")], folder / kind, kind, size)
    return {kind: folder / kind for kind in sizes}


def exported(tmp_path: Path, tokenizer: Path, model: Model = SMALL) -> Path:
    export(write(tmp_path / "checkpoint", tokenizer, dataclasses.replace(model, max_sequence_length=96)), tmp_path / "hf")
    return tmp_path / "hf"


def converted(tmp_path: Path, llama_cpp: Path, *arguments, **options) -> dict:
    to_gguf(tmp_path / "hf", tmp_path / "out.gguf", llama_cpp, *arguments, **options)
    assert sorted(path.name for path in tmp_path.glob("*out.gguf*")) == ["out.gguf"]
    return json.loads((tmp_path / "out.gguf").read_text())


def test_sentencepiece_pieces_are_written_with_scores_and_without_a_leading_space(tokenizers, llama_cpp, tmp_path):
    """CL-1a, CL-1d, CL-1e: whatever the family's own converter class would do."""
    exported(tmp_path, tokenizers["bpe"], dataclasses.replace(SMALL, family="qwen3", vocab_size=333))
    written = converted(tmp_path, llama_cpp)
    eod = load_tokenizer(tokenizers["bpe"]).eod_id
    assert written["tokenizer.ggml.model"] == "llama" and written["tokenizer.ggml.add_space_prefix"] is False
    assert written["tokenizer.ggml.bos_token_id"] == written["tokenizer.ggml.eos_token_id"] == eod
    assert len(written["tokenizer.ggml.scores"]) == 333 and len(set(written["tokenizer.ggml.scores"])) > 20
    assert written["outtype"] == "f32" and written["general.name"] == "out"


def test_byte_level_bpe_is_said_to_split_as_it_does(tokenizers, llama_cpp, tmp_path):
    """CL-1f, CL-1g: the converter knows vocabularies by a hash, which a new one never has; in phi3 it looks for another file."""
    exported(tmp_path, tokenizers["byte_bpe"], dataclasses.replace(SMALL, family="phi3"))
    written = converted(tmp_path, llama_cpp, "bf16", "a name")
    assert (written["tokenizer.ggml.model"], written["tokenizer.ggml.pre"]) == ("gpt2", "dbrx")
    assert written["tokenizer.ggml.merges"] and written["tokenizer.ggml.add_bos_token"] is False
    assert (written["outtype"], written["general.name"]) == ("bf16", "a name")


def test_fields_that_transformers_5_drops_reach_the_converter(tokenizers, llama_cpp, tmp_path):
    """CL-1j: GPT-NeoX's rotary_pct."""
    exported(tmp_path, tokenizers["byte_bpe"], Model(family="gpt_neox", dim=32, layers=2, heads=4))
    assert converted(tmp_path, llama_cpp)["hparams"]["rotary_pct"] == 0.25


def test_which_layers_have_a_window_is_written(tokenizers, llama_cpp, tmp_path):
    model = dataclasses.replace(
        SMALL, family="gemma2", layers=3, attention=AttentionConfig(window=8, window_pattern=[False, True, True])
    )
    exported(tmp_path, tokenizers["bpe"], model)
    assert converted(tmp_path, llama_cpp)["stand-in.attention.sliding_window_pattern"] == [False, True, True]
    [note] = plan_gguf(tmp_path / "hf", "x").notes
    assert "in a field that older llama.cpp ignores" in note
    usual = dataclasses.replace(model, attention=AttentionConfig(window=8))
    export(write(tmp_path / "other", tokenizers["bpe"], usual), tmp_path / "usual")
    assert plan_gguf(tmp_path / "usual", "x").notes == []


def test_a_window_as_wide_as_the_context_is_none(tokenizers, llama_cpp, tmp_path):
    """StarCoder2, whose window is wider than a small model's context, ended in a KeyError."""
    model = dataclasses.replace(SMALL, family="starcoder2", attention=AttentionConfig(window=4096))
    exported(tmp_path, tokenizers["bpe"], model)
    plan = plan_gguf(tmp_path / "hf", "x")
    assert (plan.problem, plan.notes, plan.task["windows"]) == (None, [], None)
    export(
        write(tmp_path / "other", tokenizers["bpe"], dataclasses.replace(model, attention=AttentionConfig(window=8))),
        tmp_path / "narrow",
    )
    assert "model.attention.window=8 is not what llama.cpp computes" in plan_gguf(tmp_path / "narrow", "x").problem


def test_what_llama_cpp_computes_otherwise_is_refused_unless_that_is_meant(tokenizers, llama_cpp, tmp_path):
    """CL-1k: a sliding window of Mistral, which the converter drops without a word."""
    exported(tmp_path, tokenizers["bpe"], dataclasses.replace(SMALL, family="mistral", attention=AttentionConfig(window=8)))
    with pytest.raises(
        ConfigError, match="model.attention.window=8 is ignored by llama.cpp.*; --inexact converts it all the same"
    ):
        to_gguf(tmp_path / "hf", tmp_path / "out.gguf", llama_cpp)
    assert not (tmp_path / "out.gguf").exists()
    converted(tmp_path, llama_cpp, inexact=True)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("unigram", "llama.cpp has no SentencePiece unigram"),
        ("byte", r"no tokenizer of this kind \(BPE without merges\)"),
        ("char", r"no tokenizer of this kind \(WordLevel\)"),
    ],
)
def test_tokenizers_that_llama_cpp_lacks_are_refused(tokenizers, tmp_path, kind, message):
    exported(tmp_path, tokenizers[kind])
    with pytest.raises(DataError, match=message):
        plan_gguf(tmp_path / "hf", "x")


def test_pieces_without_their_scores_are_refused(tokenizers, tmp_path):
    """CL-1a: an export as it was made before tokenizer.model stood beside tokenizer.json."""
    (exported(tmp_path, tokenizers["bpe"]) / "tokenizer.model").unlink()
    with pytest.raises(DataError, match="needs tokenizer.model beside tokenizer.json: llama.cpp merges by its scores"):
        plan_gguf(tmp_path / "hf", "x")


def test_a_tokenizer_of_elsewhere_is_left_to_the_converter(tokenizers, tmp_path):
    content_path = exported(tmp_path, tokenizers["byte_bpe"]) / "tokenizer.json"
    content = json.loads(content_path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\p{N}| ?\p{L}+"}
    content_path.write_text(json.dumps(content))
    plan = plan_gguf(tmp_path / "hf", "x")
    assert plan.task["vocabulary"] is None and plan.task["expected"] == {}


def test_a_configuration_without_the_rows_of_a_sentencepiece_model_is_refused(tokenizers, tmp_path):
    """It was a KeyError, and an IndexError for an added token beyond the rows."""
    path = exported(tmp_path, tokenizers["bpe"]) / "config.json"
    content = json.loads(path.read_text())
    rows = content.pop("vocab_size")
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="config.json: has no vocab_size; give a directory that to-hf wrote"):
        plan_gguf(tmp_path / "hf", "x")
    path.write_text(json.dumps(content | {"vocab_size": rows}))
    tokenizer = path.with_name("tokenizer_config.json")
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"added_tokens_decoder": {str(rows): {}}}))
    with pytest.raises(ConfigError, match=f"adds token {rows}, but config.json has vocab_size={rows}; give"):
        plan_gguf(tmp_path / "hf", "x")


@pytest.mark.parametrize("name", ["phi3-small", "My-Phi-3"])
def test_names_that_llama_cpp_has_rules_for_are_refused(tokenizers, tmp_path, name):
    """CL-1h: by such a name it looks for special tokens that are not there, and does not load."""
    exported(tmp_path, tokenizers["bpe"])
    with pytest.raises(ConfigError, match=f"{name}: llama.cpp has rules of its own .* give another with --name"):
        plan_gguf(tmp_path / "hf", name)


def test_failures_are_one_line_and_leave_the_converters_words(tokenizers, llama_cpp, tmp_path):
    exported(tmp_path, tokenizers["bpe"])
    source = (llama_cpp / CONVERTER).read_text()
    mine = tmp_path / "out.gguf.log"  # it was emptied, and removed after a success
    mine.write_text("mine")
    for changed, message in (
        (
            source.replace("SCORES = list", "SCORES = lambda scores: [-1000.0] * len(scores)"),
            "tokenizer.ggml.scores is .* should be",
        ),
        (source.replace("class TextModel", "class Other"), "has no TextModel; this version of the converter is not known here"),
        (source.replace("import gguf", "import no_such_package"), "No module named 'no_such_package'"),
        (source.replace('print("a lot of words")', "import os; os._exit(7)"), "exit code 7"),
    ):
        (llama_cpp / CONVERTER).write_text(changed)
        with pytest.raises(
            CheckpointError, match=f"llama.cpp's converter failed: .*{message}.*; all that it said is in"
        ) as caught:
            to_gguf(tmp_path / "hf", tmp_path / "out.gguf", llama_cpp)
        assert "\n" not in str(caught.value)
        [log] = [path for path in tmp_path.glob("*out.gguf*") if path != mine]
        assert str(caught.value).endswith(f"all that it said is in {log}")
        log.unlink()
    (llama_cpp / CONVERTER).write_text(source)
    to_gguf(tmp_path / "hf", tmp_path / "out.gguf", llama_cpp)
    assert sorted(path.name for path in tmp_path.glob("*out.gguf*")) == ["out.gguf", "out.gguf.log"] and mine.read_text() == "mine"
    (tmp_path / "out.gguf").unlink()
    with pytest.raises(ConfigError, match=f"has no {CONVERTER}; give a checkout of llama.cpp"):
        to_gguf(tmp_path / "hf", tmp_path / "out.gguf", tmp_path)
    with pytest.raises(CheckpointError, match="no_python: No such file"):
        to_gguf(tmp_path / "hf", tmp_path / "out.gguf", llama_cpp, python=tmp_path / "no_python")
    (tmp_path / "out.gguf").write_text("mine")
    with pytest.raises(DataError, match="already exists"):
        to_gguf(tmp_path / "hf", tmp_path / "out.gguf", llama_cpp)


def test_the_tool_converts(tokenizers, llama_cpp, tmp_path, capsys):
    main = tool("convert_checkpoint").main
    exported(tmp_path, tokenizers["byte_bpe"])
    output = str(tmp_path / "out.gguf")
    command = ["to-gguf", "--model", str(tmp_path / "hf"), "--llama-cpp", str(llama_cpp), "--output", output]
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == output and "merges or scores and special tokens in the file are those of the export" in printed[-2]
    assert main(command) == 1 and "already exists" in capsys.readouterr().err


def test_every_switch_of_a_family_that_is_named_for_llama_cpp_exists():
    from pretrain.models.families import families
    from pretrain.models.shape import flat

    names = flat(complete(Model(dim=32, layers=2, heads=4, vocab_size=61, mlp=MlpConfig()), 64)).keys()
    for family in families():
        assert set(family.llama_cpp or ()) <= set(names), family.name
    assert family_of("llama").llama_cpp is not None
