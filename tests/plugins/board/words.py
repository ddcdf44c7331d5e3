"""The English words of the board: the keys of its Chinese ones."""

import re
from pathlib import Path

import surefoot

CHINESE = Path(surefoot.__file__).parent / "plugins/board/static/zh.js"


def words():
    """The texts that the board has today, but for those with a place for a value."""
    texts = re.findall(r'"((?:[^"\\]|\\.)+)":', CHINESE.read_text(encoding="utf-8"))
    return {
        text for text in texts if "{" not in text and not text.startswith(("state:", "finish:"))
    }
