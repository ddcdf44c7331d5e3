"""The output head with its loss, alone: Surefoot's, full logits, torch's and Liger's.

    python benchmarks/gpu/head_case.py TASK.json

The task has a vocabulary, a hidden size and numbers of tokens. Hidden states are in bfloat16; a
trained matrix is in float32 and multiplied in bfloat16, a frozen one is stored in bfloat16. Times
are those of forward and backward. Errors are relative to float64, over a sample of positions. The
report is written anew after each row, so that a program that is stopped loses one row.

Shapes: N positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from surefoot.model import chunked_cross_entropy
from surefoot.use.bench import forget_peak, peak_memory

CHUNKS = (384, 1024, 4096)  # positions, of Surefoot's head; the first is what training uses
FEWEST, MOST, SECONDS = 3, 20, 0.5  # repetitions, and how long to repeat
LOW = torch.bfloat16

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of x_ND, w_VD, labels_N


@dataclass(frozen=True)
class Task:
    """What the program is given."""

    report: str
    device: str
    vocabulary: int
    hidden: int
    tokens: tuple[int, ...]
    sample: int  # positions that are compared with float64
    seconds: float = SECONDS


@dataclass(frozen=True)
class Inputs:
    """Random hidden states and labels, and one matrix."""

    hidden: torch.Tensor  # [N, D]
    weight: torch.Tensor  # [V, D]
    labels: torch.Tensor  # [N]

    def first(self, count: int) -> Inputs:
        """The same of the first positions, with no gradients yet."""
        hidden_ND = self.hidden.detach()[:count].clone().requires_grad_()
        return Inputs(hidden_ND, self.weight, self.labels[:count])


def ours(chunk: int) -> Loss:
    """Surefoot's head with chunks of so many positions."""

    def loss(x_ND: torch.Tensor, w_VD: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        chunked_cross_entropy.CHUNK = chunk
        head = chunked_cross_entropy.Head(w_VD, dtype=LOW)
        total, *_ = chunked_cross_entropy.totals(head, x_ND, labels_N, 0.0)
        return -total / len(labels_N)

    return loss


def full_logits(x_ND: torch.Tensor, w_VD: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """As models of transformers do: logits in bfloat16, cross entropy in float32."""
    return F.cross_entropy(F.linear(x_ND, w_VD.to(LOW)).float(), labels_N)


def of_torch(x_ND: torch.Tensor, w_VD: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """torch's chunked head, since 2.13."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x_ND, w_VD.to(LOW), labels_N, options=options)


def of_liger(x_ND: torch.Tensor, w_VD: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Liger's fused head; under autocast, as the Hugging Face Trainer runs it."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    found: torch.Tensor = LigerFusedLinearCrossEntropyLoss()(w_VD, x_ND, labels_N)
    return found


def heads(device: str) -> Iterator[tuple[str, Loss | None, str]]:
    """Subjects, the most telling first; one that is not here has the reason instead."""
    yield "head-surefoot", ours(CHUNKS[0]), ""
    yield "head-logits", full_logits, ""
    has_liger = find_spec("liger_kernel") is not None and device == "cuda"
    yield "head-liger", of_liger if has_liger else None, "without liger_kernel and CUDA"
    has_torch = hasattr(F, "linear_cross_entropy")
    reason = f"torch {torch.__version__} has no linear_cross_entropy"
    yield "head-torch", of_torch if has_torch else None, reason
    for chunk in CHUNKS[1:]:
        yield f"head-surefoot_{chunk}", ours(chunk), ""


def inputs(todo: Task, *, trained: bool) -> Inputs:
    """Hidden states of unit size, and a matrix whose logits have a deviation of about 2."""
    draws = torch.Generator(todo.device).manual_seed(0)
    many, where = max(todo.tokens), {"device": todo.device, "generator": draws}
    weight_VD = torch.empty(todo.vocabulary, todo.hidden, device=todo.device)
    weight_VD.normal_(0, 2 / todo.hidden**0.5, generator=draws)
    hidden_ND = torch.randn(many, todo.hidden, dtype=LOW, **where)
    labels_N = torch.randint(todo.vocabulary, (many,), **where)
    weight_VD = weight_VD.requires_grad_() if trained else weight_VD.to(LOW)
    return Inputs(hidden_ND, weight_VD, labels_N)


def run(loss: Loss, given: Inputs) -> torch.Tensor:
    """Forward and backward, with new gradients."""
    given.hidden.grad = given.weight.grad = None
    with torch.autocast(given.hidden.device.type, LOW):
        found = loss(given.hidden, given.weight, given.labels)
    found.backward()
    return found.detach()


def timed(loss: Loss, given: Inputs, todo: Task) -> dict[str, float]:
    """Milliseconds and peak memory of forward and backward, above what the inputs take."""
    device = given.hidden.device
    gc.collect()
    forget_peak(device)
    before = peak_memory(device)
    run(loss, given)  # warms up
    wait(device)
    peak, found = peak_memory(device) - before, []
    began = time.perf_counter()
    while len(found) < FEWEST or (len(found) < MOST and time.perf_counter() - began < todo.seconds):
        start = time.perf_counter()
        run(loss, given)
        wait(device)
        found.append(time.perf_counter() - start)
    num_products = 3 if given.weight.requires_grad else 2
    operations = 2 * num_products * given.hidden.numel() * len(given.weight)
    seconds = median(found)
    return {"ms": 1e3 * seconds, "peak_mb": peak / 2**20, "tflops": operations / seconds / 1e12}


def wait(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def exact(given: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, and the gradients of hidden states and of the matrix, in float64, of the very values
    that are multiplied: a matrix rounded to bfloat16."""
    x_ND, w_VD = given.hidden.detach().double(), given.weight.detach().to(LOW).double()
    logps_NV = F.log_softmax(x_ND @ w_VD.t(), -1)
    at = given.labels[:, None]
    loss = -logps_NV.gather(1, at).mean()
    slopes_NV = logps_NV.exp_().scatter_add_(1, at, torch.full_like(x_ND[:, :1], -1.0))
    slopes_NV /= len(x_ND)
    return loss, slopes_NV @ w_VD, slopes_NV.t() @ x_ND


def errors(loss: Loss, given: Inputs, right: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Relative errors of the loss, and of gradients by their norms."""
    found = {"loss_error": float((run(loss, given).double() - right[0]).abs() / right[0])}
    named = (("hidden", given.hidden, right[1]), ("weight", given.weight, right[2]))
    for name, tensor, wanted in named:
        if tensor.grad is not None:
            wrong = torch.linalg.vector_norm(tensor.grad.double() - wanted)
            found[f"{name}_error"] = float(wrong / torch.linalg.vector_norm(wanted))
    return found


def all_errors(todo: Task, sample: Inputs) -> dict[str, Mapping[str, Any]]:
    """The errors of every subject that is here."""
    right = exact(sample)
    return {
        subject: tried(lambda loss=loss: errors(loss, sample, right))["figures"]
        for subject, loss, _ in heads(todo.device)
        if loss is not None
    }


def tried(work: Callable[[], Mapping[str, float]]) -> dict[str, Any]:
    """The figures of one subject, or what went wrong: a subject that fails hides no other."""
    try:
        return {"status": "ok", "figures": work(), "error": ""}
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "figures": {}, "error": str(error)[:300]}
    except Exception as error:  # of kernels of others, and of compilers
        text = f"{type(error).__name__}: {error}"[-1000:]
        return {"status": "failed", "figures": {}, "error": text}


def rows(todo: Task, *, trained: bool) -> Iterator[dict[str, object]]:
    """One row for each number of tokens and subject."""
    given = inputs(todo, trained=trained)
    exactness = all_errors(todo, given.first(todo.sample))
    for count in todo.tokens:
        some = given.first(count)
        for subject, loss, reason in heads(todo.device):
            row = {"case": title(todo, count, trained=trained), "subject": subject}
            if loss is None:
                yield {**row, "status": "unavailable", "figures": {}, "error": reason}
                continue
            given.weight.grad = some.hidden.grad = None
            found = tried(lambda loss=loss, some=some: timed(loss, some, todo))
            found["figures"] = {**found["figures"], **exactness[subject]}
            yield {**row, **found}


def title(todo: Task, count: int, *, trained: bool) -> str:
    """The name of a row."""
    kind = "trained" if trained else "frozen"
    return f"head {todo.vocabulary:,} x {todo.hidden:,}, {kind}, {count:,} tokens"


def main() -> None:
    """Measure, and leave the report."""
    todo = Task(**json.loads(Path(sys.argv[1]).read_text()))
    report, found = Path(todo.report), []
    for trained in (True, False):
        for row in rows(todo, trained=trained):
            found.append(row)
            new = report.with_suffix(".new")
            new.write_text(json.dumps({"rows": found}))
            new.replace(report)


if __name__ == "__main__":
    main()
