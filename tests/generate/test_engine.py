"""Generation over slots, beside transformers' own and beside sums in float64."""

import random

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from answering import keeps_bits, near, sample
from each import some
from surefoot.generate._proof import driver_of
from surefoot.generate._slots import SlotCache
from surefoot.generate.generation import ReplicaShare
from surefoot.generate.section import GenerateSection
from tiny import model
from zoo import architectures

PROMPTS = [[5, 9, 11], [7], [20, 21, 22, 23, 24, 25, 26, 3, 17, 4, 40, 41], [3, 4], [5, 9, 11]]
WIDE = {"intermediate_size": 64}  # elementwise operations take 32 numbers at a time
LIKE_OTHERS = ["gpt2", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "mpt", "mistral"]


def theirs(network, prompt, **settings):
    """The response to one prompt by transformers' ``generate``."""
    config = GenerationConfig(**{"max_new_tokens": 14, "pad_token_id": 0, **settings})
    network.generation_config = GenerationConfig()
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    found = network.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return found[0, len(prompt) :].tolist()


def calls(network):
    """The keyword arguments of all calls of ``network`` from now on."""
    found = []
    network.register_forward_pre_hook(lambda _, __, given: found.append(given), with_kwargs=True)
    return found


def cache_in(given):
    """The keys and values in the arguments of a call; transformers 5.24 has renamed them."""
    return given.get("cache", given.get("past_key_values"))


def random_prompts(count, longest, vocabulary=64):
    numbers = random.Random(0)
    lengths = [numbers.randrange(1, longest) for _ in range(count)]
    return [[numbers.randrange(vocabulary) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", some(LIKE_OTHERS, ["gemma3_text", "gpt_oss", "mpt", "mistral"]))
def test_greedy_responses_are_those_of_transformers(name):
    network = architectures.build(name).eval()
    given = calls(network)
    section = GenerateSection(max_new_tokens=14, batch_size=3)
    found = sample(network, PROMPTS, section, stop_token_ids=[])
    assert any(isinstance(cache_in(each), SlotCache) for each in given)
    expected = [theirs(network, prompt) for prompt in PROMPTS]
    assert [list(found[i].ids) for i in range(len(PROMPTS))] == expected


def test_a_model_without_slots_says_why(caplog):
    network = model()

    def forward(input_ids, use_cache=False, **given):
        if use_cache:
            raise NotImplementedError("no cache of this class\nmore")
        return type(network).forward(network, input_ids, use_cache=use_cache, **given)

    network.forward = forward
    assert driver_of(network, 16) is None
    assert "is slower" in caplog.text
    assert "its code fails (no cache of this class)\n" in caplog.text


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_slots_serve_a_model_in_float32_under_autocast(kind):
    """As a policy is trained on a GPU: a rotation makes its keys float32, its values are not."""
    with torch.autocast("cpu", torch.bfloat16):
        assert driver_of(model(kind), 16) is not None


def test_a_repetition_penalty_is_that_of_transformers():
    network = model()
    section = GenerateSection(max_new_tokens=14, batch_size=3, repetition_penalty=1.7)
    found = sample(network, PROMPTS, section, stop_token_ids=[])
    expected = [theirs(network, prompt, repetition_penalty=1.7) for prompt in PROMPTS]
    assert [list(found[i].ids) for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"batch_invariant": True}, marks=pytest.mark.proof),
        {"batch_invariant": True, "top_k": 9, "repetition_penalty": 1.2},
        pytest.param({"top_p": 0.8}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_a_response_is_the_same_whatever_else_is_generated(settings):
    """To the bit, where the processor gives a row of a product the same bits beside others, and
    rows are computed in the shapes in which it does."""
    network = model("qwen3", **WIDE)
    same_bits = "batch_invariant" in settings and keeps_bits(network, 60)
    prompts = [prompt for prompt in random_prompts(7, 40) for _ in range(2)]

    def sampled(prompts, size, **options):
        section = GenerateSection(
            max_new_tokens=12, do_sample=True, temperature=0.8, batch_size=size, **settings
        )
        return sample(network, prompts, section, stop_token_ids=[2], seed=5, **options)

    def alike(found, places):
        found = [found[i] for i in sorted(found)]
        return near(found, [whole[place] for place in places], same_bits=same_bits)

    whole = sampled(prompts, 14)
    for size in (1, 2, 5):
        assert alike(sampled(prompts, size), range(14))
    half = sampled(prompts, 4, share=ReplicaShare(1, 2))
    assert 0 < len(half) < 14
    assert alike(half, sorted(half))
    assert alike(sampled(prompts[4:6], 2), (4, 5))
    assert alike(sampled(prompts[::-2], 3), range(12, -1, -2))
    assert whole[4] != whole[5]  # equal prompts


def test_log_probabilities_are_those_of_one_pass_at_the_temperature():
    network = model("qwen3")
    section = GenerateSection(max_new_tokens=20, do_sample=True, temperature=1.7, batch_size=3)
    found = sample(network, PROMPTS, section, stop_token_ids=[2], seed=1)
    for index, prompt in enumerate(PROMPTS):
        ids = torch.tensor([[*prompt, *found[index].ids]])
        with torch.no_grad():
            logits = network(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 1.7).log_softmax(-1)[range(len(logits)), list(found[index].ids)]
        assert np.allclose(found[index].logps, expected, rtol=0, atol=2e-6)
        assert found[index].log_masses == ()


def processed(logits, prompt, section):
    """The probabilities that are sampled from, in float64, by the definitions."""
    scores = logits.double().numpy().copy()
    for token in set(prompt):
        factor = section.repetition_penalty
        scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
    scores /= section.temperature
    order = np.argsort(-scores)
    kept = set(order[: section.top_k or len(order)])
    weights = np.exp(scores - scores.max())
    weights[[i for i in range(len(scores)) if i not in kept]] = 0
    most = weights.max()
    shares, total = weights / weights.sum(), 0.0
    for token in order:
        if total >= section.top_p:
            weights[token] = 0
        total += shares[token]
    weights[weights < section.min_p * most] = 0
    return weights / weights.sum(), weights.sum() / np.exp(scores - scores.max()).sum()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"temperature": 0.5}, marks=pytest.mark.proof),
        pytest.param({"top_k": 5}, marks=pytest.mark.proof),
        {"top_p": 0.7, "temperature": 1.5},
        {"top_p": 0.8, "top_k": 6, "repetition_penalty": 1.5},
        pytest.param({"min_p": 0.2}, marks=pytest.mark.proof),
        {"min_p": 0.1, "top_p": 0.9, "temperature": 1.6},
    ],
)
def test_tokens_have_their_probabilities(settings):
    """Chi-square of the first token and of the second one after it."""
    torch.manual_seed(3)
    network = model(vocab_size=12)
    with torch.no_grad():
        network.lm_head.weight.mul_(30)
    section = GenerateSection(max_new_tokens=2, do_sample=True, batch_size=500, **settings)
    prompt = [5, 9, 7]
    found = sample(network, [prompt] * 4000, section, stop_token_ids=[], seed=2).values()
    for before in ([], [max(range(12), key=[one.ids[0] for one in found].count)]):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + before])).logits[0, -1]
        expected, mass = processed(logits, prompt + before, section)
        place = len(before)
        after = [one for one in found if list(one.ids[:place]) == before]
        counts = np.bincount([one.ids[place] for one in after], minlength=12)
        assert not counts[expected == 0].any()
        is_possible = expected > 0
        want = expected[is_possible] * len(after)
        statistic = ((counts[is_possible] - want) ** 2 / want).sum()
        freedom = is_possible.sum() - 1
        assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 1e-9
        if section.top_k or section.top_p < 1 or section.min_p:
            assert after[0].log_masses[place] == pytest.approx(np.log(mass), abs=1e-5)


def test_each_response_ends_for_its_own_reason_and_makes_room_for_the_next():
    network = model(max_position_embeddings=24)
    given = calls(network)
    section = GenerateSection(max_new_tokens=12, do_sample=True, batch_size=3)
    prompts = random_prompts(12, 24)
    found = sample(network, prompts, section, stop_token_ids=[2, 3, 9], seed=0)
    assert {one.finish_reason for one in found.values()} == {"stop", "length", "context"}
    for index, one in found.items():
        left = 24 - len(prompts[index])
        is_stopped = one.finish_reason == "stop"
        assert (one.ids[-1:] in [(2,), (3,), (9,)]) == is_stopped
        assert not {2, 3, 9} & set(one.text_ids)
        if not is_stopped:
            assert len(one.ids) == min(12, left)
            assert one.finish_reason == ("length" if left >= 12 else "context")
    steps = sum(isinstance(cache_in(each), SlotCache) for each in given)
    assert steps < sum(len(one.ids) for one in found.values())


@pytest.mark.parametrize("invariant", [False, True])
def test_keys_and_values_take_as_many_slots_as_the_batch_size(invariant):
    network = model()
    given = calls(network)
    section = GenerateSection(max_new_tokens=40, batch_size=3, batch_invariant=invariant)
    sample(network, random_prompts(8, 30), section, stop_token_ids=[])
    cache = cache_in(given[-1])
    assert {layer.keys.shape[0] for layer in cache.layers} == {4 if invariant else 3}
    assert {layer.keys.shape[2] for layer in cache.layers} <= {80}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama", marks=pytest.mark.proof),
        "gemma3_text",
        pytest.param("mistral", marks=pytest.mark.proof),
        "gpt_oss",
        "deepseek_v3",
    ],
)
def test_a_row_alone_is_computed_as_one_without_a_mask(name):
    """Where no window hides a token: windows are of 8 tokens, the first step is at the third."""
    network = architectures.build(name).eval()
    driver_of(network, 17)  # tried before the calls are counted
    for invariant, num_rows in ((False, 1), (True, 4)):
        given = calls(network)
        section = GenerateSection(max_new_tokens=14, batch_invariant=invariant)
        found = sample(network, [PROMPTS[0]], section, stop_token_ids=[])
        assert list(found[0].ids) == theirs(network, PROMPTS[0])
        steps = [each for each in given if isinstance(cache_in(each), SlotCache)]
        assert {len(each["input_ids"]) for each in steps} == {num_rows}
        masks = steps[0]["attention_mask"]
        every = [*masks.values()] if isinstance(masks, dict) else [masks]
        assert {mask is None for mask in every} == {not invariant}


def test_equal_prompts_are_computed_once():
    network = model()
    assert driver_of(network, 60) is not None  # tried before the calls are counted
    given = calls(network)
    section = GenerateSection(max_new_tokens=3, batch_size=4)
    sample(network, [list(range(49))] * 9 + [list(range(9, 58))] * 9, section, stop_token_ids=[])
    sizes = [e["input_ids"].shape for e in given if type(cache_in(e)) is DynamicCache]
    assert sum(rows for rows, length in sizes if length == 48) == 2


def test_rows_whose_positions_change_with_the_longest_are_alone(caplog):
    factors = {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **factors}
    network = model("phi3", rope_parameters=rope, original_max_position_embeddings=16)
    prompts, section = [[5] * 20, [7, 8]], GenerateSection(max_new_tokens=9, batch_size=2)
    found = sample(network, prompts, section, stop_token_ids=[])
    assert [list(found[i].ids) for i in range(2)] == [
        theirs(network, prompt, max_new_tokens=9) for prompt in prompts
    ]
    assert caplog.text.count("answered one by one") == 1


@pytest.mark.parametrize(
    "threads",
    [pytest.param(1, marks=pytest.mark.proof), 2, pytest.param(4, marks=pytest.mark.proof)],
)
def test_the_batch_size_changes_no_bit_whatever_the_number_of_threads(threads):
    """Threads divide the rows of a product, so one of five rows may be computed alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        network, prompts = model(**WIDE), random_prompts(11, 40)
        found = []
        for batch_size in (1, 5, 6, 7, 11):
            section = GenerateSection(max_new_tokens=6, batch_size=batch_size, batch_invariant=True)
            found.append(sample(network, prompts, section, stop_token_ids=[]))
        assert all(other == found[0] for other in found)
    finally:
        torch.set_num_threads(before)
