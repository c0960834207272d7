"""The command-line tools on checkpoints and exports: what they print, how they end, what they generate."""

from __future__ import annotations

import json
import os

import pytest
import torch
from converting import PROMPT, automatic
from running import tool

from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.huggingface.export_model import export


def test_the_conversion_tool_converts_and_verifies_both_ways(run, tmp_path, capsys):
    main = tool("convert_checkpoint").main
    assert main(["to-hf", "--checkpoint", str(run), "--output", str(tmp_path / "hf"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "exported" in printed and "step-00000010" in printed and "fp32" in printed
    assert "verified: transformers' logits differ from ours by at most" in printed
    assert main(["from-hf", "--model", str(tmp_path / "hf"), "--output", str(tmp_path / "ours"), "--verify"]) == 0
    assert "tokenizer: copied\n" in capsys.readouterr().out
    assert tool("verify_checkpoint").main([str(tmp_path / "ours")]) == 0
    assert capsys.readouterr().out.startswith(f"good     {tmp_path / 'ours'}: ")


def test_the_tools_exit_with_1_on_failure_and_2_on_bad_usage(exported, tmp_path, capsys):
    convert, generate, verify = (tool(n).main for n in ("convert_checkpoint", "generate", "verify_checkpoint"))
    failures = [
        (convert, ["to-hf", "--checkpoint", str(tmp_path / "nothing"), "--output", str(tmp_path / "out")], 1),
        (convert, ["from-hf", "--model", str(tmp_path), "--output", str(tmp_path / "out")], 1),
        (generate, ["--model", str(tmp_path / "nothing"), "--prompt", "a", "--max-tokens", "3"], 1),
        (verify, [str(tmp_path / "nothing")], 1),
        (generate, ["--model", str(exported), "--prompt", "a", "--max-tokens", "3", "--device", "warp"], 2),
    ]
    for main, arguments, code in failures:
        assert main(arguments) == code, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert "error: --device=warp: " in error
    for device in ("meta", "vulkan"):  # a NotImplementedError of the first token; torch's list of what it can dispatch to
        assert generate(["--model", str(exported), "--prompt", "a", "--max-tokens", "3", "--device", device]) == 2
        error = capsys.readouterr().err
        assert error == f"error: --device={device}: this torch computes nothing there; leave --device out, or take cpu\n"
    for main, arguments in (
        (convert, ["to-hf", "--checkpoint", "x"]),
        (convert, ["to-hf", "--checkpoint", "x", "--output", "y", "--dtype", "int8"]),
        (convert, ["to-hf", "--checkpoint", "x", "--output", "y", "--shard-gb", "0"]),
        (convert, ["to-hf", "--checkpoint", "x", "--output", "y", "--shard-gb", "inf"]),
        (generate, ["--model", "x", "--prompt", "a", "--max-tokens", "0"]),
        (generate, ["--model", "x", "--prompt", "a", "--max-tokens", "3", "--temperature", "0"]),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("which", ["run", "tied"])
@pytest.mark.parametrize("prompt", [PROMPT, ""])
def test_greedy_generation_is_that_of_transformers_token_for_token(request, tmp_path, capsys, which, prompt):
    source = request.getfixturevalue(which)
    output = tmp_path / "hf"
    export(source, output)
    printed = []
    for place in (source, output):
        assert (
            tool("generate").main(["--model", str(place), "--prompt", prompt, "--max-tokens", "40", "--greedy", "--json"]) == 0
        )
        printed.append(json.loads(capsys.readouterr().out))
    tokenizer, theirs = load_tokenizer(output), automatic(output)
    ids = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eod_id]])
    with torch.no_grad():
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40)[0, ids.shape[1] :].tolist()
    if tokenizer.eod_id in expected:
        expected = expected[: expected.index(tokenizer.eod_id)]
    assert len(expected) > 3
    for answer in printed:
        assert (answer["prompt"], answer["prompt_tokens"], answer["tokens"]) == (prompt, ids[0].tolist(), expected)
    # transformers makes U+FFFD of a whole run of bytes that is no valid text, SentencePiece of single ones: the rest is equal.
    assert printed[1]["text"] == tokenizer.decode(expected)
    assert printed[0]["text"] == printed[1]["text"] or "\ufffd" in printed[0]["text"]


def test_a_token_that_the_tokenizer_does_not_have_adds_no_text(tied, capsys):
    unused = load_tokenizer(tied / "tokenizer").vocab_size
    arguments = ["--model", str(tied), "--prompt", "def", "--max-tokens", "60", "--temperature", "50", "--json"]
    assert tool("generate").main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert max(answer["tokens"]) >= unused
    assert answer["text"]


def test_sampling_is_repeated_by_its_seed(exported, capsys):
    def text(*options: str) -> str:
        assert tool("generate").main(["--model", str(exported), "--prompt", "a", "--max-tokens", "20", *options]) == 0
        return capsys.readouterr().out

    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    assert text("--top-k", "1", "--seed", "3") == text("--greedy")
    assert text("--greedy").startswith("a")
