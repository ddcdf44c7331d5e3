"""What a chunk of logits teaches, by torch and in one kernel."""

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from surefoot.model.head import logit_gradients
from surefoot.model.head.logit_gradients import torch_logit_gradients, why_not


def reference(logits, labels, softcap, smoothing):
    logits = logits.double().requires_grad_()
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logps = capped.log_softmax(-1)
    loss = F.cross_entropy(capped, labels, label_smoothing=smoothing, reduction="sum")
    found = torch.autograd.grad(loss, logits)[0]
    return logps.gather(1, labels[:, None])[:, 0], logps.sum(-1), found


def inputs(dtype, columns=701):
    torch.manual_seed(0)
    return (3 * torch.randn(6, columns)).to(dtype), torch.randint(columns, (6,))


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from surefoot.model.head.logit_gradients_triton import _row

for dtype in ("bf16", "fp32"):
    for softcap in (None, 30.0):
        signature = {"logits": f"*{dtype}", "labels": "*i64", "found": "*fp32", "columns": "i32"}
        constants = {"SOFTCAP": softcap, "SMOOTHING": 0.1, "LEARNS": True}
        signature |= dict.fromkeys(constants, "constexpr")
        target = GPUTarget("cuda", 90, 32)
        made = compile(ASTSource(_row, signature, constants), target, {"num_warps": 8})
        print(len(made.asm["cubin"]) > 0, "ld.local" in made.asm["ptx"])
"""


def need_triton():
    if not find_spec("triton"):
        pytest.skip("needs triton (pip install triton); its interpreter and compiler need no GPU")


@pytest.fixture
def kernel(monkeypatch):
    need_triton()
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # settled for a process when triton is imported
    return import_module("surefoot.model.head.logit_gradients_triton").fused


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_torch_gives_what_the_loss_of_a_reference_gives(softcap, smoothing):
    logits, labels = inputs(torch.float64)
    found = torch_logit_gradients(logits.clone(), labels, softcap, smoothing, True)
    logps, sums, learnt = reference(logits, labels, softcap, smoothing)
    torch.testing.assert_close(found[0], logps.detach())
    torch.testing.assert_close(found[2], learnt)
    if smoothing:
        torch.testing.assert_close(found[1], sums.detach())


@pytest.mark.parametrize("columns", [5, 701, 4_096, 9_001])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_kernel_gives_what_the_loss_of_a_reference_gives(kernel, softcap, smoothing, columns):
    logits, labels = inputs(torch.float32, columns)
    found = kernel(logits.clone(), labels, softcap, smoothing, True)
    expected = reference(logits, labels, softcap, smoothing)
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here, there.detach().float(), rtol=2e-5, atol=1e-6)


def test_the_kernel_leaves_logits_alone_that_teach_nothing(kernel):
    logits, labels = inputs(torch.float32)
    before = logits.clone()
    logps, _, none = kernel(logits, labels, None, 0.0, False)
    assert none is None
    assert torch.equal(logits, before)
    torch.testing.assert_close(logps, reference(before, labels, None, 0.0)[0].detach().float())


def test_the_kernel_passes_its_own_trial(kernel):
    assert why_not(kernel, torch.device("cpu")) is None


def test_the_kernel_compiles_for_a_gpu_and_spills_nothing():
    need_triton()
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == 4 * ["True False"]


@pytest.mark.parametrize("spoilt", range(3))
def test_a_kernel_that_gives_other_numbers_is_not_trusted(spoilt):
    names = ["log-probabilities", "sums", "slopes"]

    def wrong(*arguments):
        found = list(torch_logit_gradients(*arguments))
        found[spoilt] = found[spoilt] * 1.01
        return tuple(found)

    assert f"its {names[spoilt]} differ by" in why_not(wrong, torch.device("cpu"))


def test_a_kernel_that_gives_other_bits_each_time_is_not_trusted():
    calls = []

    def loose(*arguments):
        calls.append(None)
        logps, *others = torch_logit_gradients(*arguments)
        return (logps * (1 + 1e-7 * len(calls)), *others)

    assert "differ from run to run" in why_not(loose, torch.device("cpu"))


def test_where_there_is_no_gpu_torch_does_it():
    assert logit_gradients.fastest(torch.zeros(1, 2)) is torch_logit_gradients
