"""A Chinese page has the headings, rows, code, figures and links of its English page, in order."""

import re
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher

import pytest
from pages import FENCE, LINK, PAGES, README, anchors, name

from each import each

CHINESE = [page for page in PAGES if page.name.endswith(".zh.md")]
START = re.compile(r" *([#|]|- |```)")  # of a part that may follow another without an empty line
PIPE = re.compile(r"(?<!\\)\|")
CODE = re.compile(r"`[^`]+`")
FIGURE = re.compile(r"\d+(?:[.,]\d+)*")
HAN = re.compile(r"[\u4e00-\u9fff]")


@dataclass(frozen=True)
class Part:
    """A heading, table row, list item, paragraph or fenced block."""

    where: str
    kind: str
    prose: str
    tokens: tuple[str, ...]  # what a translation does not change

    def without(self, others):
        """Where it is, and what of it none of the others has."""
        shared = Counter(token for other in others for token in other.tokens)
        missing = list((Counter(self.tokens) - shared).elements())
        return f"{self.where}: {self.kind}: {', '.join(missing) or self.prose}"


def english(page):
    return page.with_name(page.name.replace(".zh.md", ".md"))


def target(page, link):
    """The English page that a link leads to, and the number of the heading."""
    path, _, anchor = link.partition("#")
    if "://" in path:
        return link
    file = (page.parent / path).resolve() if path else page
    heading = f" heading {anchors(file).index(anchor)}" if anchor else ""
    missed = page in CHINESE and file.with_suffix(".zh.md") in CHINESE and file != english(page)
    return name(english(file)) + heading + (" (there is a Chinese page)" if missed else "")


def part(page, line, text):
    """One piece of a page; the lines of a fenced block are separated by zeros."""
    where = f"{name(page)}:{line}"
    if text.startswith("```"):
        return Part(where, "fenced block", "", tuple(text.split("\0")))
    kind = "list item" if text.startswith("- ") else "paragraph"
    if text.startswith("|"):
        kind = f"table row of {len(PIPE.findall(text)) - 1} cells"
    if text.startswith("#"):
        kind = f"heading of level {text.index(' ')}"
    prose = CODE.sub("", LINK.sub("]", text))
    links = [f"link to {target(page, link)}" for link in LINK.findall(text)]
    tokens = CODE.findall(text) + FIGURE.findall(prose) + links
    return Part(where, kind, prose, tuple(sorted(tokens)))


def parts(page, text):
    """The pieces of a page that are translated one by one."""
    found, line, is_open = [], 1, False
    flat = FENCE.sub(lambda fence: fence[0].replace("\n", "\0"), text)
    for row in flat.split("\n"):
        if row.strip() and is_open and not START.match(row):
            found[-1][1] += f" {row.strip()}"
        elif row.strip():
            found.append([line, row.strip()])
        is_open = bool(row.strip()) and "\0" not in row
        line += 1 + row.count("\0")
    return [part(page, *piece) for piece in found]


def differences(page, text):
    """The parts of a Chinese text and of its English page that do not correspond, one a line."""
    chinese, source = parts(page, text), parts(english(page), english(page).read_text("utf-8"))
    keys = [[(piece.kind, piece.tokens) for piece in page] for page in (source, chinese)]
    for tag, a, b, c, d in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if tag != "equal":
            yield from ("- " + piece.without(chinese[c:d]) for piece in source[a:b])
            yield from ("+ " + piece.without(source[a:b]) for piece in chinese[c:d])


@each(CHINESE, name)
def test_a_chinese_page_corresponds_to_its_english_page(page):
    found = list(differences(page, page.read_text("utf-8")))
    assert not found, "\n".join(["change both pages:", *found])


@each(CHINESE, name)
def test_a_chinese_page_is_in_chinese(page):
    pieces = parts(page, page.read_text("utf-8"))
    left = [p for p in pieces if len(re.findall(r"\b[a-z]{2,}\b", p.prose)) > 3]
    assert not [f"{p.where}: {p.prose}" for p in left if not HAN.search(p.prose)]


PLANTED = [  # a change of the Chinese README, and what the failure says of the English one
    ("surefoot chat runs/first ", "surefoot chat runs/other ", "fenced block: surefoot chat runs/"),
    ("`ckpt verify`", "`ckpt check`", "table row of 3 cells: `ckpt verify`"),
    ("2,000", "1,000", "table row of 3 cells: 2,000"),
    (" | `make demo` |", " |", "table row of 3 cells: `make demo`"),
    ("mindspore.zh.md", "mindspore.md", "table row of 2 cells: link to docs/how-to/mindspore.md"),
    ("\n## 安装\n", "\n### 安装\n", "heading of level 2: ## Install"),
    ("\n还没有的：视频和音频、上下文并行、GPU 上的实测数据。\n", "", "paragraph: Not there yet"),
]


@pytest.mark.parametrize(("old", "new", "lost"), PLANTED, ids=[row[2] for row in PLANTED])
def test_a_change_of_one_page_alone_is_found_and_named(old, new, lost):
    page = README.with_suffix(".zh.md")
    text = page.read_text("utf-8")
    assert text.count(old) == 1
    first, *others = differences(page, text.replace(old, new))
    assert first.startswith("- README.md:")
    assert lost in first
    assert [line[:14] for line in others] == ["+ README.zh.md"] * bool(new)
