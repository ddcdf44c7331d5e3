"""What is computed of logits that no process has whole is what is computed of all of them."""

import pytest
import torch

import ranks
import tiny
from spread import UNEVEN, learn, trainer
from surefoot.methods import LoRA
from surefoot.model.outputs import WholeVocabulary
from surefoot.parallel._collectives import part
from surefoot.parallel.vocab_parallel import VocabParallelLogits, cut_vocabulary
from surefoot.parallel.world import ALONE, MeshAxis
from surefoot.stages import SFT


def drawn(size, count=11):
    """Logits, among them large and equal ones, labels, and gradients of all that is asked."""
    draw = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(count, size, dtype=torch.float64, generator=draw)
    logits[0] = 0.0
    labels = torch.randint(size, (count,), generator=draw)
    return logits, labels, torch.randn(3, count, dtype=torch.float64, generator=draw)


def asked(vocabulary, logits, labels, gradients):
    """Log-probabilities, entropies, means, predictions, and the gradient of the logits."""
    logits = logits.clone().requires_grad_()
    found = vocabulary.logps(logits, labels), vocabulary.entropies(logits), vocabulary.means(logits)
    torch.autograd.backward(found, tuple(gradients))
    values = [tensor.detach() for tensor in found]
    return *values, vocabulary.predictions(logits), logits.grad


@pytest.mark.parametrize("size", [8, 9, 3], ids=["even", "uneven", "none for the last"])
def test_log_probabilities_entropies_means_and_predictions_are_those_of_the_whole(size):
    logits, labels, gradients = drawn(size)
    expected = asked(WholeVocabulary(), logits, labels, gradients)

    def work(world):
        axis = MeshAxis(world.mesh["tp"])
        mine = part(size, axis)
        return mine, asked(VocabParallelLogits(axis, size), logits[:, mine], labels, gradients)

    for mine, (logps, entropies, means, predictions, gradient) in ranks.run(4, work, tp=4):
        torch.testing.assert_close(logps, expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(entropies, expected[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(means, expected[2], rtol=1e-12, atol=1e-12)
        assert torch.equal(predictions, expected[3])
        torch.testing.assert_close(gradient, expected[4][:, mine], rtol=1e-12, atol=1e-12)


def test_a_batch_that_trains_nothing_has_no_log_probabilities():
    def work(world):
        logits = torch.zeros(0, 4, requires_grad=True)
        found = VocabParallelLogits(MeshAxis(world.mesh["tp"]), 8)
        return found.logps(logits, torch.zeros(0, dtype=torch.int64)).shape

    assert ranks.run(2, work, tp=2) == [(0,), (0,)]


@pytest.mark.parametrize(
    ("kind", "method"),
    [("qwen2", None), ("gemma2", None), ("llama", LoRA(rank=2, targets=("lm_head",)))],
    ids=["tied", "capped", "adapter"],
)
def test_no_process_has_all_logits(kind, method, tmp_path):
    def widths(world):
        made = trainer(world, tmp_path, kind=kind, method=method, **UNEVEN)
        model = made.policy.module
        inner = model if method is None else model.get_base_model()
        with torch.no_grad():
            logits = model(input_ids=torch.arange(6)[None]).logits
        return logits.shape[-1], cut_vocabulary(inner, world).size

    assert ranks.run(2, widths, tp=2) == [(49, 97), (48, 97)]


@pytest.mark.parametrize("axis", [pytest.param("tp", marks=pytest.mark.proof), "pp"])
def test_two_processes_learn_smoothed_labels_as_one_does(axis, tmp_path):
    stage = SFT(label_smoothing_factor=0.2)
    expected = learn(trainer(ALONE, tmp_path, stage=stage, **UNEVEN), 2)
    (found, again) = ranks.run(
        2, lambda w: learn(trainer(w, tmp_path, stage=stage, **UNEVEN), 2), **{axis: 2}
    )
    assert found == again
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    plain = learn(trainer(ALONE, tmp_path, **UNEVEN), 1)
    assert plain[0] != pytest.approx(expected[0], rel=1e-3)


def test_one_process_has_the_vocabulary_whole():
    assert cut_vocabulary(tiny.model(), ALONE) is None


def test_an_evaluation_sees_the_same_predictions(tmp_path):
    def predicted(world):
        made = trainer(world, tmp_path, **UNEVEN)
        batch = next(iter(made.windows.loader.next_window()))
        with torch.no_grad():
            return made.policy.network.forward(batch, made.stage.eval_spec).predictions.tolist()

    expected = predicted(ALONE)
    assert ranks.run(2, predicted, tp=2) == [expected, expected]
