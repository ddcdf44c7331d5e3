"""A network that ranks share generates what one alone does, and is trained on afterwards."""

import pytest
import torch
from safetensors.torch import save_file

import folders
import ranks
from surefoot.batch import Loss, OutputSpec
from surefoot.data.text.collation import collate
from surefoot.errors import RecipeError
from surefoot.generate.section import GenerateSection
from surefoot.methods import Full, LoRA
from surefoot.model.section import ModelSection
from surefoot.network.draft import NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.world import ALONE
from test_startup import whole

PROMPTS = [[5, 9, 11], [7], [20, 21, 22, 23, 24, 25, 26], [3, 4], [9, 8, 7, 6, 5]]
ROWS = [[5, 9, 11, 7, 30], [8, 3, 2]]
FEATURES = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in ROWS]
SAMPLED = GenerateSection(max_new_tokens=6, do_sample=True, temperature=0.9, batch_size=2)


def opened(world, folder, **options):
    parallel = ParallelSection(**{"tp": world.tp, "pp": world.pp, **options.pop("parallel", {})})
    given = NetworkOptions(**{"method": Full(), "parallel": parallel, **options})
    section = ModelSection(path=str(folder))
    return open_network(folder, section, folders.tokenizer(), world, given)


def minus(outputs, _):
    return Loss(-outputs.logps.sum(), torch.tensor(1.0))


def learnt(network):
    """The norm of each gradient of one window, after whatever was done before."""
    network.module.train()
    batch = collate(FEATURES, packing=network.options.packing)
    spec = OutputSpec(("logps",))
    network.forward_backward([batch], minus, spec=spec, before=id, after=id)
    found = {n: whole(p.grad) for n, p in network.named.items() if p.grad is not None}
    return {name: float(gradient.norm()) for name, gradient in found.items()}


def same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.ids, ours.finish_reason) == (theirs.ids, theirs.finish_reason)
        assert ours.logps == pytest.approx(theirs.logps, abs=1e-4)


@pytest.mark.parametrize(
    ("parallel", "method"),
    [
        pytest.param({"dp_shard": 2}, Full(), marks=pytest.mark.proof),
        ({"tp": 2}, LoRA(rank=2)),
        pytest.param({"dp_shard": 2}, LoRA(rank=2), marks=pytest.mark.proof),
        pytest.param({"tp": 2}, Full(), marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_two_ranks_generate_what_one_does_and_are_trained_on(tmp_path, parallel, method):
    folders.save_model(tmp_path, vocab_size=259, num_hidden_layers=2)
    case = {"method": method, "packing": True}
    alone = opened(ALONE, tmp_path, **case)
    expected = [alone.generate(some, SAMPLED, seed=2) for some in (PROMPTS, PROMPTS[:1])]
    norms = learnt(alone)

    def work(world):
        network = opened(world, tmp_path, **case)
        # before any other pass; then with a rank that has no batch
        found = [network.generate(some, SAMPLED, seed=2) for some in (PROMPTS, PROMPTS[:1])]
        return found, learnt(network)

    for found, gradients in ranks.run(2, work, **parallel):
        for ours, theirs in zip(found, expected, strict=True):
            same(ours, theirs)
        if "dp_shard" in parallel:  # where each rank has the same window
            doubled = {name: 2 * norm for name, norm in norms.items()}
            assert gradients == pytest.approx(doubled, rel=1e-4, abs=1e-6)


def test_a_loss_of_values_alone_trains_a_sharded_model(tmp_path):
    folders.save_model(tmp_path, num_hidden_layers=2)

    def work(world):
        network = opened(world, tmp_path, heads={"values": 1})
        with torch.no_grad():
            network.head_weights["value_head"].load_state_dict(
                {"value_head.weight": constant(network.heads.values.weight)}
            )
        batch = collate(FEATURES, packing=False)
        spec = OutputSpec(("values",), at="ends")
        loss = lambda outputs, _: Loss(outputs.values.square().sum(), torch.tensor(1.0))  # noqa: E731
        network.forward_backward([batch, batch], loss, spec=spec, before=id, after=id)
        return {n: whole(p.grad) for n, p in network.named.items() if p.grad is not None}

    alone = work(ALONE)
    assert alone.keys() > {"value_head.weight", "model.embed_tokens.weight"}
    assert float(alone["model.embed_tokens.weight"].norm()) > 0
    for found in ranks.run(2, work, dp_shard=2):
        for name, gradient in alone.items():
            torch.testing.assert_close(found[name], 2 * gradient, rtol=1e-4, atol=1e-5)


def test_ranks_read_their_part_of_a_head(tmp_path):
    base = folders.save_model(tmp_path)
    expected = torch.arange(32.0)[None]
    save_file({"value_head.weight": expected}, base / "value_head.safetensors")

    def work(world):
        return whole(opened(world, tmp_path, heads={"values": 1}).heads.values.weight)

    for found in ranks.run(2, work, dp_shard=2):
        assert torch.equal(found, expected)


def constant(like):
    """Weights of 0.1, sharded as ``like``."""
    return torch.full_like(like, 0.1)


@pytest.mark.parametrize(
    ("parallel", "options", "message"),
    [
        ({"pp": 2}, {}, r"parallel\.pp: a pipeline cannot generate yet"),
        ({"tp": 2}, {"parallel": {"sequence_parallel": True}}, r"parallel\.sequence_parallel"),
        ({"tp": 2}, {"heads": {"values": 1}}, r"parallel\.tp: a model with a value head"),
    ],
    ids=["pp", "sequence", "head"],
)
def test_what_cannot_be_done_says_so(tmp_path, parallel, options, message):
    folders.save_model(tmp_path, num_hidden_layers=2)

    def work(world):
        with pytest.raises(RecipeError, match=message):
            opened(world, tmp_path, **options).generate(PROMPTS, SAMPLED, seed=0)

    ranks.run(2, work, **parallel)
