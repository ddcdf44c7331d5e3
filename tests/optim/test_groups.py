"""Learning rates of some parameters: against PEFT's LoRA+, on meshes, resumed, and in errors."""

import logging

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

import ranks
import surefoot
import tiny
from folders import save_recipe
from spread import learn, resume, save, trainer
from surefoot.errors import RecipeError
from surefoot.methods import LoRA
from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.optimizer import factor_of, matches
from surefoot.optim.trained import TrainedParameters
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import dump, load

NAME = "model.layers.10.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("lora_B", True),
        ("q_proj.lora_B", True),
        ("layers.10", True),
        ("*_proj", True),
        ("self_attn.*.lora_?", True),
        ("layers.1", False),
        ("lora", False),
        ("q_proj.weight", False),
        ("a." * 9 + "a", False),
    ],
)
def test_a_pattern_matches_parts_of_a_name(pattern, is_match):
    assert matches(pattern, NAME) == is_match
    assert factor_of(NAME, {"other": 3.0, pattern: 2.0}) == (2.0 if is_match else 1.0)


def test_lora_plus_is_one_setting():
    def made():
        torch.manual_seed(0)
        return LoRA(rank=2, targets=("q_proj", "down_proj")).apply(tiny.model())

    ours, theirs = made(), made()
    named = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    optim = AdamW(learning_rate=1e-3, weight_decay=0.1, learning_rates={"lora_B": 16})
    trained = TrainedParameters(optim, named)
    expected = create_loraplus_optimizer(
        theirs, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.1
    )
    for step in range(3):
        for model, optimizer in ((ours, trained.at(step)), (theirs, expected)):
            ids = torch.arange(3, 9).roll(step)[None]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, rtol=1e-6, atol=1e-8)


def test_a_pattern_must_match_and_each_parameter_once():
    named = [("a.weight", torch.nn.Parameter(torch.zeros(2, 2)))]
    for rates, message in (
        ({"weigth": 2.0}, r"'weigth' matches no trainable parameter \(did you mean weight\?\)"),
        ({"lora_B": 2.0}, "'lora_B' matches no trainable parameter; expected .* a.weight"),
        ({"a": 2.0, "weight": 3.0}, "'a' and 'weight' both match a.weight"),
    ):
        with pytest.raises(RecipeError, match=message):
            TrainedParameters(AdamW(learning_rates=rates), dict(named))


def test_the_log_says_which_parameters_have_which_rate(caplog):
    named = {f"{i}.weight": torch.nn.Parameter(torch.zeros(2)) for i in range(3)}
    with caplog.at_level(logging.INFO, logger="surefoot"):
        TrainedParameters(AdamW(learning_rate=1e-3, learning_rates={"[12]": 4}), named)
    assert "learning rate 0.004 (0.001 x 4) for '[12]': 2 parameters, such as 1.weight" in (
        caplog.text
    )


RATES = {"embed_tokens": 0.1, "layers.1.mlp": 8.0, "*norm": 0.0}


def test_a_mesh_keeps_the_rates_and_so_does_another_that_resumes(tmp_path):
    optim = AdamW(learning_rate=5e-3, weight_decay=0.1, learning_rates=RATES)
    expected = learn(trainer(ALONE, tmp_path, optim=optim), 4)
    alone = trainer(ALONE, tmp_path, optim=optim)
    before = alone.policy.module.model.norm.weight.detach().clone()
    first = learn(alone, 2)
    folder = save(alone, tmp_path)
    assert torch.equal(alone.policy.module.model.norm.weight, before)
    found = ranks.run(
        2,
        lambda world: learn(resume(trainer(world, tmp_path, optim=optim), folder), 2),
        dp_shard=2,
    )
    for (loss, norm), (ours, theirs) in zip(expected, [*first, *found[0]], strict=True):
        assert (ours, theirs) == pytest.approx((loss, norm), rel=1e-4)
    assert found[0] == found[1]


def test_a_recipe_may_name_them_and_is_refused_early(tmp_path):
    recipe = save_recipe(tmp_path)
    loaded = load(recipe, ["optim.adamw.learning_rates={lora_B: 16}", "optim.adamw.beta1=0.8"])
    loaded = load(recipe, ["optim.adamw.learning_rates.lora_B=16"])
    assert loaded.optim.learning_rates == {"lora_B": 16.0}
    (tmp_path / "again.yaml").write_text(dump(loaded))
    assert load(tmp_path / "again.yaml").optim == loaded.optim
    with pytest.raises(RecipeError, match=r"learning_rates\.lora_B: expected a number, got 'x'"):
        load(recipe, ["optim.adamw.learning_rates={lora_B: x}"])
    with pytest.raises(RecipeError, match=r"learning_rates: expected names with numbers, got 3"):
        load(recipe, ["optim.adamw.learning_rates=3"])
    with pytest.raises(RecipeError, match="learning_rates: must not be negative, got -1"):
        load(recipe, ["optim.adamw.learning_rates.q_proj=-1"])
    with pytest.raises(RecipeError, match="'lora_B' matches no trainable parameter"):
        surefoot.train(loaded)
    assert not (tmp_path / "run" / "checkpoint-1").exists()
