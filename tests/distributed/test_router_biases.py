"""``model.router_bias_update_rate``: experts are balanced by biases, without a loss."""

import pytest
import torch
from safetensors.torch import load_file

import folders
import ranks
import surefoot
from each import some
from spread import learn
from surefoot.errors import ModelError, RecipeError
from surefoot.methods import LoRA
from surefoot.parallel.world import ALONE
from test_adapted_experts_ranks import save_base
from test_startup import begun, whole

RATE = 0.01
KINDS = some(
    ("deepseek_v3", "glm4_moe", "minimax_m2", "dots1", "solar_open", "nemotron_h"),
    ["deepseek_v3", "minimax_m2"],
)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def biases(model):
    return {n: b.clone() for n, b in model.named_buffers() if n.endswith("correction_bias")}


def started(world, folder, **model):
    return begun(world, folder, model={"router_bias_update_rate": RATE, **model})


def loads(model, rows):
    """The tokens that each expert gets of rows without padding, by the arguments of its module."""
    counts, handles = {}, []
    for name, module in model.named_modules():
        if name.endswith("experts") and any(p.ndim == 3 for p in module.parameters(recurse=False)):

            def count(_, args, kwargs, name=name, module=module):
                chosen = next(x for x in (*args, *kwargs.values()) if x.dtype == torch.int64)
                number = len(next(p for p in module.parameters() if p.ndim == 3))
                found = torch.bincount(chosen.flatten(), minlength=number)
                counts[name] = counts.get(name, 0) + found

            handles.append(module.register_forward_pre_hook(count, with_kwargs=True))
    with torch.no_grad():
        for row in rows:
            model(input_ids=row[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.proof)])
def test_each_bias_moves_by_the_tokens_of_the_whole_step(kind, recompute, tmp_path):
    save_base(tmp_path, kind)
    made = started(ALONE, tmp_path, gradient_checkpointing=recompute)
    model = made.policy.network.inner
    before, window = biases(model), made.windows.next_turn().window
    assert len(window) > 1
    assert any(not bool(batch.attention_mask.all()) for batch in window), "there is padding"
    rows = [
        ids[mask.bool()]
        for batch in window
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]
    expected = loads(model, rows)
    made = started(ALONE, tmp_path, gradient_checkpointing=recompute)
    learn(made, 1)
    after = biases(made.policy.network.inner)
    assert len(before) == len(expected) > 0
    for (name, bias), counts in zip(before.items(), expected.values(), strict=True):
        step = RATE * (counts.double().mean() - counts).sign()
        assert torch.equal(after[name], bias + step.float()), name
        assert step.any()


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2},
        pytest.param({"dp_replicate": 2}, marks=pytest.mark.proof),
        pytest.param({"tp": 2}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_ranks_move_them_as_one_does(mesh, tmp_path):
    save_base(tmp_path, "deepseek_v3")
    alone = started(ALONE, tmp_path)
    learn(alone, 2)
    expected = biases(alone.policy.network.inner)

    def work(world):
        made = started(world, tmp_path)
        learn(made, 2)
        return {n: whole(b) for n, b in biases(made.policy.network.inner).items()}

    for found in ranks.run(2, work, **mesh):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_they_stay_in_evaluations_and_bad_steps(tmp_path):
    save_base(tmp_path, "deepseek_v3")
    made = started(ALONE, tmp_path)
    network, before = made.policy.network, biases(made.policy.network.inner)
    window = made.windows.next_turn().window
    with network.evaluating():
        network.forward(window[0], made.stage.eval_spec)
    assert not network.biases.take().any()
    network.biases.update(torch.arange(len(network.biases.take())).double(), torch.tensor(1.0))
    after = biases(network.inner)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_cut_run_resumes_bitwise(tmp_path):
    (tmp_path / "model").mkdir()
    save_base(tmp_path / "model", "deepseek_v3")
    folders.save_data(tmp_path / "data")
    recipe = folders.save_recipe(
        tmp_path,
        model={"path": str(tmp_path / "model"), "router_bias_update_rate": RATE},
        optim={"adamw": {"learning_rate": 0.03, "schedule": "constant"}},
        method="full",
    )
    surefoot.train(recipe)
    surefoot.train(recipe, **{"train.output_dir": str(tmp_path / "cut"), "train.max_steps": 2})
    surefoot.train(recipe, **{"train.output_dir": str(tmp_path / "cut")})
    base, one, two = (
        {
            n: t
            for file in (tmp_path / name).glob("model*.safetensors")
            for n, t in load_file(file).items()
        }
        for name in ("model", "run/checkpoint-4", "cut/checkpoint-4")
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    moved = [name for name in one if name.endswith("correction_bias")]
    assert moved
    assert not any(torch.equal(one[name], base[name]) for name in moved)


def test_what_has_no_such_bias_or_would_not_save_it_is_refused(tmp_path):
    save_base(tmp_path / "plain", "qwen3_moe")
    with pytest.raises(ModelError, match="has no e_score_correction_bias; remove it"):
        started(ALONE, tmp_path / "plain")
    save_base(tmp_path, "deepseek_v3")
    with pytest.raises(RecipeError, match="an adapter has no place for the biases of its base"):
        begun(ALONE, tmp_path, model={"router_bias_update_rate": RATE}, method=LoRA(rank=2))

    def work(world):
        with pytest.raises(RecipeError, match="no stage of a pipeline sees the routers of all"):
            started(world, tmp_path)

    ranks.run(2, work, pp=2)
    with pytest.raises(ValueError, match="router_bias_update_rate must be positive, got 0"):
        started(ALONE, tmp_path, router_bias_update_rate=0)
