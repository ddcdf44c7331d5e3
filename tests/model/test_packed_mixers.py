"""Layers with a state compute packed rows document by document, found by trying."""

from itertools import pairwise

import pytest
import torch

from each import some
from surefoot.methods import LoRA
from surefoot.model.isolation import unpacked, use_packed
from surefoot.model.layers import compile_layers, recompute_activations
from surefoot.model.packed_attention import DocumentBounds, packed_arguments
from surefoot.model.packed_mixers import _Layout, _wrapped, follow_recomputation
from surefoot.parallel.sharded_model import layers
from zoo import architectures

MIXERS = {
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "minimax": "MiniMaxLightningAttention",
    "nemotron_h": "NemotronHMamba2Mixer",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "zamba2": "Zamba2MambaMixer",
}
LENGTHS = (9, 5, 17, 1, 40, 3)
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # of a compiler at a graph break
]


def documents(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 60, (1, n), generator=generator) for n in lengths]


def packed(model, rows):
    """The logits of the documents in one row."""
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    bounds = torch.tensor([0, *(row.shape[1] for row in rows)]).cumsum(0).int()
    inner = model if not hasattr(model, "get_base_model") else model.get_base_model()
    arguments = {"position_ids": positions, "use_cache": False, **packed_arguments(inner, bounds)}
    return model(input_ids=torch.cat(rows, 1), **arguments).logits


def gradients(model, logits):
    model.zero_grad(set_to_none=True)
    logits.double().sin().sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def alone(model, rows):
    """The logits and gradients of each document in a row of its own."""
    inner = model if not hasattr(model, "get_base_model") else model.get_base_model()
    with unpacked(inner):
        logits = torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], 1)
        return logits.detach(), gradients(model, logits)


def assert_close(found, expected, bound=3e-5):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= bound * gradient.abs().max(), name


@pytest.mark.parametrize("kind", some(tuple(MIXERS), ["lfm2", "qwen3_5_text", "mamba2"]))
def test_documents_of_a_row_have_values_and_gradients_as_alone(kind):
    model = architectures.build(kind)
    expected, of_expected = alone(model, documents())
    assert use_packed(model, max(LENGTHS)), "prompts may be shared"
    assert {type(m).__name__ for m in model.modules() if _wrapped(m)} == {MIXERS[kind]}
    logits = packed(model, documents())
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert_close(gradients(model, logits), of_expected)
    again, _ = alone(model, documents())  # generation has no packed rows
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("kind", some(("lfm2", "qwen3_5_text", "jamba"), ["qwen3_5_text"]))
def test_responses_that_share_a_prompt_have_gradients_as_apart(kind):
    model = architectures.build(kind)
    use_packed(model, max(LENGTHS))
    first, prompt, one, two = (row[0] for row in documents((5, 6, 4, 3)))

    def learn(parts, branches, responses):
        tokens = torch.cat(parts)
        starts = [0, 5, *([15] if branches is None else []), len(tokens)]
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])
        if branches is not None:  # the second response follows the prompt, too
            positions[15:] = torch.arange(6, 9)
        arguments = packed_arguments(model, torch.tensor(starts).int(), branches)
        arguments |= {"position_ids": positions[None], "use_cache": False}
        return gradients(model, model(input_ids=tokens[None], **arguments).logits[:, responses])

    branches = torch.tensor([(5, 0, 0), (6, 4, 3)]).int()
    shared = learn([first, prompt, one, two], branches, [*range(11, 18)])
    apart = learn([first, prompt, one, prompt, two], None, [*range(11, 15), *range(21, 24)])
    assert_close(shared, apart)


def test_what_stays_refused_is_left_as_it_was():
    model = architectures.build("rwkv", attention="eager")
    with pytest.raises(Exception, match="examples in one row would see each other"):
        use_packed(model)
    assert not [m for m in model.modules() if _wrapped(m)]


def test_a_model_without_state_is_left_alone():
    model = architectures.build("qwen3", attention="sdpa")
    use_packed(model)
    assert not [m for m in model.modules() if _wrapped(m)]


@pytest.mark.parametrize("change", ["recompute", "compile", "lora"])
def test_recomputed_compiled_and_adapted_layers_know_their_row(change):
    model = architectures.build("lfm2", attention="sdpa")
    use_packed(model)
    if change == "lora":
        model = LoRA(rank=2).apply(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
    _, expected = alone(model, documents())
    model.train()
    if change == "recompute":
        recompute_activations(model, "full")
        follow_recomputation(model)
    if change == "compile":
        compile_layers(layers(model), backend="eager")
    logits = packed(model, documents())
    with torch.no_grad():  # as a pipeline does, whose next row begins before this one's backward
        packed(model, documents((3, 2)))
    assert_close(gradients(model, logits), expected)


def test_batches_hold_each_token_once_with_little_padding():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 90, (12,), generator=generator).tolist()
        bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
        layout = _Layout(DocumentBounds(bounds), torch.device("cpu"))
        flat = torch.cat([rows.flatten() for rows in layout.batches])
        assert torch.equal(flat[layout.place_T], torch.arange(bounds[-1]))
        for rows in layout.batches:
            starts = rows[:, 0].tolist()
            real = sum(lengths[bounds.index(start)] for start in starts)
            assert rows.numel() - real <= 0.15 * rows.numel()
