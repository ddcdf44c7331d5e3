"""Pages, messages and names use the words of docs/glossary.md: one word, one meaning."""

import ast
import re
from collections import defaultdict

from pages import PAGES, ROOT, name

from each import each
from source_trees import SRC
from source_trees import TREES as FILES

# Folders and files of src whose texts (docstrings, help, logs, errors) are checked; "" is all.
CLEAN: tuple[str, ...] = ("",)
# Findings about names that are not put right yet; empty in the end.
NOT_YET: frozenset[str] = frozenset()

# What must not come back -> what to write. Patterns, whatever the case.
DENIED = {
    r"(go|goes|going|went|gone) on": "resume, continue",
    r"anew": "start from scratch, again",
    r"learnt": "trained (tokens), trainable (parameters)",
    r"(parameters?|weights?|layers?|nothing|what|that) learns?": "trainable",
    r"of them to learn": "trained tokens",
    r"teach|teaches|teaching|taught": "train; name what is computed",
    r"newest sound|sound (one|checkpoint)s?": "latest valid checkpoint",
    r"newest(?!\()": "latest",
    r"process(es)? beside|beside (the )?training": "writer process, encoder worker, uploader",
    r"(is|are|be|been|was|were) (first )?asked": "compute, request",
    r"asked (once|about)": "precompute",
    r"what (the|a) (reference|model|head) (says|said)": "reference log-probabilities",
    r"(laid|lays?|lying) (end|together|beside|over)": "packed, fused",
    r"end to end, no": "without separators",
    r"lies?": "is, is stored, is in",
    r"(is|are|be|been|was|were) (told|said)": "reported, logged, printed",
    r"tells? (where|what|which|how|beforehand|for|both)": "report, print, list",
    r"ours|theirs(?![/.])": "name the owner",
    r"(folders?|checkpoints?|weights|files) of others": "foreign",
    r"whole (or not|tensors?|models?|checkpoints?|files|weights|matrix)": "full, complete, atomic",
    r"at one stroke|wholly": "atomic",
    r"(let|lets) go|gives? way": "freed, deleted",
    r"shares? (them |it )?out|shared out": "divided among ranks",
    r"dealt|deals? (out|with rows)": "assigned by length",
    r"cut (over|anew|for|along|in two|short|off|from)": "sharded, truncated, interrupted",
    r"(is|are) cut": "sharded, truncated",
    r"spread (a|the|over|out)": "sharded",
    r"fellows?": "rank",
    r"lost another one|the others? have lost": "lost the connection to another rank",
    r"left out|leaves? out|leaving out": "dropped, skipped, omitted",
    r"(is|are|be) no numbers?|not a number": "NaN or infinite",
    r"otherwise than|written otherwise": "differently",
    r"rehears\w*": "dry run",
    r"heaviest (pass|step|stage)": "peak micro-batch, largest pipeline stage",
    r"starting over|starts? over": "start from scratch",
    r"without values|without memory": "on the meta device, on fake tensors",
    r"what (stays|learns|goes|passes|becomes)": "subject first",
    r"with a word|without a word|on the user's word": "silently, with consent",
    r"cut into parts|in parts\b": "sharded",
    r"(quant|normal|serial|initial|material|recogn|stabil|util|summar)is(e|ed|es|ing|ation)": (
        "American spelling"
    ),
    r"behaviours?|neighbours?|favour\w*|centred?|labelled|misspelt": "American spelling",
}
DENY = re.compile(
    "|".join(rf"(?P<d{i}>(?<![\w/-])(?:{p})(?![\w/-]))" for i, p in enumerate(DENIED)),
    re.IGNORECASE,
)
CODE = re.compile(r"```python.*?```|``[^`\n]+``|`[^`\n]+`", re.DOTALL)  # names are checked as names

# Names with several meanings, or none that a reader of the field knows (glossary, last section).
CLASSES = {
    "Anatomy",
    "Arena",
    "Asked",
    "Away",
    "Beside",
    "Blocks",
    "Crew",
    "Cut",
    "Figures",
    "Flight",
}
CLASSES |= {
    "Hand",
    "Held",
    "Image",
    "Live",
    "Opened",
    "Part",
    "Parts",
    "Patience",
    "Place",
    "Places",
}
CLASSES |= {
    "Poured",
    "Rule",
    "Run",
    "Runs",
    "Share",
    "Source",
    "Stored",
    "Stretch",
    "Unread",
    "Whole",
}
STEMS = {"anatomy", "answering", "arena", "asked", "asked_head", "beside", "boxed", "crew", "cuts"}
STEMS |= {"deal", "empty", "encoding_beside", "flight", "grown", "hand", "landmarks", "low_rank"}
STEMS |= {"mending", "norms", "opened", "patience", "reasons", "rehearsal", "slopes", "staging"}
STEMS |= {"startup", "theirs", "together", "watchers", "whole", "weights_alone"}
WORDS = {"anew", "asked", "beside", "crew", "dealt", "hear", "laid", "learnt", "ours", "rehearse"}
WORDS |= {"slopes", "theirs", "told"}

# Decisions are records of their day; the reference pages are made from src and checked there.
CHECKED = [p for p in PAGES if not name(p).startswith(("docs/decisions/0", "docs/reference/"))]


def house(path):
    return path.relative_to(SRC).as_posix()


def denied(text):
    """Every denied phrase of a text, with the line it is in and what to write instead."""
    says = list(DENIED.values())
    text = CODE.sub(lambda code: re.sub(r"[^\n]", "_", code[0]), text)
    for found in DENY.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield f"line {line}: {found[0]!r}; write: {says[int(found.lastgroup[1:])]}"


@each(CHECKED, name)
def test_a_page_is_in_the_words_of_the_field(page):
    assert not list(denied(page.read_text("utf-8")))


def texts(tree):
    """Every literal of a module that is a phrase: docstrings, help, logs, errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


@each([p for p in FILES if house(p).startswith(CLEAN)], house)
def test_a_module_speaks_in_the_words_of_the_field(path):
    found = [(line, said) for line, text in texts(FILES[path]) for said in denied(text)]
    assert not found


def public(tree):
    """The classes and functions that a module defines for others."""
    kinds = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    return [node for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"]


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for path, tree in FILES.items():
        for node in public(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(house(path))
    assert not {
        key: value for key, value in places.items() if len(value) > 1 and key not in NOT_YET
    }


def test_no_module_has_the_name_of_a_thing_in_it():
    found = {
        f"{house(path)}: {node.name}"
        for path, tree in FILES.items()
        for node in public(tree)
        if node.name == path.stem and not re.search("^cli/|/commands/", house(path))  # a command's
    }
    assert not found - NOT_YET


def test_names_have_the_meaning_of_the_glossary():
    found = {house(path) for path in FILES if path.stem in STEMS}
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            is_class = isinstance(node, ast.ClassDef) and node.name in CLASSES
            is_function = isinstance(node, ast.FunctionDef) and WORDS & set(node.name.split("_"))
            if is_class or is_function:
                found.add(f"{house(path)}: {node.name}")
    assert not found - NOT_YET


def test_the_glossary_defines_a_term_once():
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \|", text.partition("## Words with one meaning")[0], re.M)
    terms = [t for row in rows if row not in ("term", "---") for t in row.split(", ")]
    assert len(terms) == len(set(terms)) > 100
