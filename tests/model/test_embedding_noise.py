"""Noise on embeddings: that of the paper, by example, and the same again after a resume."""

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

import surefoot
import tiny
from project import Project, assert_same, final_weights, losses
from spread import compare
from surefoot.errors import ModelError, RecipeError
from surefoot.methods import Full, LoRA
from surefoot.model.layers import add_embedding_noise, document_lengths
from surefoot.recipe.recipe import load
from surefoot.training import TrainerCallback

ALPHA = 5.0


def run(model, length=7):
    torch.manual_seed(3)
    ids = torch.arange(3, 3 + length)[None]
    return model(input_ids=ids, position_ids=torch.arange(length)[None], use_cache=False).logits


@pytest.mark.parametrize("method", [None, LoRA(rank=2, targets=("embed_tokens", "q_proj"))])
def test_a_row_gets_the_noise_that_the_trainer_of_transformers_adds(method):
    inner = tiny.model("llama")
    model = inner if method is None else method.apply(inner)
    embeddings = inner.get_input_embeddings()
    embeddings.neftune_noise_alpha = ALPHA
    plain = run(model.train())
    hook = embeddings.register_forward_hook(neftune_post_forward_hook)
    theirs = run(model)
    hook.remove()
    add_embedding_noise(model, inner, ALPHA)
    torch.testing.assert_close(run(model), theirs)
    assert not torch.allclose(plain, theirs, atol=1e-3)
    torch.testing.assert_close(run(model.eval()), plain, msg="none in evaluations")


@pytest.mark.parametrize("lengths", [[1], [4, 1, 6], [2, 2]])
def test_an_example_gets_the_same_noise_in_any_row(lengths):
    expected = [length for length in lengths for _ in range(length)]
    packed = torch.cat([torch.arange(length) for length in lengths])[None]
    assert document_lengths(packed, None).tolist() == [expected]
    mask = (torch.arange(8) < torch.tensor(lengths)[:, None]).long()
    padded = document_lengths(torch.arange(8).expand_as(mask), mask)
    assert padded[mask.bool()].tolist() == expected


def test_a_model_that_does_not_call_its_embeddings_is_an_error():
    model = tiny.model().train()
    add_embedding_noise(model, model, ALPHA)
    with pytest.raises(ModelError, match="neftune_noise_alpha: LlamaForCausalLM does not call"):
        model(
            inputs_embeds=torch.zeros(1, 2, 32),
            position_ids=torch.arange(2)[None],
            use_cache=False,
        )


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control):
        control.should_training_stop |= state.global_step == 3


@pytest.mark.proof
def test_a_resumed_run_has_the_noise_of_the_uninterrupted_one(tmp_path):
    settings = {"model": {"neftune_noise_alpha": ALPHA}, "train": {"max_steps": 5}}
    project = Project(tmp_path, **settings)
    surefoot.train(project.recipe)
    cut = {"train.output_dir": str(tmp_path / "cut")}
    surefoot.train(project.recipe, callbacks=[Stop()], **cut)
    surefoot.train(project.recipe, **cut)
    assert losses(tmp_path / "cut") == losses(project.run)
    assert_same(final_weights(tmp_path / "cut"), final_weights(project.run))
    plain = {"train.output_dir": str(tmp_path / "plain"), "model.neftune_noise_alpha": None}
    surefoot.train(project.recipe, **plain, **{"train.max_steps": 1})
    assert losses(tmp_path / "plain")[1] != losses(project.run)[1]


class Noisy(Full):
    def apply(self, model):
        add_embedding_noise(model, model, ALPHA)
        return super().apply(model)


def test_ranks_that_share_the_rows_draw_the_same_noise(tmp_path):
    compare(2, tmp_path, parallel={"tp": 2}, method=Noisy())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": {"neftune_noise_alpha": -1}}, "must be positive, got -1"),
        (
            {"model": {"neftune_noise_alpha": 5}, "parallel": {"pp": 2}},
            r"parallel\.pp: not supported with model\.neftune_noise_alpha; remove one",
        ),
    ],
)
def test_what_would_go_wrong_without_a_word_is_refused(settings, words, tmp_path):
    with pytest.raises(RecipeError, match=words):
        load(Project(tmp_path, **settings).recipe)
