"""A network's outputs, heads and samples, against plain torch and plain decoding."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import folders
from answering import answer
from surefoot.batch import Batch, OutputSpec
from surefoot.data.text.collation import collate, collate_pairs
from surefoot.errors import ModelError
from surefoot.generate.section import GenerateSection
from surefoot.methods import Full, LoRA
from surefoot.model.rms_norm import is_fused
from surefoot.model.section import ModelSection
from surefoot.model.token_tiles import _in_tiles
from surefoot.network.draft import NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.world import ALONE

ROWS = [[5, 9, 11, 7], [8, 3], [4, 4, 6, 21, 30, 31]]
LABELS = [[-100, -100, 11, 7], [-100, 3], [4, 4, -100, 21, 30, 31]]
FEATURES = [{"input_ids": r, "labels": x} for r, x in zip(ROWS, LABELS, strict=True)]
PROMPTS = [[5, 9, 11], [7], [20, 21, 22, 23, 24, 25, 26], [3, 4], [9, 8, 7, 6, 5]]
VALUED = {"heads": {"values": 1}}


def opened(folder, kind="llama", *, model=None, sizes=None, **options):
    """A network of a random model, whose heads are drawn, too."""
    base = folders.save_model(folder / "model", kind, **(sizes or {}))
    section = ModelSection(path=str(base), **(model or {}))
    given = NetworkOptions(**{"method": Full(), **options})
    made = open_network(base, section, folders.tokenizer(), ALONE, given)
    torch.manual_seed(3)
    with torch.no_grad():
        for head in made.heads.modules.values():
            head.weight.normal_()
    made.module.eval()
    return made


def each(network):
    """Logits and last hidden states of each row by itself."""
    for row in ROWS:
        ids = torch.tensor([row])
        found = network.inner(input_ids=ids, output_hidden_states=True)
        yield found.logits[0], found.hidden_states[-1][0]


def at_labels(network, of_row):
    """``of_row(logits, hidden, label)`` at each trained position, in reading order."""
    return torch.stack(
        [
            of_row(logits[i - 1], hidden[i - 1], labels[i])
            for (logits, hidden), labels in zip(each(network), LABELS, strict=True)
            for i in range(1, len(labels))
            if labels[i] != -100
        ]
    )


def gradients(network, total):
    network.module.zero_grad()
    total.backward()
    found = {n: p.grad.clone() for n, p in network.named.items() if p.grad is not None}
    return {name: gradient for name, gradient in found.items() if gradient.any()}


def test_layers_that_are_recomputed_have_their_mlp_in_tiles(tmp_path):
    for policy, changes, expected in [
        ("full", {}, True),
        ("none", {}, False),
        ("full", {"compile": True}, False),
    ]:
        model = {"gradient_checkpointing": policy, **changes}
        network = opened(tmp_path / f"{policy}{len(changes)}", model=model)
        functions = [getattr(m.forward, "func", None) for m in network.inner.modules()]
        assert (_in_tiles in functions) is expected


def test_what_is_trained_has_its_norms_in_one_function(tmp_path):
    network = opened(tmp_path)
    norms = [m for m in network.inner.modules() if "RMSNorm" in type(m).__name__]
    assert norms and all(map(is_fused, norms))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # the second caps its logits
def test_logits_are_divided_by_the_temperature(tmp_path, kind, packing):
    network = opened(tmp_path, kind, packing=packing, model={"attention": "eager"})
    batch = collate(FEATURES, packing=packing)
    spec = OutputSpec(("logps", "entropies"), temperature=0.7)

    def logp(logits, _, label):
        return torch.log_softmax(logits / 0.7, -1)[label]

    def entropy(logits, *_):
        return torch.distributions.Categorical(logits=logits / 0.7).entropy()

    runner = network.engine.runner
    found, plain = runner.run(batch, spec), replace(runner, head=None).run(batch, spec)
    network.inner.set_attn_implementation("eager")
    for outputs in (found, plain):
        torch.testing.assert_close(outputs.logps, at_labels(network, logp))
        torch.testing.assert_close(outputs.entropies, at_labels(network, entropy))
    ours = gradients(network, found.logps.square().sum())
    theirs = gradients(network, at_labels(network, logp).square().sum())
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("outputs", [("values",), ("values", "logps"), ("values", "entropies")])
def test_values_are_those_of_the_head_at_trained_positions(tmp_path, outputs, packing):
    network = opened(tmp_path, packing=packing, **VALUED)
    head = network.heads.values
    batch = collate(FEATURES, packing=packing)
    found = network.engine.runner.run(batch, OutputSpec(outputs))
    network.inner.set_attn_implementation("sdpa")

    def value(_, hidden, __):
        return head(hidden)[0]

    torch.testing.assert_close(found.values, at_labels(network, value))
    if "logps" in outputs:
        expected = at_labels(network, lambda x, _, label: torch.log_softmax(x, -1)[label])
        torch.testing.assert_close(found.logps, expected)
    ours = gradients(network, found.values.square().sum())
    theirs = gradients(network, at_labels(network, value).square().sum())
    assert "value_head.weight" in ours
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_score_is_read_on_the_last_token_of_each_document(tmp_path, packing):
    network = opened(tmp_path, packing=packing, **VALUED)
    spec = OutputSpec(("values",), at="ends")
    found = network.forward(collate(FEATURES, packing=packing), spec).values
    network.inner.set_attn_implementation("sdpa")
    expected = [network.heads.values(hidden[-1])[0] for _, hidden in each(network)]
    torch.testing.assert_close(found, torch.stack(expected).detach())


def test_two_responses_that_share_a_prompt_have_a_score_each(tmp_path):
    network = opened(tmp_path, packing=True, **VALUED)
    pair = {"input_ids": [5, 6, 7, 8, 9, 10, 11], "lengths": [3, 2, 2]}
    pair["labels"] = [-100, -100, -100, 8, 9, 10, 11]
    spec = OutputSpec(("values",), at="ends")
    found = network.forward(collate_pairs([pair, pair], packing=True), spec).values
    network.inner.set_attn_implementation("sdpa")
    for row, ids in enumerate(([5, 6, 7, 8, 9], [5, 6, 7, 10, 11])):
        hidden = network.inner(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
        score = network.heads.values(hidden[0, -1])[0].detach()
        torch.testing.assert_close(found[row::2], score.expand(2))


def test_there_are_only_values_at_the_ends_of_documents():
    with pytest.raises(ValueError, match="only values"):
        OutputSpec(("logps",), at="ends")
    with pytest.raises(ValueError, match="'logits'"):
        OutputSpec(("logits",))


def test_values_without_a_head_are_an_error(tmp_path):
    with pytest.raises(ModelError, match="has no value head"):
        opened(tmp_path).forward(collate(FEATURES, packing=False), OutputSpec(("values",)))


@pytest.mark.parametrize("method", [Full(), LoRA(rank=2)], ids=["full", "lora"])
def test_a_head_has_a_file_of_its_own_and_is_trained(tmp_path, method):
    network = opened(tmp_path, method=method, **VALUED)
    assert type(network.heads.values) is nn.Linear, "an adapter must not wrap it"
    assert "value_head.weight" in network.named
    assert not any("value_head" in name for name in network.weights.state_dict())
    state = network.head_weights["value_head"].state_dict()
    assert state.keys() == {"value_head.weight"}
    network.head_weights["value_head"].load_state_dict({"value_head.weight": torch.ones(1, 32)})
    assert torch.equal(network.heads.values.weight, torch.ones(1, 32))
    network.weights.load_state_dict(network.weights.state_dict())


def test_a_frozen_network_has_nothing_to_train(tmp_path):
    network = opened(tmp_path, is_trainable=False, **VALUED)
    assert not network.named
    assert not any(p.requires_grad for p in network.module.parameters())


def logps_of(network, prompt, sample, temperature):
    """The log-probabilities of a response, by one forward pass over prompt and response."""
    ids = torch.tensor([[*prompt, *sample.ids]])
    labels = torch.tensor([[-100] * len(prompt) + list(sample.ids)])
    positions = torch.arange(ids.shape[1])[None]
    batch = Batch(ids, labels, positions, attention_mask=torch.ones_like(ids))
    return network.forward(batch, OutputSpec(("logps",), temperature=temperature)).logps


@pytest.mark.parametrize("top_k", [0, 5])
def test_samples_come_with_the_log_probabilities_they_were_drawn_with(tmp_path, top_k):
    network = opened(tmp_path)
    section = GenerateSection(
        max_new_tokens=9, do_sample=True, temperature=0.8, top_k=top_k, batch_size=2
    )
    found = network.generate(PROMPTS, section, seed=4)
    assert found == network.generate(PROMPTS, section, seed=4)
    assert found != network.generate(PROMPTS, section, seed=5)
    for prompt, sample in zip(PROMPTS, found, strict=True):
        expected = logps_of(network, prompt, sample, 0.8)
        torch.testing.assert_close(torch.tensor(sample.logps), expected, rtol=1e-4, atol=1e-4)


def test_a_sample_says_why_it_ended(tmp_path):
    network = opened(tmp_path, sizes={"max_position_embeddings": 16})
    section = GenerateSection(max_new_tokens=6)
    plain = answer(network.module, PROMPTS, section, stop_token_ids=[])
    stop = plain[0][2]
    long = [3] * 14
    found = network.generate([*PROMPTS[:1], long, [5] * 16], section, seed=0, stop_token_ids=[stop])
    first, second, none = found
    assert (list(first.ids), first.finish_reason) == (plain[0][: plain[0].index(stop) + 1], "stop")
    assert list(first.text_ids) == plain[0][: plain[0].index(stop)]
    assert second.finish_reason in ("context", "stop")
    assert len(second.ids) <= 2
    assert (none.ids, len(none.logps), none.finish_reason) == ((), 0, "context")
    free = network.generate(PROMPTS[:1], section, seed=0, stop_token_ids=[])[0]
    assert free.finish_reason in ("length", "stop")


@pytest.mark.parametrize("method", [Full(), LoRA(rank=2)], ids=["full", "lora"])
def test_a_model_that_is_trained_generates_and_is_trained_on(tmp_path, method):
    recomputing = {"gradient_checkpointing": True}
    network = opened(tmp_path, method=method, packing=True, model=recomputing)
    network.module.train()
    kernel = network.inner.config._attn_implementation
    lengths = []
    handle = network.inner.model.register_forward_pre_hook(
        lambda _, __, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    section = GenerateSection(max_new_tokens=5, batch_size=8)
    found = network.generate(PROMPTS, section, seed=0, stop_token_ids=[])
    handle.remove()
    assert lengths[-5:] == [1] * 5, "a key-value cache is used"
    assert network.module.training
    assert network.inner.config._attn_implementation == kernel
    plain = opened(tmp_path, method=None)
    assert found[0].ids == plain.generate(PROMPTS, section, seed=0, stop_token_ids=[])[0].ids
    network.forward(collate(FEATURES, packing=True), OutputSpec(("logps",)))


def stored_head(folder, width=32, value=0.5):
    """A model's folder with the weights of a head in it."""
    base = folders.save_model(folder / "model", "llama")
    save_file({"value_head.weight": torch.full((1, width), value)}, base / "value_head.safetensors")
    return base


def open_with_head(base, **options):
    given = NetworkOptions(method=Full(), **VALUED, **options)
    return open_network(base, ModelSection(path=str(base)), folders.tokenizer(), ALONE, given)


def test_a_head_is_read_from_the_folder_of_the_model_or_of_its_weights(tmp_path):
    base, other = stored_head(tmp_path / "one"), stored_head(tmp_path / "other", value=2.0)
    assert torch.equal(open_with_head(base).heads.values.weight, torch.full((1, 32), 0.5))
    found = open_with_head(base, weights=other).heads.values.weight
    assert torch.equal(found, torch.full((1, 32), 2.0))


def test_a_head_without_a_file_starts_at_0_and_the_log_says_so(tmp_path, caplog):
    base = folders.save_model(tmp_path, "llama")
    with caplog.at_level("INFO", "surefoot"):
        network = open_with_head(base)
    assert not network.heads.values.weight.any()
    assert f"value_head: {base} has none, so it starts at 0" in caplog.text


def test_the_head_of_another_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"contains value_head\.weight \[1, 16\], but .*\[1, 32\]"):
        open_with_head(stored_head(tmp_path, width=16))
