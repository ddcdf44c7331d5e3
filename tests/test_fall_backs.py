"""A slower, larger or weaker way is never taken in silence: all of the source is walked."""

import ast
import logging
import re
import warnings
from pathlib import Path

import pytest

import surefoot
from surefoot.log import configure, fell_back

ROOT = Path(surefoot.__file__).parent
# What code raises that computes; what a file, a name or a number is asked for raises others.
COMPUTING = {
    *("Exception", "BaseException", "RuntimeError", "NotImplementedError", "TypeError"),
    *("AttributeError", "IndexError", "ImportError", "MemoryError", "ModelError"),
    *("NOT_ON_META", "_NEEDS_VALUES", "WRONG", "TemplateError"),
}
LOGS = {"debug", "info", "warning"}
SMELL = re.compile(
    r"slower|more slowly|instead|fall(s|ing)? back|fallback|not available|unavailable|rejected|"
    r"takes? (more|longer)|one by one|no effect|not supported|unsupported|more memory|emulate"
)
"""What a line says that is one of ``fell_back``."""
ANSWERS = {  # what is caught there is an answer, or said by others; no slower way is taken
    "checkpoint/saving/_writer_process.py: pin": "takes CUDA's error away, which is said",
    "cli/chat.py: _talk_on_terminal": "the words of a message",
    "cli/env.py: _said": "output of a program that is no JSON",
    "cli/loading.py: _prepare": "an import that fails, which each rank repeats and says",
    "data/media/processor.py: placeholder": "a template without pictures",
    "data/rows/_readers.py: rows_of": "the row that fails is a broken row",
    "model/routers.py: check_router_loss": "routers of another kind, which are refused",
    "data/store/_shards.py: counts": "a cache that is not there yet",
    "data/store/_shares.py: batches": "said by _give_up",
    "data/text/templates/_response_spans.py: _probe_marks": "marks or prefixes: both exact",
    "data/text/templates/render.py: _rendered": "a probe of what a template can",
    "data/text/templates/render.py: _writes_pictures": "likewise",
    "data/text/templates/render.py: _leaves_out": "likewise",
    "data/text/templates/render.py: closing_token": "likewise; said if there is none",
    "data/text/templates/render.py: writes_it": "likewise",
    "data/text/templates/render.py: _compiled": "invalid Jinja, which the next call says",
    "data/text/tool_calls.py: parse_tool_calls": "counted as broken",
    "model/base_identity.py: _indexed": "no index: files by their names",
    "run/code_files.py: _modules": "said where the file is run",
    "run/code_files.py: code_of": "a callback that was typed at a prompt has no file",
    "run/foreign_resume.py: trained_with": "an adapter of another kind, whose weights are refused",
    "network/shard_loading.py: _vocabulary_matrices": "a stage of a pipeline without them",
    "training/out_of_memory.py: _read": "sizes that are found again",
    "model/base_identity.py: parsed": "no record of an old checkpoint",
    "model/config.py: size_of": "a configuration without the size",
    "model/numerics.py: keep_freed_memory": "another C library, which keeps it or not",
    "model/numerics.py: return_freed_memory": "likewise",
    "model/packed_attention.py: _passes_bounds": "an attempt with values decides, and says it",
    "model/weight_matrices.py: _source": "a class without source reads no weight",
    "model/weight_matrices.py: _without_gradient": "found by the first step instead",
    "network/_parameter_names.py: _layers": "methods that need layers refuse",
    "parallel/_watchdog.py: receive": "a stranger's words",
    "storage/child.py: die_with_launcher": "only Linux can",
    "plugins/cloud/hubs.py: _downloads": "no notes of earlier downloads",
    "plugins/cloud/pushing.py: _parsed": "an answer of another form",
    "plugins/cloud/store.py: create": "said by _say_not_atomic",
    "plugins/gguf/vocabulary.py: template_begins": "a template that fails begins with nothing",
    "plugins/quantize/schemes.py: _experts": "refused below",
    "plugins/serve/engine.py: _let_go": "logged with its traceback",
    "plugins/trainers/callback.py: _is_read": "a checkpoint of somebody else",
    "recipe/run_recipe.py: best_of": "no best one is known",
    "run/from_python.py: _hash": "a function without source, by its name",
    "schema/locations.py: matches": "no pattern",
    "training/_reward_worker.py: _number": "NaN, refused below",
    "training/arguments.py: __setattr__": "no plain value",
    "training/callbacks/_tracker_process.py: read": "a file of before that cannot be read",
    "training/callbacks/launches.py: process_began": "another system",
    "use/exporting/conversion.py: unloaded_weights": "said, if config.json names such layers",
    "use/exporting/opened_alone.py: _compare_prompts": "a sentence of what differs",
    "use/exporting/opened_alone.py: _media": "a model that reads text alone",
    "use/exporting/opened_alone.py: read_alone": "a sentence of what differs",
    "use/model_loading.py: _named_base": "the next place, else an error",
    "use/estimate/failures.py: _measured": "a run without records, which the plan says",
}


def handlers(tree):
    """Each handler that goes on, and each ``suppress``, with the types that it catches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
            yield node, names_in(node.type) if node.type else {"BaseException"}
        elif isinstance(node, ast.Call) and called(node) == "suppress":
            yield node, {name for arg in node.args for name in names_in(arg)}


def names_in(node):
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    return {ast.unparse(each).rpartition(".")[2] for each in nodes}


def called(node):
    return ast.unparse(node.func).rpartition(".")[2]


def calls(node, names):
    return [n for n in ast.walk(node) if isinstance(n, ast.Call) and called(n) in names]


def hands_on(handler):
    """Whether the error goes on, to whoever says what it meant: not into a line of the log."""
    lines = {id(n) for call in calls(handler, LOGS) for n in ast.walk(call)}
    uses = (n for n in ast.walk(handler) if isinstance(n, ast.Name) and n.id == handler.name)
    return any(id(n) not in lines for n in uses)


def silent(source):
    """The functions in which something is caught, and neither said nor handed on."""
    tree = ast.parse(source)
    scopes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for handler, types in handlers(tree):
        is_said = calls(handler, {"fell_back"})
        if isinstance(handler, ast.ExceptHandler):
            is_said = is_said or hands_on(handler)
        if types & COMPUTING and not is_said:
            inside = [s for s in scopes if any(n is handler for n in ast.walk(s))]
            yield inside[-1].name if inside else "module"


def smells(source):
    """The lines of the log that say what ``fell_back`` is for."""
    for call in calls(ast.parse(source), LOGS):
        texts = (n.value for n in ast.walk(call) if isinstance(n, ast.Constant))
        text = "".join(t for t in texts if isinstance(t, str))
        if ast.unparse(call.func).startswith("logger.") and SMELL.search(text):
            yield text


def without_reason(source):
    """Where the text of an error is all of a reason: ``unsupported scalarType`` is none."""
    for node in ast.walk(ast.parse(source)):
        value = getattr(node, "value", None)
        parts = node.args if isinstance(node, ast.Call) and called(node) == "fell_back" else [value]
        is_reason = isinstance(node, ast.Return | ast.Assign | ast.Call)
        for part in parts if is_reason else ():
            if isinstance(part, ast.Call) and called(part) == "first_line":
                yield ast.unparse(node)


def walked(look):
    files = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    return {
        f"{path.relative_to(ROOT).as_posix()}: {found}"
        for path, source in files.items()
        for found in look(source)
    }


def test_whatever_is_caught_is_said_or_handed_on():
    assert walked(silent) == set(ANSWERS)


def test_what_costs_more_is_said_in_one_way():
    assert walked(smells) == set()


def test_the_text_of_an_error_is_not_all_of_a_reason():
    assert walked(without_reason) == {"plugins/cloud/hubs.py: message = first_line(error)"}


TRIED = "def way():\n    try:\n        fast()\n    except RuntimeError as error:\n        "


@pytest.mark.parametrize(
    ("look", "source"),
    [
        (silent, TRIED + "slow()"),
        (silent, TRIED + "logger.debug('%s', error)"),
        (silent, TRIED.replace("RuntimeError", "(OSError, torch.cuda.NotImplementedError)")),
        (silent, TRIED.replace("except RuntimeError as error", "except") + "slow()"),
        (silent, "def way():\n    with suppress(ImportError):\n        import fast"),
        (smells, "logger.info('%s is not available; using %s', a, b)"),
        (smells, "logger.warning(f'{a} is used instead')"),
        (without_reason, "fell_back('slow', first_line(error), 'takes longer')"),
        (without_reason, TRIED + "return first_line(error)"),
    ],
)
def test_a_new_way_in_silence_is_found(look, source):
    source = source if source.rstrip() == source else source + "slow()"
    assert len(list(look(source))) == 1


@pytest.mark.parametrize(
    ("look", "source"),
    [
        (silent, TRIED + "fell_back('slow', f'fast fails ({error})', 'takes longer')"),
        (silent, TRIED + "return f'it fails ({error})'"),
        (silent, TRIED + "raise"),
        (silent, TRIED.replace("RuntimeError", "FileNotFoundError") + "pass"),
        (smells, "logger.info('saved %s', path)"),
        (without_reason, TRIED + "return f'its code fails ({first_line(error)})'"),
    ],
)
def test_what_is_said_is_not_found(look, source):
    assert list(look(source)) == []


def test_a_line_has_what_is_done_its_cost_and_its_reason(caplog):
    fell_back("rows are padded", "its layers see each other", "takes longer")
    assert caplog.messages == ["rows are padded, which takes longer: its layers see each other"]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fell_back("a", "b", "c", logging.INFO)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_an_operation_that_is_not_deterministic_is_said_where_other_warnings_are_not():
    with warnings.catch_warnings(record=True) as said:
        configure()
        for name in ("index_add_cuda_", "index_add_cuda_", "cumsum_cuda_kernel"):
            warnings.warn(f"{name} does not have a deterministic implementation", stacklevel=1)
        warnings.warn("the weather will change", stacklevel=1)
    assert [str(each.message).split()[0] for each in said] == [
        "index_add_cuda_",
        "cumsum_cuda_kernel",
    ]
