"""The documentation as data: pages, fenced blocks, and the commands in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, DEMO, TUTORIAL = ROOT / "README.md", ROOT / "docs/demo.md", ROOT / "docs/tutorial.md"
STEP_45 = ROOT / "docs/step-45.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "examples" / "README.md"])
SHELLS = ("console", "sh", "bash", "shell")
FENCE = re.compile(r"^( *)(```+)(\S*)([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
OPERATORS = set("();<>|&")
SUREFOOT = ("surefoot", ".venv/bin/surefoot")
WRAPPERS = ("timeout", "nice", "time")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the words after its language."""

    page: Path
    line: int
    language: str
    info: str
    text: str

    def __str__(self):
        return f"{name(self.page)}:{self.line}"

    @property
    def title(self):
        """The file that the block is said to be."""
        found = re.search(r'title="(.+?)"', self.info)
        return found and found[1]


def name(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, *languages):
    text = page.read_text(encoding="utf-8")
    found = [
        Block(page, text[: m.start()].count("\n") + 1, m[3], m[4].strip(), m[5])
        for m in FENCE.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def prose(page):
    """A page without its fenced blocks and code."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page):
    """The headings of a page, as GitHub and MkDocs name them in links, in their order."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return [re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads]


def steps(block):
    """What a reader types, line by line, each with what is said to come out of it."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
        return list(zip(parts[1::2], parts[2::2], strict=True))
    typed = [line.strip() for line in text.splitlines()]
    return [(line, "") for line in typed if line and not line.startswith("#")]


def surefoot_commands(line):
    """The arguments of every call of ``surefoot`` in a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands = [[]]
    for word in lexer:
        if set(word) <= OPERATORS:
            commands.append([])
        elif commands[-1] or "=" not in word:  # before a command: a variable for it
            commands[-1].append(word)
    for words in commands:
        if words and words[0] in WRAPPERS:
            words = words[next(i for i, word in enumerate(words) if word in SUREFOOT) :]
        if words and words[0] in SUREFOOT:
            yield words[1:]
