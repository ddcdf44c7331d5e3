"""Answers to one prompt learn in one row what each learns in its own, and the prompt is computed
once."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import tiny
from each import some
from surefoot.batch import IGNORE_INDEX, OutputSpec, TrainedPositions, ends, trained_positions
from surefoot.data.text.collation import collate, collate_pairs, split, unshared
from surefoot.errors import ModelError
from surefoot.model import outputs, packed_kernels
from surefoot.model.isolation import use_packed
from surefoot.model.layers import compile_layers, recompute_activations
from surefoot.model.outputs import logprob_head_of
from surefoot.model.packed_attention import PREFIX
from surefoot.model.packed_kernels import register
from surefoot.parallel.sharded_model import layers
from surefoot.parallel.tensor_parallel import widened

CASES = [
    ("llama", "sdpa", {}),
    ("llama", "eager", {}),
    ("qwen2", "sdpa", {}),
    ("qwen3", "sdpa", {}),
    ("mistral", "sdpa", {}),  # a window of 4 tokens
    ("mistral", "eager", {}),
    ("gemma2", "eager", {"sliding_window": 4}),
]
NEEDS = ("logps", "entropies")


def pair(prompt, chosen, rejected, seed=0):
    """Answers to a prompt, all of their tokens learnt but some of the last ones."""
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (prompt + chosen + rejected,), generator=dice).tolist()
    learnt = [i >= prompt and (i + seed) % 4 != 3 for i in range(len(ids))]
    labels = [i if known else IGNORE_INDEX for i, known in zip(ids, learnt, strict=True)]
    return {"input_ids": ids, "labels": labels, "lengths": [prompt, chosen, rejected]}


def responses(prompt, *lengths, seed=0):
    """One by one, as they are sampled: examples with the same prompt, all answers learnt."""
    dice = torch.Generator().manual_seed(seed)
    first, *answers = (
        torch.randint(3, 64, (length,), generator=dice).tolist() for length in (prompt, *lengths)
    )
    return [
        {
            "input_ids": [*first, *answer],
            "labels": [*[IGNORE_INDEX] * prompt, *answer],
            "lengths": [prompt, len(answer)],
        }
        for answer in answers
    ]


# groups of four, one and three, and one whose answers are of other prompts
GROUP_LENGTHS = [(7, 5, 1, 9, 3), (4, 6), (1, 2, 2, 8)]
GROUPS = [row for i, lengths in enumerate(GROUP_LENGTHS) for row in responses(*lengths, seed=i)]
GROUPS += [*responses(6, 3, seed=7), *responses(6, 4, seed=8)]
PAIRS = [pair(*lengths, seed=i) for i, lengths in enumerate([(7, 5, 9), (1, 1, 1), (3, 8, 2)])]


def learnt(model, batches, *, asked=False):
    """Log-probabilities, entropies, and the gradients of something that depends on all of them."""
    head = logprob_head_of(model) if asked else None
    model.zero_grad()
    found = [outputs.compute(model, batch, OutputSpec(NEEDS), head=head) for batch in batches]
    logps, entropies = (torch.cat([getattr(one, name) for one in found]) for name in NEEDS)
    factors = torch.cos(torch.arange(len(logps)))
    (logps @ factors.to(logps) + entropies.square().sum()).backward()
    return logps.detach(), entropies.detach(), {n: p.grad for n, p in model.named_parameters()}


def alone(pairs):
    """Every conversation as a batch of its own, neither packed nor padded."""
    return [collate([row], packing=False) for one in pairs for row in split(one)]


def compare(found, expected, close=1e-10):
    for have, want in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(have, want, rtol=close, atol=close)
    for name, gradient in expected[2].items():
        torch.testing.assert_close(found[2][name], gradient, rtol=close, atol=close, msg=name)


@pytest.fixture
def all_in_float64(monkeypatch):
    """Norms and softmax as well, which models make in float32 whatever they are in."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.usefixtures("all_in_float64")
@pytest.mark.parametrize("asked", some([True, False], [True]))
@pytest.mark.parametrize(("kind", "attention", "changes"), CASES, ids=str)
def test_a_shared_prompt_teaches_what_two_prompts_teach(kind, attention, changes, asked):
    plain = tiny.model(kind, attention=attention, dtype=torch.float64, **changes)
    model = tiny.model(kind, attention=attention, dtype=torch.float64, **changes)
    assert use_packed(model)
    batch = collate_pairs(PAIRS, packing=True)
    expected = learnt(plain, alone(PAIRS))
    compare(learnt(model, [batch], asked=asked), expected)
    compare(learnt(plain, [collate_pairs(PAIRS, packing=False)], asked=asked), expected)
    compare(learnt(model, [unshared(batch)], asked=asked), expected)


@pytest.mark.usefixtures("all_in_float64")
@pytest.mark.parametrize("asked", some([True, False], [False]))
@pytest.mark.parametrize(("kind", "attention", "changes"), CASES, ids=str)
def test_a_group_learns_what_each_response_learns(kind, attention, changes, asked):
    plain = tiny.model(kind, attention=attention, dtype=torch.float64, **changes)
    model = tiny.model(kind, attention=attention, dtype=torch.float64, **changes)
    use_packed(model)
    batch = collate(GROUPS, packing=True)
    assert batch.branches.tolist() == [
        *([7, 5, 1, 9, 3], [4, 6, 0, 0, 0], [1, 2, 2, 8, 0]),
        *([6, 3, 0, 0, 0], [6, 4, 0, 0, 0]),
    ]
    expected = learnt(plain, [collate([row], packing=False) for row in GROUPS])
    compare(learnt(model, [batch], asked=asked), expected)
    apart = unshared(batch)
    assert apart.num_tokens == sum(len(row["input_ids"]) for row in GROUPS)
    compare(learnt(model, [apart], asked=asked), expected)


def test_the_ends_of_responses_are_found_behind_a_shared_prompt():
    batch, ids = collate(GROUPS, packing=True), [row["input_ids"][-1] for row in GROUPS]
    assert batch.input_ids[0, ends(batch).columns].tolist() == ids
    apart = unshared(batch)
    assert apart.input_ids[0, ends(apart).columns].tolist() == ids


@pytest.mark.parametrize("empty", [0, 1])
def test_a_prompt_without_a_response_is_not_shared(empty):
    rows = responses(4, 3, 5)
    rows[empty] = {name: [*value][:4] for name, value in rows[empty].items()} | {"lengths": [4, 0]}
    batch = collate(rows, packing=True)
    assert batch.branches is None
    assert ends(batch).columns.tolist() == ([3, 12] if empty == 0 else [6, 10])


@pytest.mark.usefixtures("all_in_float64")
@settings(deadline=None, max_examples=15)
@given(lengths=st.lists(st.tuples(*[st.integers(1, 8)] * 3), min_size=1, max_size=3))
def test_lengths_do_not_matter(lengths):
    found = [pair(*parts, seed=i) for i, parts in enumerate(lengths)]
    plain, model = (
        tiny.model("mistral", dtype=torch.float64, num_hidden_layers=2) for _ in range(2)
    )
    use_packed(model)
    compare(learnt(model, [collate_pairs(found, packing=True)]), learnt(plain, alone(found)))


@pytest.mark.usefixtures("all_in_float64")
def test_activations_may_be_recomputed():
    plain, model = (tiny.model(dtype=torch.float64) for _ in range(2))
    use_packed(model)
    recompute_activations(model)
    compare(
        learnt(model.train(), [collate_pairs(PAIRS, packing=True)]), learnt(plain, alone(PAIRS))
    )


def test_an_answer_does_not_see_the_other_one():
    model = tiny.model()
    use_packed(model)
    row = collate_pairs(PAIRS[:1], packing=True)
    prompt, chosen, _ = PAIRS[0]["lengths"]
    other = row.input_ids.clone()
    other[:, prompt : prompt + chosen] = (other[:, prompt : prompt + chosen] + 7) % 64
    is_rejected = row.extras["answer"] == 1
    with torch.no_grad():
        before, after = (
            outputs.compute(model, replace(row, input_ids=ids), OutputSpec(("logps",))).logps
            for ids in (row.input_ids, other)
        )
    assert torch.equal(before[is_rejected], after[is_rejected])
    assert not torch.equal(before[~is_rejected], after[~is_rejected])


def test_both_first_tokens_are_predicted_at_the_last_of_the_prompt():
    batch = collate_pairs([pair(2, 2, 3), pair(3, 1, 2)], packing=True)
    at = trained_positions(batch)
    assert isinstance(at, TrainedPositions)
    assert at.columns.tolist() == [1, 1, 4, 5, 9, 11]
    assert torch.equal(at.labels, batch.labels[batch.labels != IGNORE_INDEX])
    assert at.kept is at.columns or torch.equal(at.kept, at.columns)


def flops(model, batch):
    with FlopCounterMode(display=False) as counter:
        found = outputs.compute(model, batch, OutputSpec(("logps",))).logps
        found.sum().backward()
    return counter.get_total_flops()


def test_the_prompt_is_computed_once():
    model = tiny.model()
    use_packed(model)
    (prompt, chosen, rejected), seed = (40, 10, 14), 3
    shared = collate_pairs([pair(prompt, chosen, rejected, seed=seed)], packing=True)
    tokens = prompt + chosen + rejected
    assert shared.num_tokens == tokens
    assert unshared(shared).num_tokens == tokens + prompt
    once, twice = flops(model, shared), flops(model, unshared(shared))
    assert once / twice < 1.02 * tokens / (tokens + prompt)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_branches_move_with_a_batch_but_stay_on_the_host(device):
    batch = collate_pairs(PAIRS, packing=True)
    moved = batch.to(torch.device(device))
    assert moved.branches is batch.branches
    assert {moved.extras["answer"].device.type, moved.at.labels.device.type} == {device}


def test_a_kernel_that_knows_no_branches_says_so():
    model = tiny.model()
    with pytest.raises(ModelError, match=r"cannot share a prompt.*model\.attention: sdpa"):
        outputs.compute(model, collate_pairs(PAIRS, packing=True), OutputSpec(("logps",)))


def test_a_kernel_for_rows_gets_branches():
    calls = []

    def counted(heads, bounds, scaling):
        calls.append(bounds.branches)
        return packed_kernels.one_call_per_document(heads, bounds, scaling)

    register("counted_too", counted)
    plain, model = tiny.model(), tiny.model()
    use_packed(model)
    model.set_attn_implementation(f"{PREFIX}counted_too")
    batch = collate_pairs(PAIRS, packing=True)
    compare(learnt(model, [batch]), learnt(plain, alone(PAIRS)), close=1e-4)
    assert calls[-1] == batch.branches.tolist()
    outputs.compute(model, unshared(batch), OutputSpec(("logps",)))
    assert calls[-1] is None


@pytest.mark.proof  # 15 s
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers_know_branches():
    torch._dynamo.reset()
    plain, model = tiny.model(num_hidden_layers=2), tiny.model(num_hidden_layers=2)
    use_packed(model)
    compile_layers(layers(model), backend="aot_eager")
    found = learnt(model, [collate_pairs(PAIRS, packing=True)])
    compare(found, learnt(plain, alone(PAIRS)), close=1e-4)


def test_what_is_added_to_divide_a_row_is_no_branch():
    model = tiny.model("mistral", dtype=torch.float64)
    use_packed(model)
    batch = collate_pairs(PAIRS, packing=True)
    wide = widened(batch, 8)
    assert wide.branches.tolist() == [*batch.branches.tolist(), [3, 0, 0]]
    assert wide.branches.dtype == torch.int32
    group = collate(GROUPS[:4], packing=True)
    assert widened(group, 8).branches.tolist() == [[7, 5, 1, 9, 3], [7, 0, 0, 0, 0]]
    expected, found = (
        outputs.compute(model, one, OutputSpec(("logps",))).logps for one in (batch, wide)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_where_positions_are_not_the_rows_own_prompts_are_not_shared():
    model = tiny.model()
    forward = model.forward
    model.forward = lambda **given: forward(**{**given, "position_ids": None})
    assert not use_packed(model)
    assert use_packed(tiny.model())
