"""The shape of the house: rows, no cycles, no hidden imports, and nothing too long."""

import ast
import functools
import re

import pytest

from each import each
from house import PICTURE, ROOT, ROWS, drawn
from source_trees import TREES as FILES

# Heavy third parties that may be imported inside the one function that needs them; in the command
# line and in the commands of plugins, everything may, so that `--help` stays instant.
LAZY = {"peft", "datasets", "matplotlib", "tensorboard", "pandas", "psutil", "PIL"}
LAZY |= {"torch.utils.tensorboard", "fsspec", "botocore", "pyarrow", "torchao"}
LAZY |= {"wandb", "mlflow", "mlflow.entities", "swanlab", "trackio"}
LAZY |= {"jieba", "nltk.translate.bleu_score", "rouge_chinese", "sacrebleu.metrics.bleu"}
LAZY |= {"modelscope_hub", "mindspore", "llguidance", "llguidance.hf", "gguf", "importlib.metadata"}
# What a recipe names is read without these; they come with the first call.
LATER, LATER_FILES = (
    {"torch", "numpy", "transformers"},
    {"batch", "data/text/collation", "plugins/mindspore/slicing"},
)
LATER_FILES |= {"stages/_dpo", "training/losses"}
LATER_FILES |= {"plugins/migrate/rules", "plugins/board/metrics"}
LATER_FILES |= {"training/policy_gradient", "stages/_kto"}
LATER_FILES |= {"stages/_classify", "training/class_metrics"}
LATER_FILES |= {"checkpoint/float32_weights"}  # a conversion that casts nothing needs no models
LATER_FILES |= {"parallel/launcher"}  # its ranks import, and it counts GPUs at most
LAZY_FILES = {"cli", "__init__", "__main__"}
MAX_FUNCTION, MAX_PARAMETERS = 80, 8
PICKLES = {"plugins/trainers/pickles.py"}  # of the Hugging Face Trainer and of DCP, and no others
TORCH_FREE = (
    "errors",
    "log",
    "schema/__init__",
    "storage/files",
    "parallel/sharding",
    "checkpoint/disk/tensorfile",
    "checkpoint/disk/manifest",
)

# All files are read through the one door of `storage.files`, but for these.
BESIDE_THE_DOOR = {
    "storage/files": "the door",
    "storage/folder_lock": "a folder, and /proc",
    "storage/memory": "/dev/shm and /proc",
    "storage/remote": "a lock, which is not read",
    "checkpoint/layouts/detection": "a layout",
    "checkpoint/layouts/layout": "a layout",
    "cli/env": "/proc",
    "data/media/files": "bytes that were read",
    "data/text/families/__init__": "files of the package",
    "data/text/templates/__init__": "files of the package",
    "generate/servers": "an address",
    "json_lines": "/dev/null",
    "model/products": "/proc",
    "model/weights": "a temporary folder that it has just written",
    "parallel/_watchdog": "/proc, and a process that imports nothing",
    "parallel/fork_server": "/proc",
    "run/_encoder_worker": "a temporary folder of its own",
    "run/_encoding_share": "standard output",
    "run/_launch": "/proc",
    "run/card": "a file of the package",
    "run/surroundings": "files of the package",
    "storage/cgroups": "/proc and /sys",
    "training/_reward_worker": "standard input and output",
    "training/callbacks/_tracker_process": "trackers, and standard output",
    "training/callbacks/launches": "/proc",
    "training/control": "/dev/null",
    "use/bench": "/proc",
}
OPENING = {"open", "read_text", "read_bytes", "fdopen", "write_text", "write_bytes"}

KNOW_THE_RECIPE = {"recipe", "run", "use", "cli"}
KNOW_THE_RECIPE |= {"plugins"}

LEVEL = {"__init__": -2, "__main__": -1} | {n: i for i, row in enumerate(ROWS) for n in row}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def part(file):
    return file.relative_to(ROOT).with_suffix("").parts[0]


def imported(file, node):
    """The files of this package that a relative import names."""
    if not isinstance(node, ast.ImportFrom) or not node.level:
        return []
    folder = file.parent
    for _ in range(node.level - 1):
        folder = folder.parent
    base = folder.joinpath(*node.module.split(".")) if node.module else folder
    targets = [base / a.name for a in node.names] + [base]
    found = [p for t in targets for p in (t.with_suffix(".py"), t / "__init__.py") if p in FILES]
    return [p for p in found if p != file and p != ROOT / "__init__.py"]


@functools.cache
def all_imported(file):
    """The files of this package that ``file`` imports."""
    return {target for node in ast.walk(FILES[file]) for target in imported(file, node)}


@each(FILES, lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down(file):
    for target in all_imported(file):
        here, there = part(file), part(target)
        assert here == there or LEVEL[here] < LEVEL[there], (
            f"must not import {target.name} ({there})"
        )


def room(file):
    """The room of a module: a plugin is one, and so is every other folder of the package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[:2] if parts[0] == "plugins" else parts[:1]


@each(FILES, lambda file: str(file.relative_to(ROOT)))
def test_what_begins_with_an_underscore_is_private_to_its_room(file):
    for target in all_imported(file):
        parts = target.relative_to(ROOT).with_suffix("").parts
        is_private = any(re.match("_[a-z]", name) for name in parts)
        assert not is_private or room(file) == room(target), f"{target} is private"


def test_every_part_has_its_row():
    assert {part(f) for f in FILES} <= LEVEL.keys()


def test_no_cycles():
    graph = {file: all_imported(file) for file in FILES}
    while leaves := [f for f, deps in graph.items() if not deps & graph.keys()]:
        for leaf in leaves:
            del graph[leaf]
    assert not graph, f"import cycle among {sorted(f.name for f in graph)}"


@each(FILES, lambda file: str(file.relative_to(ROOT)))
def test_no_hidden_imports(file):
    if part(file) in LAZY_FILES or file.stem == "command" or file.parent.name == "commands":
        return
    is_later = str(file.relative_to(ROOT).with_suffix("")) in LATER_FILES
    lazy = LAZY | LATER if is_later else LAZY
    for function in ast.walk(FILES[file]):
        if isinstance(function, FUNCTIONS):
            for node in ast.walk(function):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
                hidden = [n for n in names if n not in lazy and n.split(".")[0] not in lazy]
                assert not hidden, f"line {node.lineno} imports {hidden} inside {function.name}"


def test_no_process_that_we_start_takes_modules_from_the_current_folder():
    for file, tree in FILES.items():
        for node in ast.walk(tree):
            words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
            if words and ast.unparse(words[0]) == "sys.executable":
                assert ast.unparse(words[1]) == "'-P'", f"{file}:{node.lineno}"


@each(FILES, lambda file: str(file.relative_to(ROOT)))
def test_no_function_is_too_long(file):
    for node in ast.walk(FILES[file]):
        if isinstance(node, FUNCTIONS):
            assert node.end_lineno - node.lineno < MAX_FUNCTION, f"{node.name} is too long"
            assert len(node.args.args) + len(node.args.kwonlyargs) <= MAX_PARAMETERS, node.name


@each(FILES, lambda file: str(file.relative_to(ROOT)))
def test_every_module_says_what_it_is(file):
    assert ast.get_docstring(FILES[file])


@pytest.mark.parametrize("name", TORCH_FREE)
def test_the_heart_needs_no_torch(name):
    file = ROOT / f"{name}.py"
    seen, queue = set(), [file]
    while queue:
        current = queue.pop()
        seen.add(current)
        for node in ast.walk(FILES[current]):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            assert not any(n.split(".")[0] in ("torch", "transformers") for n in names), current
        queue += all_imported(current) - seen


def test_nothing_is_unpickled_and_nothing_is_left_for_later():
    for file in FILES:
        text = file.read_text()
        if str(file.relative_to(ROOT)) in PICKLES:
            own = text.count("pickle_module=reader")
            assert text.count("torch.load(") == text.count("weights_only=True") + own == 3
            assert "def find_class(" in text  # its own unpickler builds nothing
            for word in ("torch.load(", "torch.save(", "import pickle"):
                text = text.replace(word, "")
            assert "pickle.load" not in text
        for word in ("torch.load(", "torch.save(", "import pickle", "TODO", "FIXME"):
            assert word not in text, f"{file.name}: {word}"
        assert part(file) == "cli" or not re.search(r"(?<![\w.])print\(", text), file.name


def opened_in(tree):
    """The calls in a module that open a file by themselves."""
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name == "open" or ("." in name and name.rpartition(".")[2] in OPENING):
            yield name


def test_every_file_is_opened_through_one_door():
    """``storage.files`` reads regular files only, and knows a limit: a pipe of the name would hang
    ``read_bytes``, and a device would fill the memory."""
    modules = {str(file.relative_to(ROOT).with_suffix("")): tree for file, tree in FILES.items()}
    assert {name for name, tree in modules.items() if [*opened_in(tree)]} == set(BESIDE_THE_DOOR)
    assert len(modules) > 400
    assert [*opened_in(ast.parse("text = (folder / name).read_text()"))]
    assert [*opened_in(ast.parse("with open(path) as file: pass"))]
    assert not [*opened_in(ast.parse("text = read_text(path)"))]


def test_only_these_rooms_know_the_recipe():
    for file, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any(a.name == "Recipe" for a in node.names):
                assert part(file) in KNOW_THE_RECIPE, file


def by_position(tree):
    """The places in a mesh that a module finds by arithmetic with a rank, or with a size."""
    of_order = ast.FloorDiv | ast.Mod
    found = [n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, of_order)]
    return [n for n in found if re.search(r"\bworld\.(rank|size|tp|pp)\b", ast.unparse(n))]


def test_nobody_finds_its_place_in_the_mesh_but_by_the_name_of_an_axis():
    for file, tree in FILES.items():
        assert not by_position(tree), f"{file}: {[ast.unparse(n) for n in by_position(tree)]}"
    assert by_position(ast.parse("world.rank == index * (self.world.size // count)"))
    assert by_position(ast.parse("world.rank % world.tp"))
    assert not by_position(ast.parse("world.rank_along('tp') * 2"))


def test_the_core_names_no_other_trainer():
    """Of another program's words, comments and docstrings alone speak, and rows of TRL's form."""
    for file, tree in FILES.items():
        room = file.relative_to(ROOT).parent.as_posix()
        if room.startswith("plugins"):
            continue
        words = r"llama.?factory|axolotl" + ("" if room.startswith("data/rows") else r"|\btrl\b")
        nodes = list(ast.walk(tree))
        docs = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}  # texts that nothing uses
        for node in nodes:
            for text in (getattr(node, name, None) for name in ("id", "attr", "name", "value")):
                is_named = isinstance(text, str) and re.search(words, text, re.IGNORECASE)
                assert not is_named or id(node) in docs, f"{file}:{node.lineno}: {text}"


def test_every_member_of_a_protocol_is_used():
    text = "\n".join(file.read_text() for file in FILES)
    for file, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases):
                for member in node.body:
                    name = _name(member)
                    if name and not name.startswith("__"):
                        assert re.search(rf"\.{name}\b", text), f"{file.name}: {node.name}.{name}"


def _name(member):
    if isinstance(member, FUNCTIONS):
        return member.name
    return member.target.id if isinstance(member, ast.AnnAssign) else None


def test_the_picture_of_the_house_is_of_today():
    assert PICTURE.read_text() == drawn(), "run: make docs"
