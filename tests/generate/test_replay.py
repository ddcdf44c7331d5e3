"""Steps that are replayed without the model's Python, beside transformers and beside one pass."""

import numpy as np
import peft
import pytest
import torch
from test_engine import LIKE_OTHERS, cache_in, calls, random_prompts, theirs
from torch import nn

from answering import sample
from each import some
from surefoot.generate._proof import driver_of
from surefoot.generate._replay import RecordedSteps
from surefoot.generate._slots import SlotCache
from surefoot.generate.live import RowSettings, rows_of
from surefoot.generate.responses import Chooser, requests_of
from surefoot.generate.section import GenerateSection
from surefoot.model.lora_layers import AdaptersByRow
from tiny import model
from zoo import architectures

MOST = 40


def steps_in(given):
    """The steps that the model computed itself."""
    return [each for each in given if isinstance(cache_in(each), SlotCache)]


@pytest.mark.parametrize(
    "name", some(LIKE_OTHERS, ["gpt2", "gemma3_text", "deepseek_v3", "mistral"])
)
def test_a_long_response_is_that_of_transformers(name):
    """With windows of 8 tokens, which hide some of it."""
    network = architectures.build(name).eval()
    assert driver_of(network, MOST + 3) is not None  # tried before the calls are counted
    given, prompt = calls(network), [5, 9, 11]
    section = GenerateSection(max_new_tokens=MOST)
    response = sample(network, [prompt], section, stop_token_ids=[])[0]
    num_computed = len(steps_in(given))
    assert list(response.ids) == theirs(network, prompt, max_new_tokens=MOST)
    assert num_computed <= 12 or name in ("gpt2", "mpt")  # whose Python is not the same each step
    ids = torch.tensor([[*prompt, *response.ids]])
    with torch.no_grad():
        logits = network(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[range(MOST), list(response.ids)]
    assert np.allclose(response.logps, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("lengths", [pytest.param((5, 5, 5), marks=pytest.mark.proof), (5, 9, 16)])
def test_rows_side_by_side_are_those_of_transformers(lengths):
    network = model(max_position_embeddings=256)
    assert driver_of(network, 120) is not None
    given = calls(network)
    prompts = [list(range(3 + n, 3 + n + length)) for n, length in enumerate(lengths)]
    section = GenerateSection(max_new_tokens=100, batch_size=3)
    found = sample(network, prompts, section, stop_token_ids=[])
    assert len(steps_in(given)) < 60
    for index, prompt in enumerate(prompts):
        assert list(found[index].ids) == theirs(network, prompt, max_new_tokens=100)


def test_rows_of_an_invariant_batch_are_computed_by_the_model():
    network = model()
    assert driver_of(network, 30) is not None
    given = calls(network)
    section = GenerateSection(max_new_tokens=20, batch_invariant=True)
    sample(network, [[5, 9, 11]], section, stop_token_ids=[])
    assert len(steps_in(given)) == 20


def test_weights_that_are_changed_in_place_are_those_of_the_next_response():
    network = model()
    rows, chooser = (
        rows_of(network, 64, 1),
        Chooser(GenerateSection(max_new_tokens=20), frozenset()),
    )
    given = calls(network)

    def response():
        (request,) = requests_of([[5, 9, 11]], [20], 0, max_new_tokens=20)
        rows.add(request, RowSettings(chooser, lambda ids: ""))
        tokens = []
        while rows.num_running or rows.num_waiting:
            rows.step(lambda token: tokens.append(token.id) or True)
        return tokens

    before = response()
    assert before == theirs(network, [5, 9, 11], max_new_tokens=20)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
    given.clear()
    after = response()
    assert not steps_in(given)
    assert before != after == theirs(network, [5, 9, 11], max_new_tokens=20)


def test_rows_with_an_adapter_have_it_until_it_goes():
    base = model()
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    network, adapters = (
        peft.get_peft_model(base, config, adapter_name="one").eval(),
        AdaptersByRow(),
    )
    torch.manual_seed(1)
    adapters.attach(network)
    with network.disable_adapter():
        rows = rows_of(network, 64, 1, adapters)
    chooser = Chooser(GenerateSection(max_new_tokens=20), frozenset())

    def response(adapter):
        (request,) = requests_of([[5, 9, 11]], [20], 0, max_new_tokens=20)
        rows.add(
            request.__class__(**{**vars(request), "adapter": adapter}), RowSettings(chooser, str)
        )
        tokens = []
        with network.disable_adapter():
            while rows.num_running or rows.num_waiting:
                rows.step(lambda token: tokens.append(token.id) or True)
        return tokens

    def expected(adapter):
        if adapter is not None:
            network.set_adapter(adapter)
            return theirs(network, [5, 9, 11], max_new_tokens=20)
        with network.disable_adapter():
            return theirs(network, [5, 9, 11], max_new_tokens=20)

    for name in ("one", None, "one"):
        assert response(name) == expected(name)
    network.delete_adapter("one")
    network.add_adapter("one", config)  # other numbers, of the same name
    adapters.attach(network)
    assert response("one") == expected("one")


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))


OUTSIDE = torch.tensor([3.0])
COMPUTED = {  # by the model itself in all steps, of tensor x, model m and length n
    "branch": lambda x, m, n: x * 2 if x.sum() > 0 else x,
    "number": lambda x, m, n: x * int(x[0, 0]),
    "list": lambda x, m, n: x * x[0].tolist()[0],
    "array": lambda x, m, n: x * float(x.numpy()[0, 0]),
    "shape": lambda x, m, n: x * len(x[x > 0]),
    "nonzero": lambda x, m, n: x * x.nonzero().shape[0],
    "outside": lambda x, m, n: x * OUTSIDE,
    "product": lambda x, m, n: x + 2 * n,
    "operations": lambda x, m, n: x * 2 if n % 2 else x + 1,
}
REPLAYED = {
    "a constant of the length": lambda x, m, n: x + torch.full_like(x, n - 3),
    "columns": lambda x, m, n: x[:, :n] * m.weight + x[:, n - 1 : n],
    "rows of a table": lambda x, m, n: x[torch.tensor([1, 0])] + m.weight,
    "several": lambda x, m, n: torch.cat([part.neg() for part in x.split(2, dim=1)], 1),
    "in place": lambda x, m, n: x.clone().add_(n).mul_(m.weight).view(2, -1, 2).transpose(0, 1),
    "shapes": lambda x, m, n: x.reshape(x.shape[1], x.size(0)) + x.numel(),
}


def counted(compute):
    """How often steps of 3 to 40 columns were computed; their values must be right."""
    torch.manual_seed(0)
    scale, count = Scale(), 0
    steps = RecordedSteps(scale)
    for length in range(3, 41):
        x = torch.randn(2, 50)

        def computed(x=x, length=length):
            nonlocal count
            count += 1
            return compute(x, scale, length)

        with torch.no_grad():
            found = steps.logits("", computed, [x], length, version=0)
            assert torch.equal(found, compute(x, scale, length))
    return count


@pytest.mark.parametrize("name", COMPUTED)
def test_what_depends_on_values_or_otherwise_on_the_length_is_not_replayed(name):
    assert counted(COMPUTED[name]) >= 38


@pytest.mark.parametrize("name", REPLAYED)
def test_the_same_operations_are_replayed(name):
    assert counted(REPLAYED[name]) == 3 + 3  # and 10, 20 and 40 columns


def test_operations_that_change_at_a_length_are_noticed(caplog):
    caplog.set_level("INFO")
    assert counted(lambda x, m, n: x + 1 if n < 10 else x - 1) > 30
    assert "cannot be replayed: one of 10 columns has other logits" in caplog.text


def test_a_step_that_was_replayed_wrongly_leaves_the_cache_as_the_model_wrote_it():
    """The check of 10 columns, of which the replay writes other values."""
    steps, cache = RecordedSteps(Scale()), torch.zeros(41)
    for length in range(3, 41):
        x = torch.randn(1)

        def computed(x=x, length=length):
            cache[length - 1 : length] = x if length < 10 else -x
            return cache[:length].sum()[None, None]

        with torch.no_grad():
            steps.logits("", computed, [x, cache], length, version=0)
        assert cache[length - 1] == (x if length < 10 else -x)


def test_prompts_of_one_token_are_answered_as_others():
    network = model(max_position_embeddings=256)
    prompts = random_prompts(5, 3)
    found = sample(network, prompts, GenerateSection(max_new_tokens=60), stop_token_ids=[])
    expected = [theirs(network, prompt, max_new_tokens=60) for prompt in prompts]
    assert [list(found[i].ids) for i in range(5)] == expected
