"""Compiled layers learn what plain ones learn, under the same names, with few compilations.

Most tests stop before machine code (``aot_eager``: the same graphs, run by torch).
"""

import shutil

import pytest
import torch

import ranks
from spread import UNEVEN, learn, resume, save, trainer
from surefoot.errors import RecipeError
from surefoot.methods import LISA, BAdam, BAdamRatio, Freeze, Full, LoRA
from surefoot.model.layers import compile_layers
from surefoot.parallel.sharded_model import layers
from surefoot.parallel.world import ALONE

CLOSE = 1e-5  # of mean losses (about 4) and of gradient norms: fused sums round differently
STEPS = 3  # of rows that are never of one length, the last of them fewer
ADAPTER = LoRA(rank=2, dropout=0.3)
# Dynamo looks at the gradients of all it is given, which torch itself warns of.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(world, folder, *, backend="aot_eager", **changes):
    made = trainer(world, folder, **changes)
    compile_layers(layers(made.policy.module), backend=backend)
    return made


def compare(world, folder, *, backend="aot_eager", **changes):
    """Learn plainly and compiled; how many graphs that took."""
    plain = trainer(world, folder, **changes)
    expected = learn(plain, STEPS)
    made = compiled(world, folder, backend=backend, **changes)
    for step, (ours, theirs) in enumerate(zip(learn(made, STEPS), expected, strict=True)):
        assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE), f"step {step}"
    assert made.policy.weights.state_dict().keys() == plain.policy.weights.state_dict().keys()
    named = [dict(one.policy.module.named_parameters()) for one in (made, plain)]
    assert named[0].keys() == named[1].keys()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [
        # padded, a rectangle of one row has graphs of its own
        pytest.param({"attention_dropout": 0.2}, 2, marks=pytest.mark.proof),
        # before and after attention, and layer 0 passes nothing on
        pytest.param(
            {"packing": True, "method": ADAPTER, "recompute": True}, 8, marks=pytest.mark.proof
        ),
        ({"packing": True}, 4),
        pytest.param({"method": ADAPTER}, 4, marks=pytest.mark.proof),  # layer 0 passes nothing on
        pytest.param({"method": LoRA(rank=2), "num_hidden_layers": 4}, 4, marks=pytest.mark.proof),
        pytest.param({"method": Freeze(num_layers=1)}, 4, marks=pytest.mark.proof),
        pytest.param({"recompute": True, "method": Full()}, 2, marks=pytest.mark.proof),
        # a layer with gradients, below it, and above it
        pytest.param({"method": BAdam(switch_interval=1)}, 6, marks=pytest.mark.proof),
        pytest.param(
            {"method": BAdam(switch_interval=1), "recompute": True}, 6, marks=pytest.mark.proof
        ),
        pytest.param({"method": LISA(switch_interval=1, num_layers=1)}, 6, marks=pytest.mark.proof),
        pytest.param({"method": BAdamRatio(switch_interval=2)}, 4, marks=pytest.mark.proof),
        pytest.param({"kind": "qwen2", **UNEVEN}, 2, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_the_losses_are_those_of_plain_layers(changes, graphs, tmp_path):
    found = compare(ALONE, tmp_path, **changes)
    assert 1 <= found <= graphs


@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        pytest.param({}, {"packing": True}, marks=pytest.mark.proof),
        pytest.param({}, {"recompute": True, "method": ADAPTER}, marks=pytest.mark.proof),
        pytest.param({"pp": 2}, {}, marks=pytest.mark.proof),
        pytest.param(
            {"pp": 2, "pp_schedule": "interleaved"},
            {"num_hidden_layers": 4},
            marks=pytest.mark.proof,
        ),
        pytest.param({"pp": 2}, {"method": ADAPTER, "packing": True}, marks=pytest.mark.proof),
        pytest.param({"pp": 2}, {"recompute": True}, marks=pytest.mark.proof),
        pytest.param({}, {"method": BAdam(switch_interval=1)}, marks=pytest.mark.proof),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.proof),
        pytest.param({"tp": 2}, {"recompute": True, "packing": True}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_two_processes_compile_what_they_share(parallel, changes, tmp_path):
    changes = {**changes, "parallel": parallel}
    found = ranks.run(2, lambda w: compare(w, tmp_path, **changes), timeout=240, **parallel)
    assert min(found) >= 1


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which makes the kernels")
def test_machine_code_rounds_and_drops_as_plain_layers_do(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    compare(ALONE, tmp_path, backend="inductor", attention_dropout=0.2)


def test_a_checkpoint_of_compiled_layers_is_one_of_plain_layers(tmp_path):
    made = compiled(ALONE, tmp_path, backend="eager")  # names are the same for all backends
    learn(made, 1)
    plain = resume(trainer(ALONE, tmp_path), save(made, tmp_path))
    state = made.policy.weights.state_dict()
    assert all(torch.equal(state[name], t) for name, t in plain.policy.weights.state_dict().items())


def test_a_missing_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    made = trainer(ALONE, tmp_path)
    with pytest.raises(RecipeError, match="no C\\+\\+ compiler 'no-such-compiler'"):
        compile_layers(layers(made.policy.module))
    with pytest.raises(RecipeError, match="no list of layers"):
        compile_layers([])
