"""Answers are those of one prompt alone; streams show them; windows are kept."""

import peft
import pytest
import torch

from answering import answer
from surefoot.generate import generation
from surefoot.generate.section import GenerateSection
from tiny import KINDS, model
from zoo import architectures

PROMPTS = [[5, 9, 11], [7], [20, 21, 22, 23, 24, 25, 26], [3, 4], [9, 8, 7, 6, 5]]


def decode(ids):
    return "".join(f"<{i}>" for i in ids)


def by_hand(network, prompt, count, stops=()):
    """Greedy decoding without cache, batch or padding."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            token = int(network(torch.tensor([ids])).logits[0, -1].argmax())
        if token in stops:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_batched_greedy_answers_are_those_of_plain_decoding(kind):
    network = model(kind, attention="eager" if kind == "gemma2" else "sdpa")
    section = GenerateSection(max_new_tokens=8, batch_size=3)
    found = answer(network, PROMPTS, section, stop_token_ids=[])
    assert found == [by_hand(network, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["rwkv", "minimax", "mamba", "recurrent_gemma"])
def test_answers_of_recurrent_models_do_not_depend_on_the_size_of_batches(name, caplog):
    network = architectures.build(name)
    section = GenerateSection(max_new_tokens=8, batch_size=3)
    found = answer(network, PROMPTS, section, stop_token_ids=[])
    assert found == [answer(network, [p], section, stop_token_ids=[])[0] for p in PROMPTS]
    assert ("one by one" in caplog.text) == (name == "rwkv")
    assert caplog.text.count("cannot be kept in slots") == 1


def test_an_answer_ends_before_any_of_the_stop_tokens():
    network = model()
    free = [by_hand(network, prompt, 12) for prompt in PROMPTS]
    stops = [free[0][3], free[2][5]]
    section = GenerateSection(max_new_tokens=12)
    found = answer(network, PROMPTS, section, stop_token_ids=stops)
    assert found == [by_hand(network, prompt, 12, stops) for prompt in PROMPTS]
    assert len(found[0]) <= 3


def test_answers_come_in_the_order_of_their_prompts_and_are_counted():
    network = model()
    counts = []
    section = GenerateSection(max_new_tokens=3, batch_size=2)
    found = answer(network, PROMPTS, section, stop_token_ids=[], on_answered=counts.append)
    assert sum(counts) == 5
    assert found == [by_hand(network, prompt, 3) for prompt in PROMPTS]


@pytest.mark.parametrize("sample", [False, True])
def test_the_shares_of_replicas_together_are_the_whole(sample):
    network = model()
    section = GenerateSection(max_new_tokens=6, batch_size=2, do_sample=sample)
    asked = {"stop_token_ids": [], "seed": 3}
    assert answer(network, [], section, **asked) == []
    whole, counts = answer(network, PROMPTS, section, **asked), []
    asked["on_answered"] = counts.append
    each = [generation.ReplicaShare(i, 2) for i in range(2)]
    shares = [answer(network, PROMPTS, section, **asked, share=share) for share in each]
    assert [a or b for a, b in zip(*shares, strict=True)] == whole
    assert [bool(a) ^ bool(b) for a, b in zip(*shares, strict=True)] == [True] * len(PROMPTS)
    assert sum(counts) == 2 * len(PROMPTS)


def test_the_context_window_bounds_every_answer_by_itself():
    network = model(max_position_embeddings=12)
    prompts = [[5] * 4, [6] * 10, [7] * 12, [8] * 13]
    section = GenerateSection(max_new_tokens=6)
    found = answer(network, prompts, section, stop_token_ids=[])
    assert [len(ids) for ids in found] == [6, 2, 0, 0]
    assert found[:2] == [by_hand(network, prompts[0], 6), by_hand(network, prompts[1], 2)]
    assert [generation.room(network, p) for p in prompts] == [8, 2, 0, 0]


def test_sampling_repeats_by_its_seed_and_leaves_torch_alone():
    network = model()
    section = GenerateSection(max_new_tokens=10, do_sample=True)

    def sample(seed):
        return answer(network, PROMPTS, section, stop_token_ids=[], seed=seed)

    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, second = sample(1), sample(1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert first == second != sample(2)


def test_the_models_own_generation_config_changes_nothing_and_is_kept():
    network = model()
    own = network.generation_config
    own.update(do_sample=True, min_new_tokens=3, suppress_tokens=list(range(40)), eos_token_id=9)
    section = GenerateSection(max_new_tokens=6)
    found = answer(network, PROMPTS, section, stop_token_ids=[])
    assert found == [by_hand(network, prompt, 6) for prompt in PROMPTS]
    assert network.generation_config is own


def test_an_adapter_answers_with_its_own_weights():
    network = peft.get_peft_model(
        model(),
        peft.LoraConfig(
            init_lora_weights=False, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    ).eval()
    section = GenerateSection(max_new_tokens=6)
    found = answer(network, PROMPTS, section, stop_token_ids=[])
    assert found == [by_hand(network, prompt, 6) for prompt in PROMPTS]
    with network.disable_adapter():
        assert found != answer(network, PROMPTS, section, stop_token_ids=[])


def streamed(network, prompt, stops=()):
    """The sample of a stream, and the pieces that were shown."""
    told, pieces = {"stop_token_ids": stops, "decode": decode}, []
    section = GenerateSection(max_new_tokens=8)
    return generation.stream(network, prompt, section, on_text=pieces.append, **told), pieces


def test_a_stream_shows_the_answer_token_by_token_but_never_the_stop_token():
    network = model()
    free = by_hand(network, PROMPTS[0], 8)
    found, pieces = streamed(network, PROMPTS[0])
    assert list(found.ids) == free
    assert pieces == [f"<{i}>" for i in free]
    found, pieces = streamed(network, PROMPTS[0], [free[-1]])
    assert list(found.text_ids) == free[: free.index(free[-1])]
    assert "".join(pieces) == decode(found.text_ids)


def test_a_stream_can_be_broken_off_and_the_model_answers_again():
    network = model()
    section = GenerateSection(max_new_tokens=8)

    def interrupt(text):
        raise KeyboardInterrupt

    told = {"stop_token_ids": [], "decode": decode, "on_text": interrupt}
    with pytest.raises(KeyboardInterrupt):
        generation.stream(network, PROMPTS[0], section, **told)
    found = answer(network, PROMPTS, section, stop_token_ids=[])
    assert found == [by_hand(network, prompt, 8) for prompt in PROMPTS]


def test_a_stream_with_no_room_left_is_silent():
    found, pieces = streamed(model(max_position_embeddings=4), [5, 5, 5, 5])
    assert (found.ids, found.finish_reason, pieces) == ((), "context", [])
