"""Generation: greedy as transformers does it, sampling as a pure function of the seed."""

from __future__ import annotations

import pytest
import torch
from parity import ALL, cases
from parity import pair as family_pair
from test_decoder import pair

from pretrain.models.generate import choose, generate, uncached_reason

PROMPT = [5, 17, 3, 8]


@pytest.mark.parametrize("name", ["plain", "tied", "one key-value head"])
@pytest.mark.parametrize("prompt", [[1], PROMPT, list(range(30))])
def test_greedy_is_transformers_generate_token_for_token(name, prompt):
    ours, theirs = pair(name)
    with torch.no_grad():
        ids = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    expected = ids[0, len(prompt) :].tolist()
    assert generate(ours, prompt, 24) == expected
    assert len(expected) == 24


def test_generation_ends_before_the_stop_id():
    ours, _ = pair("plain")
    free = generate(ours, PROMPT, 24)
    stop = free[9]
    assert generate(ours, PROMPT, 24, [stop]) == free[: free.index(stop)]
    assert generate(ours, PROMPT, 24, {free[0]}) == []
    unused = next(i for i in range(61) if i not in free)
    assert generate(ours, PROMPT, 24, [unused]) == free


def test_a_seed_decides_what_is_sampled():
    ours, _ = pair("plain")
    one = generate(ours, PROMPT, 20, temperature=1.0, seed=1)
    torch.manual_seed(99)
    assert generate(ours, PROMPT, 20, temperature=1.0, seed=1) == one
    assert generate(ours, PROMPT, 20, temperature=1.0, seed=2) != one
    assert len(one) == 20


def test_sampling_follows_the_distribution_of_the_model():
    ours, _ = pair("plain")
    with torch.no_grad():
        expected = (ours(torch.tensor([PROMPT]))[0, -1] / 0.5).softmax(-1)
    draws = torch.tensor([generate(ours, PROMPT, 1, temperature=0.5, seed=s)[0] for s in range(1500)])
    observed = torch.bincount(draws, minlength=61) / len(draws)
    # Total variation of 1500 draws from the same distribution is about 0.06 here.
    assert 0.5 * (observed - expected).abs().sum() < 0.1


def test_top_k_draws_from_the_k_likeliest_only():
    ours, _ = pair("plain")
    with torch.no_grad():
        likeliest = ours(torch.tensor([PROMPT]))[0, -1].topk(3).indices.tolist()
    drawn = {generate(ours, PROMPT, 1, temperature=5.0, top_k=3, seed=s)[0] for s in range(100)}
    assert drawn == set(likeliest)
    assert generate(ours, PROMPT, 10, temperature=1.0, top_k=1, seed=5) == generate(ours, PROMPT, 10)
    assert generate(ours, PROMPT, 10, temperature=1.0, top_k=1000, seed=5) == generate(
        ours, PROMPT, 10, temperature=1.0, seed=5
    )


@pytest.mark.parametrize(("family", "name"), ALL)
def test_a_cache_changes_no_token(family, name):
    ours, _ = family_pair(family, name)
    cases = (([1], {}), ([5, 6, 3, 2, 1, 4, 0], {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 4}))
    for prompt, options in cases:
        without = generate(ours, prompt, 20, **options, cached=False)
        assert generate(ours, prompt, 20, **options) == without
        assert len(without) == 20


def test_dynamic_scaling_generates_without_a_cache_and_says_why():
    for family, name in ALL:
        dynamic = cases(family)[name].rope.scaling == "dynamic"
        reason = uncached_reason(family_pair(family, name)[0])
        assert (reason is not None) == dynamic
        assert not dynamic or "model.rope.scaling=dynamic" in reason


def test_with_a_cache_each_position_is_computed_once():
    ours, _ = pair("plain")
    seen: list[int] = []
    handle = ours.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    try:
        generate(ours, PROMPT, 6)
        generate(ours, PROMPT, 6, cached=False)
    finally:
        handle.remove()
    assert seen == [4, 1, 1, 1, 1, 1] + [4, 5, 6, 7, 8, 9]


def test_top_p_draws_from_the_fewest_tokens_that_have_that_probability():
    logits = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()

    def drawn(**options):
        return {
            choose(logits, generator=torch.Generator().manual_seed(s), **{"top_k": 0, "temperature": 1.0} | options)
            for s in range(300)
        }

    assert drawn(top_p=1.0) == {0, 1, 2, 3, 4}
    assert drawn(top_p=0.3) == {1}
    assert drawn(top_p=0.5) == {1, 3}
    assert drawn(top_p=0.75) == {1, 3, 4}
    assert drawn(top_p=1e-9) == {1}
    assert drawn(top_p=0.75, top_k=2) == {1, 3}  # of what top_k leaves, 0.4 and 0.3 are 0.57 and 0.43
    assert drawn(top_p=0.5, top_k=2) == {1}
    assert drawn(top_p=0.5, temperature=100.0) == {1, 3, 4}  # nearly even: three of five have half


def test_top_p_is_what_transformers_keeps():
    from transformers import TopPLogitsWarper

    logits = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 3
    for p in (0.1, 0.5, 0.9, 0.99):
        kept = set(torch.isfinite(TopPLogitsWarper(p)(None, logits[None].clone())[0]).nonzero().flatten().tolist())
        drawn = {choose(logits, 1.0, 0, p, torch.Generator().manual_seed(s)) for s in range(400)}
        assert drawn <= kept
        if p <= 0.5:
            assert drawn == kept


def test_any_of_several_stop_ids_ends_generation():
    ours, _ = pair("plain")
    free = generate(ours, PROMPT, 24)
    first = min(free.index(free[9]), free.index(free[15]))
    assert generate(ours, PROMPT, 24, {free[9], free[15]}) == free[:first]


def test_a_model_of_transformers_generates_as_transformers_does(tmp_path):
    from hf_configs import write_config

    from pretrain.config.model_schema import Model
    from pretrain.models.network import build_network
    from pretrain.models.shape import complete
    from pretrain.parallel.initialise import initialise

    model = complete(Model(family="hf", hf_config=str(write_config(tmp_path, "granite"))), 32)
    with torch.device("meta"):
        ours = build_network(model)
    ours.to_empty(device="cpu")
    initialise(ours, 1)
    ids = ours._transformers.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generate(ours, PROMPT, 12) == ids[0, len(PROMPT) :].tolist()
    assert uncached_reason(ours) == "model.family=hf has none here"


def test_the_tool_gives_the_same_text_with_and_without_a_cache_and_says_how_fast(pool, config_file, capsys):
    from running import tool, train

    run = train(pool, 1, config_file, "run.steps=2", "schedule.warmup_steps=1")
    common = ["--model", str(run), "--prompt", "abc", "--max-tokens", "12", "--top-p", "0.9", "--seed", "5", "--json"]
    printed = []
    for extra in ([], ["--no-cache"]):
        assert tool("generate").main([*common, *extra]) == 0
        out, err = capsys.readouterr()
        printed.append(out)
        assert " tokens/s" in err
    assert printed[0] == printed[1] and '"tokens": [' in printed[0]
    with pytest.raises(SystemExit) as refused:
        tool("generate").main([*common, "--top-p", "0"])
    assert refused.value.code == 2
