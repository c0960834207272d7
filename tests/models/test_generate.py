"""Generation: greedy as transformers does it, sampling as a pure function of the seed."""

from __future__ import annotations

import pytest
import torch
from parity import ALL, FAMILIES, cases
from parity import pair as family_pair
from running import some_slow
from test_decoder import pair

from pretrain.errors import GenerationError
from pretrain.models.generate import Sampling, choose, generate, generate_batch, uncached_reason

PROMPT = [5, 17, 3, 8]
PROMPTS = [[1], PROMPT, list(range(20)), [9, 9, 2], [5, 17, 3, 9]]


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


# Those with windows and the last case of each family; the others with `-m slow`: python -m pytest tests/models/test_generate.py -m slow
@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*case, marks=() if "window" in case[1] or case in dict(ALL).items() else pytest.mark.slow) for case in ALL],
)
def test_a_cache_changes_no_token(family, name):
    ours, _ = family_pair(family, name)
    cases = (([1], {}), ([5, 6, 3, 2, 1, 4, 0], {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 4}))
    for prompt, options in cases:
        without = generate(ours, prompt, 12, **options, cached=False)
        assert generate(ours, prompt, 12, **options) == without
        assert len(without) == 12


def test_dynamic_scaling_generates_without_a_cache_and_says_why():
    for family, name in ALL:
        dynamic = cases(family)[name].rope.scaling == "dynamic"
        reason = uncached_reason(family_pair(family, name)[0])
        assert (reason is not None) == dynamic
        assert not dynamic or "model.rope.scaling=dynamic" in reason


def test_with_a_cache_each_position_is_computed_once():
    ours, _ = pair("plain")
    seen: list[int] = []
    handle = ours.layers["0"].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
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
    assert drawn(top_p=1e-9) == drawn(top_p=1e-300) == {1}  # the second is 0 in fp32, and left nothing to draw from
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
    from pretrain.models import build_network
    from pretrain.models.families import complete
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


DECODERS = [family for family in FAMILIES if not cases(family)[next(iter(cases(family)))].encoder.layers]


@pytest.mark.parametrize("family", some_slow(DECODERS, set(DECODERS) - {"llama", "gemma3", "gpt2", "gpt_oss", "deepseek_v3"}))
def test_greedy_in_a_batch_is_transformers_generate_in_a_batch_token_for_token(family):
    """M-D14: one sequence at a time was all there was."""
    for name in list(cases(family))[:3]:
        ours, theirs = family_pair(family, name)
        if uncached_reason(ours) is not None:  # transformers' own padded batches then differ from what it gives alone
            continue
        longest = max(map(len, PROMPTS))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
        with torch.no_grad():
            expected = theirs.generate(
                ids, attention_mask=mask, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
            )[:, longest:]
        for cached in (True, False):
            assert generate_batch(ours, PROMPTS, 16, cached=cached) == expected.tolist(), (name, cached)


QUICK = [(family, next(iter(cases(family)))) for family in FAMILIES]


@pytest.mark.parametrize(("family", "name"), [p if p in QUICK else pytest.param(*p, marks=pytest.mark.slow) for p in ALL])
def test_a_row_of_a_batch_is_what_it_is_alone(family, name):
    """M-D14: whatever else is in the batch, however long, greedy and drawn, and where rows end at different times."""
    ours, _ = family_pair(family, name)
    prompts = [[token % ours.config.vocab_size for token in prompt] for prompt in PROMPTS]
    sampling, seeds = Sampling(0.7, 20, 0.9), [4, 5, 6, 4, 4]
    alone = [generate(ours, p, 14, temperature=0.7, top_k=20, top_p=0.9, seed=s) for p, s in zip(prompts, seeds)]
    assert generate_batch(ours, prompts, 14, sampling=sampling, seeds=seeds) == alone
    stops = {alone[1][5], alone[2][2]}
    ended = [tokens[: min((tokens.index(s) for s in stops if s in tokens), default=14)] for tokens in alone]
    assert len({len(tokens) for tokens in ended}) > 1
    assert generate_batch(ours, prompts, 14, stops, sampling, seeds) == ended


@pytest.mark.parametrize("name", ["plain", "tied", "one key-value head"])
@pytest.mark.parametrize("cached", [True, False])
def test_beyond_the_context_each_token_follows_from_the_last_so_many(name, cached):
    """M-D14: as in nanoGPT, whose loop this is; here with transformers' model."""
    ours, theirs = pair(name)
    context = ours.config.max_sequence_length
    prompts = [list(range(context + 7)), list(range(context - 3)), PROMPT * ((context - 6) // 4)]
    prompts = [[token % 61 for token in prompt] for prompt in prompts]
    for prompt, tokens in zip(prompts, generate_batch(ours, prompts, 9, cached=cached)):
        ids = torch.tensor([prompt])
        for _ in range(9):
            with torch.no_grad():
                logits = theirs(ids[:, -context:]).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        assert tokens == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_in_one_line(value, temperature):
    """M-D12: NaN gave token 0 for ever when greedy, and torch's traceback when drawn."""
    import copy

    ours = copy.deepcopy(pair("plain")[0])
    with torch.no_grad():
        ours.output.weight[7, 3] = value
    with pytest.raises(GenerationError, match="the model's logits after 4 tokens are no numbers") as caught:
        generate(ours, PROMPT, 5, temperature=temperature)
    assert "\n" not in str(caught.value)


def test_a_temperature_next_to_nothing_is_greedy():
    """M-D12: at 1e-42 logits became infinite, and torch refused to draw."""
    ours, _ = pair("plain")
    for temperature in (1e-5, 1e-42, 5e-324):
        assert generate(ours, PROMPT, 12, temperature=temperature, seed=3) == generate(ours, PROMPT, 12)


def test_a_temperature_beyond_fp32_draws_evenly():
    """At 1e40 the logits that top_k leaves out became NaN."""
    logits = torch.tensor([3.0, 1.0, 2.0, -5.0])
    drawn = [choose(logits, 1e40, 3, 1.0, torch.Generator().manual_seed(s)) for s in range(600)]
    assert set(drawn) == {0, 1, 2} and all(150 < drawn.count(token) < 250 for token in range(3))


def test_models_of_transformers_generate_in_batches_of_equal_length(tmp_path):
    """M-D14: some of them take no mask of padding: a recurrent state would see it."""
    from hf_configs import write_config

    from pretrain.config.model_schema import Model
    from pretrain.models import build_network
    from pretrain.models.families import complete
    from pretrain.parallel.initialise import initialise

    model = complete(Model(family="hf", hf_config=str(write_config(tmp_path, "mamba2")), max_sequence_length=40), 32)
    with torch.device("meta"):
        ours = build_network(model)
    ours.to_empty(device="cpu")
    initialise(ours, 1)
    shapes = []
    ours.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    found = generate_batch(ours, [*PROMPTS, list(range(39))], 4)
    assert found == [generate(ours, prompt, 4) for prompt in [*PROMPTS, list(range(39))]]
    assert shapes[:4] == [(1, 1), (1, 2), (1, 3), (1, 4)] and (2, 4) in shapes and (1, 40) in shapes and (1, 41) not in shapes


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
