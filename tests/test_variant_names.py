"""No line asks which variant it has: not by a class, and not by a name, alone or in a key's path.

What differs between variants is a method, a field, or a mark of a setting, which each of them has.
"""

import ast
import re

import pytest

from source_trees import SRC, TREES

# The rooms of variants, and the modules that list them.
VARIANTS = {
    **{room: f"{room}/__init__.py" for room in ("stages", "methods", "optim")},
    "data/rows/formats": "data/rows/formats/__init__.py",
    "generate": "generate/servers.py",
    "training": "training/rewards.py",
}
SECTIONS = "stage|method|optim|sampler|reward"  # of a recipe, that hold one
# Translation: the words of other programs, which have names for these things, too.
FOREIGN = ("plugins/migrate", "plugins/trainers", "plugins/mindspore")
FOREIGN_TABLES = {("cli/main.py", "SYNONYMS"), ("storage/weight_files.py", "KINDS")}
# More than a variant's name: a layout of weights, a service, a field of answers, a metric, a part
# of tokenizers, and words of JSON.
COMMON = {"full", "openai", "token_ids", "exact_match", "Regex", "function", "length", "regex"}
REGISTRIES = {"STAGES", "METHODS", "OPTIMIZERS", "FORMATS"}  # to choose one is not to ask
LOOKS = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "fullmatch",
    "match",
}
LOOKS |= {"search", "index", "count", "get", "pop", "setdefault", "fromkeys"}


def variants():
    """The folder, name and class of every variant that is registered."""
    for folder, module in VARIANTS.items():
        tables = [node for node in TREES[SRC / module].body if isinstance(node, ast.AnnAssign)]
        for table in (n for node in tables for n in ast.walk(node) if isinstance(n, ast.Dict)):
            for key, value in zip(table.keys, table.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Name):
                    yield folder, key.value, value.id


def questions(tree, known, named=frozenset()):
    """The nodes of ``tree`` that ask for one of ``known``. ``named``: the constants, of any module,
    that contain the name of one."""
    kinds = {kind for _, _, kind in known}
    names = {name for _, name, _ in known} | kinds
    path = re.compile(rf"(?:.*\.)?(?:{SECTIONS})\.(?:{'|'.join(names)})(?:\.|$)")

    def is_name(node):
        if isinstance(node, ast.Name):
            return node.id in named
        text = node.value if isinstance(node, ast.Constant) else None
        return isinstance(text, str) and bool(text in names - COMMON or path.match(text))

    for node in ast.walk(tree):
        classes = {n.id for part in _classes(node) for n in ast.walk(part) if _is_name(n)}
        if kinds & classes or any(is_name(n) for part in _asked(node) for n in ast.walk(part)):
            yield node


def _is_name(node):
    return isinstance(node, ast.Name)


def _classes(node):
    """The parts of a node that name classes to ask for."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
            return [kinds]
        case ast.Compare():
            return node.comparators
        case ast.MatchClass():
            return [node.cls]
    return []


def _asked(node):
    """The parts of a node in which a text decides: what is compared, looked up, or in a list."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.MatchValue():
            return [node.value]
        case ast.Dict():
            return [key for key in node.keys if key is not None]
        case ast.Tuple() | ast.List() | ast.Set():
            return [part for part in node.elts if isinstance(part, ast.Constant | ast.Name)]
        case ast.Subscript(value=ast.Name(id=name)) if name in REGISTRIES:
            return []
        case ast.Subscript(ctx=ast.Load()):
            return [node.slice]
        case ast.Call(func=ast.Attribute(attr=name)) if name in LOOKS:
            return node.args
    return []


def constants(known):
    """The names of the modules' constants that are the name of a variant, or a path with one."""
    return {
        (file, target.id)
        for file, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if next(questions(ast.Tuple([node.value]), known), None) and isinstance(target, ast.Name)
    }


def test_nobody_asks_which_variant_it_is():
    known = list(variants())
    assert {folder for folder, *_ in known} == VARIANTS.keys() and len(known) > 30
    by_file = constants(known)
    of_any = {name for _, name in by_file}
    for file, tree in TREES.items():
        place = file.relative_to(SRC).as_posix()
        if place.startswith(FOREIGN):
            continue
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        named = {alias.name for node in imports for alias in node.names} & of_any
        named |= {name for home, name in by_file if home == file}
        others = [each for each in known if not place.startswith(f"{each[0]}/")]
        body = [node for node in tree.body if (place, _target(node)) not in FOREIGN_TABLES]
        for node in questions(ast.Module(body, []), others, named):
            pytest.fail(f"{place}:{node.lineno}: {ast.unparse(node)}")


def _target(node):
    return ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else None


def test_every_variant_is_a_frozen_dataclass_of_its_room():
    """As docs/architecture.md says."""
    for folder, _, kind in variants():
        trees = [tree for file, tree in TREES.items() if (SRC / folder) in file.parents]
        nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
        (node,) = [node for node in nodes if node.name == kind]
        assert "frozen=True" in ast.unparse(node.decorator_list[0]), kind


def test_the_tables_of_other_programs_are_still_there():
    for place, name in FOREIGN_TABLES:
        assert name in {_target(node) for node in TREES[SRC / place].body}


@pytest.mark.parametrize(
    "line",
    [
        *("isinstance(stage, GRPO)", "type(stage) is GRPO", "kind(stage).__name__ == 'GRPO'"),
        *("name == 'grpo'", "'lora' != name", "name in ('dpo', 'kto')", "name in {'sft': 1}"),
        *("FREE = ('stage.grpo.sampler', 'stage.ppo.sampler')", "['optim.adamw.learning_rate']"),
        *("{'grpo': 1, 'other': 2}[name]", "{'method.lora.rank': 8}", "settings['lora']"),
        *(
            "settings.get('lora')",
            "path.startswith('method.lora.')",
            "path.removeprefix('optim.lion')",
        ),
        *("path.startswith(f'stage.grpo.{name}')", "re.match('method.full.x', path)"),
        *("path == KEY", "path in (KEY, 'train.seed')", "name == 'vllm'", "{'sampler.sglang': 1}"),
        "match name:\n    case 'badam' | 'lisa': pass",
        "match stage:\n    case DPO(): pass",
    ],
)
def test_a_question_is_found_in_every_form(line):
    known = list(variants())
    assert list(questions(ast.parse(line), known, {"KEY"}))


@pytest.mark.parametrize(
    "line",
    [
        *("METHODS['full']()", "layout == 'full'", "name == 'granite'", "path == 'model.path'"),
        *("message('set method.lora.rank')", "raise_(f'{name}: see stage.grpo')", "KEY + name"),
        *("path.startswith('stage.')", "return_tensors(framework='pt')", "path.endswith('.pt')"),
        "facts['LoRA'] = 'fused'",
    ],
)
def test_what_only_speaks_of_a_variant_is_none(line):
    assert not list(questions(ast.parse(line), list(variants()), {"KEY"}))
