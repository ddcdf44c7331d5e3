"""Several processes begin with, and go on from, what MindSpore Transformers keeps by rank."""

import shutil

import pytest
import torch

import folders
import ranks
from spread import learn, save, trainer
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.sources import JoinedSource, TensorsInMemory
from surefoot.errors import CheckpointError
from surefoot.model.weights import places
from surefoot.parallel.world import ALONE
from surefoot.plugins.mindspore.naming import AttentionHeads, to_mindspore
from surefoot.plugins.mindspore.resume import load_mindspore_checkpoint
from surefoot.plugins.mindspore.target import MindSporeFolder
from surefoot.plugins.mindspore.tensor_layout import ParallelConfig
from surefoot.plugins.mindspore.writing import write_full
from surefoot.use.exporting.conversion import convert
from test_startup import begun, contents, data

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
CUT = MindSporeFolder(
    layout="distributed",
    parallel_config=ParallelConfig(1, 2, 2),
    names="legacy-fused",
    remove_redundancy=True,
)
FORMS = {
    "full": MindSporeFolder(names="legacy-fused"),
    "distributed": CUT,
    "same": MindSporeFolder(layout="distributed", parallel_config=ParallelConfig(1, 2)),
    "iteration": MindSporeFolder(
        layout="distributed", parallel_config=ParallelConfig(2, 2), iteration=True
    ),
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
        convert(checkpoint, folder / form, wanted)
    return folder


def state_of(made):
    """Weights and moments, whole, by name; of a pipeline those of this process."""
    found = {n: data(t) for n, t in made.policy.weights.state_dict().items() if not t.is_meta}
    for name, slots in made.policy.optimizer_state.state_dict().items():
        found |= {f"{name}.{k}": data(t) for k, t in slots.items() if not t.is_meta}
    return found


def forward(made):
    """What the model says of the first examples."""
    batch = made.windows.loader.next_window()[0]
    with torch.no_grad():
        return made.policy.network.forward(batch, made.stage.eval_spec).logps


def test_two_begin_and_answer_as_from_the_model_itself(model, tmp_path):
    for form, wanted in FORMS.items():
        convert(model, tmp_path / form, wanted)

    def work(world):
        made = begun(world, model)
        expected, logps = contents(made.policy.module), forward(made)
        for form in FORMS:
            made = begun(world, tmp_path / form)
            assert contents(made.policy.module) == expected, form
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


@pytest.mark.proof
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
                "surefoot.checkpoint.state.states.LocalBox.fill",
                lambda *_: (_ for _ in ()).throw(broken),
            )
        with pytest.raises(CheckpointError, match="a disk that fails"):
            load_mindspore_checkpoint(saved / "distributed", made, base=model)

    ranks.run(2, work, dp_shard=2)


def experts_of(made):
    """Weights and moments of a mixture under the names of Hugging Face's files: of what lies
    together in memory, its parts."""
    found = {name: t.detach().clone() for name, t in made.policy.weights.state_dict().items()}
    for name, slots in made.policy.optimizer_state.state_dict().items():
        for prefix, slot in (("adam_m.", "exp_avg"), ("adam_v.", "exp_avg_sq")):
            parts = {
                n: at for n, at in places(made.policy.weights.model).items() if at.fused == name
            }
            for part, at in parts.items():
                rows = slice(at.start[1], at.start[1] + at.shape[0])
                found[prefix + part] = slots[slot][at.start[0], rows].clone()
            if not parts:
                found[prefix + name] = slots[slot].clone()
    return found


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param("qwen3_moe", "mcore-fused", marks=pytest.mark.proof),
        pytest.param("mixtral", "legacy", marks=pytest.mark.proof),
    ],
    ids=["qwen3", "mixt"],
)
def test_the_moments_of_experts_are_gone_on_from(kind, family, tmp_path):
    def fresh(world):
        return trainer(world, tmp_path / "run", kind=kind)

    before = fresh(ALONE)
    learn(before, 2)
    named = to_mindspore(TensorsInMemory(experts_of(before)), family, AttentionHeads(4, 2))
    numbers = TensorsInMemory({"step_num": torch.tensor(2), "global_step": torch.tensor([2])})
    write_full(JoinedSource([("", named), ("", numbers)]), tmp_path / "theirs")
    before.policy.module.config.save_pretrained(tmp_path / "theirs")
    expected = state_of(before)

    def resumed(world):
        made = fresh(world)
        load_mindspore_checkpoint(tmp_path / "theirs", made, base=tmp_path / "theirs")
        return {n: v for n, v in state_of(made).items() if n in expected}, learn(made, 1)

    after = learn(before, 1)
    for parallel in ({}, *(PARALLEL[name] for name in ("dp_shard", "tp"))):
        for found, losses in ranks.run(2 if parallel else 1, resumed, **parallel):
            moments = {name for name in expected if name.endswith(("exp_avg", "exp_avg_sq"))}
            assert moments <= found.keys()
            whole = [n for n in found if n in moments or "experts." not in n or not parallel]
            assert [n for n in whole if found[n] != expected[n]] == []
            assert losses == [pytest.approx(one, abs=1e-5, rel=1e-5) for one in after]
