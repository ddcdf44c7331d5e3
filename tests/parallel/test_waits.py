"""Every wait for other ranks stands within the mark by which the watchdog tells who waits.

A wait without the mark makes of a rank that waits one that hangs.
"""

import ast
from collections import Counter

import pytest

from source_trees import SRC, TREES
from surefoot.parallel.progress import wait_for_ranks

MARK = wait_for_ranks.__name__
# Of torch.distributed: what asks only, what returns at once, and what is called unwatched.
ASKS = {"is_available", "is_initialized", "get_world_size", "get_backend", "isend", "irecv"}
ASKS |= {"init_process_group", "destroy_process_group"}
# What copies values to the host, or waits for them, in rooms whose code runs in a watched rank.
READS = {"item", "tolist", "cpu", "synchronize"}
ROOMS = ("batch.py", "checkpoint", "generate", "methods", "model", "network", "optim", "parallel")
ROOMS += ("run", "stages", "training")
# There, what is on the host already, or in a program that no watchdog sees, by its module.
ON_THE_HOST = {
    "batch.py": {
        "self.attention_mask",
        "self.labels",
        "batch.labels[:, 1:]",
        "batch.attention_mask",
    },
    "generate/live.py": {"top.indices", "top.values"},  # of a server
    "generate/responses.py": {"self._generator.random(_BLOCK)[::-1]"},
    "model/_quantization.py": {"read(f'{module}.{_SHAPE}')"},
    "model/packed_attention.py": {"cu_seqlens", "branches"},
    "model/token_tiles.py": {"differs"},  # of a trial
    "optim/_rules/few_bits.py": {"means", "-means"},
    "parallel/context_parallel.py": {
        "branches",
        "bounds",
        "np.bincount(self.owner[needs[me]], minlength=size)",
        "np.bincount(owner, minlength=group.size)",
    },
    "parallel/world.py": {"totals", "maxima", "by_axis.flatten(end_dim=-2)", "by_data"},
    "run/counterfactual.py": {"read_step_file(folder, STEPS)"},
    "run/from_python.py": {"value", "tensor.detach()"},
    "run/row_gradients.py": {"rows.items"},
    "run/rows_record.py": {"rows[start:len(rows) - end]"},
    "stages/_kto.py": {"matched", "of_pairs", "context.reduce(POLICY, pairs, log_probabilities)"},
    "training/context.py": {"self.reduce(role, items, _scores)"},
    "training/conversations.py": {"each.logps"},
    "training/kept_rollouts.py": {"computed.logps"},
    "training/precompute.py": {"np.cumsum([0, *map(len, window_set.windows.values())])"},
    "training/step.py": {"self.values", "pending.values", "values"},
    "training/windows.py": {"column['lengths']", "rows.items"},
}
CONVERTED = {
    "parallel/pipeline.py": Counter(["int", "_numbers"]),
    "training/step.py": Counter(["bool", "bool", "float"]),
}


def unmarked(tree, place="parallel/any.py"):
    """The waits of a module that are called without the mark: their nodes."""
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [(name.name, name.asname) for node in imports for name in node.names]
    has_works = ("torch.distributed", "dist") in names
    hosts = ON_THE_HOST.get(place, set())
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from (node for name in node.names if "collective" in f"{node.module}.{name.name}")
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        receiver, name = ast.unparse(node.func.value), node.func.attr
        is_collective = receiver in ("dist", "torch.distributed") and name not in ASKS
        is_work = has_works and name == "wait" and not node.args and receiver != "self"
        is_read = name in READS and place.startswith(ROOMS) and receiver not in hosts
        if is_collective or is_work or is_read:
            yield node


def test_every_wait_for_other_ranks_is_marked():
    found = {
        f"{place}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in TREES.items()
        if (place := file.relative_to(SRC).as_posix())
        for node in unmarked(tree, place)
    }
    assert not found, f"call them by {MARK}, or name here what is on the host:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "lost",
    [
        *("dist.all_reduce(values)", "dist.barrier(group=group)", "dist.new_group([0, 1])"),
        *("work.wait()", "self._sent.popleft()[0].wait()", "loss.item()", "values.sum().tolist()"),
        *("tensor.detach().cpu()", "event.synchronize()", "torch.cuda.synchronize(device)"),
        *("torch.distributed.barrier()", "from torch.distributed import _functional_collectives"),
    ],
)
def test_a_mark_that_is_lost_is_noticed(lost):
    assert list(unmarked(ast.parse(f"import torch.distributed as dist\n{lost}")))


@pytest.mark.parametrize(
    "line",
    [
        *(f"{MARK}(dist.all_reduce, values)", f"{MARK}(work.wait)", f"{MARK}(loss.item)"),
        *("dist.isend(values, 1)", "dist.get_world_size()", "self.wait()", "event.wait(0.1)"),
    ],
)
def test_what_is_marked_or_does_not_wait_is_none(line):
    assert not list(unmarked(ast.parse(f"import torch.distributed as dist\n{line}")))


def test_what_is_listed_as_of_the_host_is_there():
    for place, receivers in ON_THE_HOST.items():
        calls = [node for node in ast.walk(TREES[SRC / place]) if isinstance(node, ast.Call)]
        found = {ast.unparse(c.func.value) for c in calls if isinstance(c.func, ast.Attribute)}
        assert not receivers - found, place


def test_waits_that_no_name_shows_are_marked_where_they_were():
    """A number that is made of a tensor waits for the device, too."""
    for place, expected in CONVERTED.items():
        calls = [node for node in ast.walk(TREES[SRC / place]) if isinstance(node, ast.Call)]
        marked = [ast.unparse(c.args[0]) for c in calls if ast.unparse(c.func) == MARK]
        assert not expected - Counter(marked), place
