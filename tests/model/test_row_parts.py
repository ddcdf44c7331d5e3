"""A packed row that ranks share: together they attend as a loop over its pairs says, forward and
backward, whatever its documents are. Ranks are threads here, which exchange what ranks would."""

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AttentionInterface

from surefoot.model import packed_kernels
from surefoot.model.packed_attention import DocumentBounds, _eager, by_document, sdpa
from surefoot.parallel import context_parallel
from surefoot.parallel.context_parallel import PackedRowPart, assigned
from surefoot.parallel.world import RowGroup

SIZE = 4  # of a head
DOCUMENT = st.one_of(
    st.tuples(st.integers(1, 40), st.just(0), st.just(0)),
    st.tuples(st.integers(1, 30), st.integers(0, 12), st.integers(0, 12)),
)
DOCUMENTS = st.lists(DOCUMENT, min_size=1, max_size=9)


class Exchange:
    """An all-to-all of threads."""

    def __init__(self, size):
        self.barrier, self.rows = threading.Barrier(size, timeout=20), {}

    def __call__(self, rows, num_sent, num_received, group):
        self.rows[group.rank] = torch.split(rows.detach(), num_sent)
        self.barrier.wait()
        received = [self.rows[rank][group.rank] for rank in range(group.size)]
        assert [len(part) for part in received] == [*num_received]
        self.barrier.wait()
        return torch.cat(received)


def pairs_of(documents, window):
    """[T, T] whether each query attends to each key, by the path from the prompt to it."""
    length = sum(map(sum, documents))
    sees, start = torch.zeros(length, length, dtype=torch.bool), 0
    for prompt, *responses in documents:
        stop = start + prompt
        for response in responses:
            path = [*range(start, start + prompt), *range(stop, stop + response)]
            for place, query in enumerate(path):
                first = 0 if window is None else max(0, place - window + 1)
                sees[query, path[first : place + 1]] = True
            stop += response
        start = stop
    return sees


def expected_of(heads, documents, window, softcap, sinks):
    """[1, H, T, E] attention by the definition, in float64."""
    query, key, value = heads
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * SIZE**-0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~pairs_of(documents, window), -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


def each_thread(size, work):
    """``work(rank)`` in as many threads; the first error is raised."""
    errors = []

    def run(rank):
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def compare(attend, documents, size, *, window=None, softcap=None, sinks=None, groups=1, close):
    length = sum(map(sum, documents))
    dice = torch.Generator().manual_seed(0)
    options = {"generator": dice, "dtype": torch.float64}
    counts = (2 * groups, 2, 2)
    heads = [torch.randn(1, n, length, SIZE, **options).requires_grad_() for n in counts]
    weights = torch.randn(1, 2 * groups, length, SIZE, **options)
    leaves = heads
    if sinks:
        sinks = torch.randn(2 * groups, **options).requires_grad_()
        leaves = [*heads, sinks]
    wanted = expected_of(heads, documents, window, softcap, sinks)
    trains = wanted.requires_grad
    gradients = torch.autograd.grad((wanted * weights).sum(), leaves) if trains else ()
    found = torch.full_like(wanted, torch.nan)
    grads = [torch.full_like(head, torch.nan) for head in heads]
    of_sinks = []
    bounds = np.cumsum([0, *map(sum, documents)]).tolist()
    keywords = {"sliding_window": window, "softcap": softcap, "scaling": SIZE**-0.5}

    def work(rank):
        part = PackedRowPart(documents, RowGroup(rank, size, group="threads"))
        mine = [head.detach()[:, :, part.tokens].requires_grad_(trains) for head in heads]
        own = None if sinks is None else sinks.detach().clone().requires_grad_()
        row = DocumentBounds(bounds, documents, part)
        output = attend(nn.Identity(), *mine, None, document_bounds=row, s_aux=own, **keywords)[0]
        output = output.transpose(1, 2)
        found[:, :, part.tokens] = output.detach()
        if not trains:
            return
        (output * weights[:, :, part.tokens]).sum().backward()
        for whole, tensor in zip(grads, mine, strict=True):
            whole[:, :, part.tokens] = tensor.grad
        if own is not None:
            of_sinks.append(own.grad)

    each_thread(size, work)
    if sinks is not None:
        grads.append(torch.stack(of_sinks).sum(0))
    for one, other in zip([found, *grads], [wanted.detach(), *gradients], strict=trains):
        assert float((one - other).abs().max()) <= close


@pytest.fixture
def exchanged(monkeypatch):
    """Lets threads of the next comparison exchange rows."""

    def among(size):
        monkeypatch.setattr(context_parallel, "_exchanged", Exchange(size))

    return among


def attentions(among, documents, size, window, groups, extra):
    among(size)
    is_long = sum(map(sum, documents)) >= size
    if not is_long:
        return
    if extra is None:
        compare(by_document(sdpa), documents, size, window=window, groups=groups, close=1e-13)
    else:  # softmax of the eager kernel is in float32
        eager = by_document(_eager)
        compare(eager, documents, size, window=window, groups=groups, close=1e-5, **extra)


CASES = (
    DOCUMENTS,
    st.sampled_from([2, 3, 4, 8]),
    st.none() | st.integers(1, 20),
    st.sampled_from([1, 3]),
    st.sampled_from([None, {"softcap": 2.0}, {"sinks": True}]),
)


@settings(max_examples=25, deadline=None)
@given(*CASES)
def test_ranks_attend_as_the_definition_says(documents, size, window, groups, extra):
    with pytest.MonkeyPatch.context() as patch:
        among = lambda n: patch.setattr(context_parallel, "_exchanged", Exchange(n))  # noqa: E731
        attentions(among, documents, size, window, groups, extra)


@pytest.mark.proof
@settings(max_examples=600, deadline=None)
@given(*CASES)
def test_they_do_for_hundreds_of_rows(documents, size, window, groups, extra):
    with pytest.MonkeyPatch.context() as patch:
        among = lambda n: patch.setattr(context_parallel, "_exchanged", Exchange(n))  # noqa: E731
        attentions(among, documents, size, window, groups, extra)


PLANS = {
    "divided": [(50, 0, 0), (7, 0, 0)],
    "a shared prompt": [(9, 4, 6), (20, 11, 3), (3, 0, 0)],
    "local": [(4, 0, 0)] * 8,
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", PLANS.values(), ids=PLANS)
def test_flex_attention_gets_the_same_plan(documents, exchanged):
    exchanged(3)
    packed_kernels.register("flex", packed_kernels.flex)
    attend = AttentionInterface()["surefoot_packed_flex"]
    with torch.no_grad():  # torch has no backward pass of it on a CPU
        compare(attend, documents, 3, groups=2, close=1e-12)


def varlen_by_hand(query, key, value, query_bounds, key_bounds, most, _most, **options):
    """What torch's documentation says of ``varlen_attn``, whose kernel needs a GPU: [T, H, E] each,
    and in each segment a causal mask that is aligned at the ends of queries and keys."""
    assert options["window_size"] == (-1, 0)
    outputs = []
    segments = zip(query_bounds.tolist(), key_bounds.tolist(), strict=True)
    for (a, c), (b, d) in pairwise(segments):
        assert b - a <= most
        parts = (query[a:b], key[c:d], value[c:d])
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in parts)
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=options["scale"], enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("documents", PLANS.values(), ids=PLANS)
def test_varlen_attention_gets_the_same_plan(documents, exchanged, monkeypatch):
    exchanged(3)
    monkeypatch.setattr(packed_kernels, "varlen_attn", varlen_by_hand)
    packed_kernels.register("varlen", packed_kernels.varlen)
    attend = AttentionInterface()["surefoot_packed_varlen"]
    compare(attend, documents, 3, groups=2, close=1e-12)
    exchanged(3)  # a window is not of the kernel, so these layers call sdpa, on the same plan
    compare(attend, documents, 3, window=3, close=1e-12)


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 2, 4]))
def test_every_token_is_of_one_rank_and_parts_are_even(documents, size, unit):
    length = sum(map(sum, documents))
    rest = -length % unit or (unit if length < size * unit else 0)
    documents = [*documents, (rest + unit * size, 0, 0)]
    length = sum(map(sum, documents))
    parts = assigned(documents, size, unit)
    tokens = sorted(token for ranges in parts for a, z in ranges for token in range(a, z))
    assert tokens == [*range(length)]
    counts = [sum(z - a for a, z in ranges) for ranges in parts]
    assert min(counts) > 0
    assert all(count % unit == 0 for count in counts)
    assert max(counts) <= length / size * 33 / 32 + unit


def rows(seed=0, count=10, length=32768):
    """Rows of each of three mixes of documents."""
    random = np.random.default_rng(seed)
    for mean, spread in ((6.0, 0.9), (8.3, 0.8), (20, 0)):
        row = []
        for _ in range(count):
            documents, left = [], length
            while left > 0:
                tokens = int(min(left, max(16, np.exp(random.normal(mean, spread)))))
                documents.append((tokens, 0))
                left -= tokens
            row.append(documents)
        yield row


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_slowest_rank_has_hardly_more_pairs_than_the_mean(size):
    for mix in rows():
        uneven = []
        for documents in mix:
            part = PackedRowPart(documents, RowGroup(0, size))
            position = np.concatenate([np.arange(sum(document)) for document in documents]) + 1
            pairs = np.bincount(part.owner, weights=position)
            uneven.append(pairs.max() / pairs.mean())
        assert max(uneven) <= 1.15


def test_nothing_is_sent_of_documents_that_no_rank_shares():
    part = PackedRowPart([(4, 0)] * 24, RowGroup(1, 2))
    assert part.exchange(None).is_local
    assert part.num_fetched(None) == [0, 0]
