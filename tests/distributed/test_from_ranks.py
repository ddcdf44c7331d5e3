"""Several processes begin with, and go on from, what MindSpore Transformers keeps by rank."""

import shutil

import pytest
import torch

import folders
import ranks
from spread import learn, save
from surefoot.checkpoint.load import load
from surefoot.checkpoint.mindspore.parallel import ParallelConfig
from surefoot.checkpoint.mindspore.rewrite import Wanted
from surefoot.errors import CheckpointError
from surefoot.inference.mindspore import write_mindspore
from surefoot.interchange import load_mindspore_checkpoint
from surefoot.parallel.world import ALONE
from test_startup import begun, contents, data

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
CUT = Wanted("distributed", ParallelConfig(1, 2, 2), names="legacy-fused", remove_redundancy=True)
FORMS = {
    "full": Wanted(names="legacy-fused"),
    "distributed": CUT,
    "same": Wanted("distributed", ParallelConfig(1, 2)),
    "iteration": Wanted("distributed", ParallelConfig(2, 2), is_iteration=True),
}
PARALLEL = {
    "dp_shard": {"dp_shard": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return folders.save_model(tmp_path_factory.mktemp("model"), "qwen2", **SIZES)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A checkpoint of one process after two steps, and the same as MindSpore has it."""
    folder = tmp_path_factory.mktemp("saved")
    made = begun(ALONE, model)
    learn(made, 2)
    checkpoint = save(made, folder)
    shutil.copy(model / "config.json", checkpoint)
    for form, wanted in FORMS.items():
        write_mindspore(checkpoint, folder / form, wanted)
    return folder


def state_of(made):
    """Weights and moments, whole, by name; of a pipeline those of this process."""
    found = {n: data(t) for n, t in made.weights.state_dict().items() if not t.is_meta}
    for name, slots in made.optimizer_state.state_dict().items():
        found |= {f"{name}.{k}": data(t) for k, t in slots.items() if not t.is_meta}
    return found


def forward(made):
    """What the model says of the first examples."""
    batch = made.loader.next_window()[0]
    with torch.no_grad():
        return made.forward(batch).logps


def test_two_begin_and_answer_as_from_the_model_itself(model, tmp_path):
    for form, wanted in FORMS.items():
        write_mindspore(model, tmp_path / form, wanted)

    def work(world):
        made = begun(world, model)
        expected, logps = contents(made.models.policy), forward(made)
        for form in FORMS:
            made = begun(world, tmp_path / form)
            assert contents(made.models.policy) == expected, form
            assert torch.equal(forward(made), logps), form

    ranks.run(2, work, tp=2)


def goes_on(saved, model, forms, **parallel):
    """Every form gives what our own checkpoint does, in every process."""

    def work(world):
        made = begun(world, model)
        load(saved / "checkpoint-2", {n: s for n, s in made.states.items() if n != "random"})
        expected, losses = state_of(made), learn(made, 1)
        for form in forms:
            made = begun(world, model)
            load_mindspore_checkpoint(saved / form, made, base=model)
            assert made.state.global_step == 2
            assert state_of(made) == expected, form
            assert learn(made, 1) == losses, form

    ranks.run(2, work, **parallel)


def test_two_go_on_with_the_same_strategy_and_from_four_without_a_merge(saved, model):
    goes_on(saved, model, ["same", "distributed"], tp=2)


@pytest.mark.proof
@pytest.mark.parametrize("parallel", PARALLEL)
def test_any_two_go_on_from_any_form(saved, model, parallel):
    goes_on(saved, model, FORMS, **PARALLEL[parallel])


@pytest.mark.proof
def test_a_file_that_one_process_cannot_read_stops_both(saved, model, tmp_path, monkeypatch):
    def work(world):
        made = begun(world, model)
        if world.rank == 1:
            broken = CheckpointError("a disk that fails")
            monkeypatch.setattr(
                "surefoot.checkpoint.boxed.Part.fill", lambda *_: (_ for _ in ()).throw(broken)
            )
        with pytest.raises(CheckpointError, match="a disk that fails"):
            load_mindspore_checkpoint(saved / "distributed", made, base=model)

    ranks.run(2, work, dp_shard=2)
