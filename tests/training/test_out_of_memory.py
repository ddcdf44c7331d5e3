"""A step that does not fit in memory is repeated in smaller micro-batches, bitwise as if always."""

import json
import logging
import re
import resource
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import small
import tiny
import warm
from surefoot.errors import RunError
from surefoot.methods import Full, LoRA
from surefoot.training.callback import TrainerCallback
from surefoot.training.out_of_memory import FILE

METHODS = {"full": Full(), "lora": LoRA(rank=2, dropout=0.2)}


class Device:
    """Memory for so many tokens of a micro-batch from a step on, in the forward or backward pass.

    It counts the activations of failed passes that are still alive in later ones."""

    def __init__(self, tokens, *, step=1, where="forward", error=None):
        self.tokens, self.step, self.where = tokens, step, where
        self.error = error or (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to"))
        self.refused, self.kept, self.left = 0, [], 0

    def put_into(self, trainer):
        def check(module, inputs, kwargs, output):
            step, count = trainer.state.global_step + 1, kwargs["input_ids"].numel()
            if not torch.is_grad_enabled():
                return
            self.left += sum(reference() is not None for reference in self.kept)
            if step < self.step or count <= self.tokens:
                return
            self.refused += 1
            self.kept.append(weakref.ref(output.last_hidden_state))
            if self.where == "forward":
                raise self.error()
            output.last_hidden_state.register_hook(self._refuse)

        base = trainer.policy.network.inner.get_decoder()
        base.register_forward_hook(check, with_kwargs=True)
        return trainer

    def _refuse(self, gradient):
        raise self.error()


def sizes(trainer):
    return trainer.windows.loader.batching.micro_batch_size


@pytest.mark.parametrize(
    ("method", "packing", "where"),
    [
        ("full", True, "forward"),
        pytest.param("lora", False, "backward", marks=pytest.mark.proof),
        pytest.param("lora", True, "forward", marks=pytest.mark.proof),
        pytest.param("full", False, "forward", marks=pytest.mark.proof),
        pytest.param("full", True, "backward", marks=pytest.mark.proof),
    ],
)
def test_a_split_step_is_bitwise_that_of_a_run_with_the_smaller_size(
    method, packing, where, tmp_path, caplog
):
    options = {"method": METHODS[method], "packing": packing, "global_batch_size": 8}
    options |= {"max_steps": 3, "save_steps": None}
    expected, found = small.Seen(), small.Seen()
    always = small.trainer(tmp_path / "a", expected, micro_batch_size=2, **options)
    always.fit()
    device = Device(20, where=where)
    split = device.put_into(small.trainer(tmp_path / "b", found, micro_batch_size=8, **options))
    split.fit()
    assert (device.refused, device.left) == (2, 0)  # 8 to 4, 4 to 2; no step after it
    assert sizes(split) == 2
    assert split.state.train_batch_size == 2
    small.assert_same_weights(small.weights(split), small.weights(always))
    assert found.losses == expected.losses
    assert caplog.text.count("out of memory (") == 2
    assert "step 1 is repeated with micro-batches of 2 examples instead of 4" in caplog.text
    assert "set train.micro_batch_size=2" in caplog.text


LORA = {"method": METHODS["lora"], "global_batch_size": 8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of micro-batches of 4 examples, from its fifth step on of 2; its folder, its log."""
    folder, log = tmp_path_factory.mktemp("whole"), small.Seen()
    built = small.trainer(folder, log, micro_batch_size=4, save_steps=2, **LORA)
    Device(16, step=5).put_into(built).fit()
    assert json.loads((folder / FILE).read_text())["micro_batch_size"] == [[5, 2, 4]]
    return built, folder, log


def resumed(whole, folder, saved, *members, **options):
    """A run with all the memory it needs, that goes on from a checkpoint of the whole one."""
    name = f"checkpoint-{saved}"
    shutil.copytree(whole[1] / name, folder / name)
    built = small.trainer(folder, *members, save_steps=None, **{**LORA, **options})
    small.resume(built, folder / name).fit()
    return built


def test_a_split_in_the_middle_is_a_resume_with_the_smaller_size(whole, tmp_path):
    second = resumed(whole, tmp_path, 4, micro_batch_size=2)
    small.assert_same_weights(small.weights(whole[0]), small.weights(second))


@pytest.mark.parametrize("saved", [4, pytest.param(6, marks=pytest.mark.proof)])
def test_a_resume_begins_with_the_smaller_size_and_repeats_each_step_with_its_own(
    saved, whole, tmp_path, caplog
):
    """A checkpoint before the split, whose size is in the run's file alone; and one after it."""
    caplog.set_level(logging.WARNING)
    log = small.Seen()
    shutil.copy(whole[1] / FILE, tmp_path)
    second = resumed(whole, tmp_path, saved, log, micro_batch_size=4)
    small.assert_same_weights(small.weights(second), small.weights(whole[0]))
    assert log.losses == {n: x for n, x in whole[2].losses.items() if n > saved}
    assert "from step 5 on, as memory did not suffice for train.micro_batch_size=4" in caplog.text


@pytest.mark.parametrize("change", [{"micro_batch_size": 8}, {"on_out_of_memory": "stop"}])
def test_another_size_in_the_recipe_is_tried_from_the_resumed_step_on(change, whole, tmp_path):
    shutil.copy(whole[1] / FILE, tmp_path)
    second = resumed(whole, tmp_path, 6, **{"micro_batch_size": 4, **change})
    assert sizes(second) == change.get("micro_batch_size", 4)


def test_a_single_example_that_does_not_fit_is_named_with_a_cure(tmp_path):
    built = small.trainer(tmp_path, global_batch_size=4, micro_batch_size=4)
    with pytest.raises(RunError) as raised:
        Device(5).put_into(built).fit()
    told = str(raised.value)
    assert told.startswith(
        "data.cutoff_len: step 1 ran out of memory (CUDA out of memory. Tried to"
    )
    assert re.search(r"micro-batches of one example: \S.* with \d+ tokens\. Lower", told)
    assert "model.gradient_checkpointing" in told
    assert "\n" not in told


def test_main_memory_is_memory_as_well(tmp_path):
    errors = [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate"
            " memory: you tried to allocate 6871947673600 bytes."
        ),
        MemoryError(),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ]
    options = {"items": small.examples(16), "max_steps": 1, "save_steps": None}
    built = small.trainer(tmp_path, global_batch_size=16, micro_batch_size=16, **options)

    def fail(module, args):
        if errors:
            raise errors.pop()

    built.policy.network.inner.get_decoder().register_forward_pre_hook(fail)
    built.fit()
    assert not errors
    assert sizes(built) == 1  # halved by each of the four


def test_other_errors_and_stop_are_raised_as_they_are(tmp_path):
    def wrong():
        return RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        Device(5, error=wrong).put_into(small.trainer(tmp_path / "a")).fit()
    stopping = small.trainer(tmp_path / "b", on_out_of_memory="stop")
    with pytest.raises(torch.OutOfMemoryError):
        Device(5).put_into(stopping).fit()


def test_an_evaluation_that_does_not_fit_is_repeated_with_fewer_examples(tmp_path):
    def evaluated(folder, limit, size):
        log = small.Seen()
        built = small.trainer(
            folder, log, evals=small.examples(6), eval_steps=2, max_steps=4,
            global_batch_size=8, micro_batch_size=size, packing=False,
        )  # fmt: skip

        def check(module, args, kwargs):
            if not torch.is_grad_enabled() and len(kwargs["input_ids"]) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        built.policy.network.inner.get_decoder().register_forward_pre_hook(check, with_kwargs=True)
        built.fit()
        return built, [line["eval_loss"] for line in log.logs if "eval_loss" in line]

    short, found = evaluated(tmp_path / "a", 2, 4)
    assert (short.windows.memory.forward_size, sizes(short)) == (2, 4)
    plenty, expected = evaluated(tmp_path / "b", 99, 4)
    assert found == pytest.approx(expected, rel=1e-6)
    small.assert_same_weights(small.weights(short), small.weights(plenty))


def test_a_trial_finds_the_size_and_changes_nothing_else(tmp_path):
    """The heaviest window is not the first one; with the memory that it needs, no step is split."""
    items = small.examples(16)
    for item in list(items)[-4:]:
        items[items.index(item)] = {key: [*value, *value] for key, value in item.items()}
    options = {"items": items, "save_steps": None, "max_steps": 4, "global_batch_size": 4}
    always = small.trainer(tmp_path / "a", micro_batch_size=2, **options)
    always.fit()
    log = small.Seen()
    built = small.trainer(tmp_path / "b", log, micro_batch_size=4, **options)
    heaviest = max(
        sum(b.num_tokens for b in built.windows.loader.window_at(0, w)) for w in range(4)
    )
    device = Device(heaviest - 1)
    device.put_into(built)
    events = list(log.events)
    built.try_heaviest()
    assert (log.events, device.refused, sizes(built)) == (events, 1, 2)
    assert all(p.grad is None for p in built.policy.module.parameters())
    built.fit()
    assert device.refused == 1
    small.assert_same_weights(small.weights(built), small.weights(always))


class Limit(TrainerCallback):
    """300 MB of address space more than there are now, during steps; a save has what it needs.

    A new thread reserves 64 to 128 MB for its own allocations, whenever it comes."""

    def on_step_begin(self, args, state, control):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self._set(pages * resource.getpagesize() + 300 * 2**20)

    def on_step_end(self, args, state, control):
        self._set(resource.RLIM_INFINITY)

    def _set(self, limit):
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


@pytest.mark.proof
def test_a_limit_of_address_space_splits_a_step(tmp_path):
    """Real allocations that really fail: 537 MB of activations where 300 MB are left.

    A process of its own: one that has trained keeps freed memory, which no limit counts again."""
    code = (
        f"import sys; sys.path = {sys.path}; import {__name__} as own; own.split({str(tmp_path)!r})"
    )
    with warm.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


def split(folder):
    items = [{"input_ids": [3 + i] * 128, "labels": [-100] + [3 + i] * 127} for i in range(8)]
    model = tiny.model(num_hidden_layers=1, intermediate_size=32768)
    built = small.trainer(
        Path(folder), Limit(), model=model, items=items, packing=False, method=METHODS["lora"],
        global_batch_size=8, micro_batch_size=8, max_steps=1, save_steps=None,
    )  # fmt: skip
    built.fit()
    assert built.state.global_step == 1
    assert sizes(built) < 8
