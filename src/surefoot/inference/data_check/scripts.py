"""The script of a text, from the code points of its letters, and a guess at its language.

The script is counted. The language is guessed, for Latin letters only, from a few frequent words;
it is right for ordinary sentences, and unknown for short answers, code and names.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

SAMPLE = 600  # characters that are looked at
KANA = 0.05  # of the letters, that make Han characters Japanese
# The first code point of each script; "" is no letter, or one of a rarer script.
STARTS: tuple[tuple[int, str], ...] = (
    *((0x0, ""), (0x41, "Latin"), (0x5B, ""), (0x61, "Latin"), (0x7B, ""), (0xAA, "Latin")),
    *((0xAB, ""), (0xB5, "Greek"), (0xB6, ""), (0xBA, "Latin"), (0xBB, ""), (0xC0, "Latin")),
    *((0xD7, ""), (0xD8, "Latin"), (0xF7, ""), (0xF8, "Latin"), (0x2B0, ""), (0x370, "Greek")),
    *((0x400, "Cyrillic"), (0x530, "Armenian"), (0x590, "Hebrew"), (0x600, "Arabic")),
    *((0x700, ""), (0x750, "Arabic"), (0x780, ""), (0x900, "Devanagari"), (0x980, "Bengali")),
    *((0xA00, "Gurmukhi"), (0xA80, "Gujarati"), (0xB00, ""), (0xB80, "Tamil"), (0xC00, "Telugu")),
    *((0xC80, "Kannada"), (0xD00, "Malayalam"), (0xD80, "Sinhala"), (0xE00, "Thai")),
    *((0xE80, "Lao"), (0xF00, "Tibetan"), (0x1000, "Burmese"), (0x10A0, "Georgian")),
    *((0x1100, "Hangul"), (0x1200, "Ethiopic"), (0x13A0, ""), (0x1780, "Khmer"), (0x1800, "")),
    *((0x1E00, "Latin"), (0x1F00, "Greek"), (0x2000, ""), (0x3040, "Kana"), (0x3100, "")),
    *((0x3130, "Hangul"), (0x3190, ""), (0x31F0, "Kana"), (0x3200, ""), (0x3400, "Han")),
    *((0x4DC0, ""), (0x4E00, "Han"), (0xA000, ""), (0xAC00, "Hangul"), (0xD7B0, "")),
    *((0xF900, "Han"), (0xFB00, ""), (0xFB50, "Arabic"), (0xFE00, ""), (0xFE70, "Arabic")),
    *((0xFEFF, ""), (0xFF21, "Latin"), (0xFF3B, ""), (0xFF41, "Latin"), (0xFF5B, "")),
    *((0xFF66, "Kana"), (0xFFA0, "Hangul"), (0xFFE0, ""), (0x20000, "Han"), (0x323B0, "")),
)
NAMES = sorted({name for _, name in STARTS})  # "" is the first one
BOUNDS = np.array([start for start, _ in STARTS])
KINDS = np.array([NAMES.index(name) for _, name in STARTS])
FREQUENT = {
    "English": "the of and to in is that it for with you this are as was be on not have from",
    "German": "der die das und ist nicht ein eine zu mit den von sie auf für im es ich dem auch",
    "French": "le la les et des est une que dans pour pas vous du sur qui plus au avec ce il",
    "Spanish": "el la los de que y en un una es por con para las del se no lo como su",
    "Portuguese": "o os de que e em um uma é por com para as do da se não na no mais",
    "Italian": "il di che e la un una è per con non del della sono gli le si più nel come",
    "Dutch": "de het een en van is dat niet op te zijn met voor je aan er ook maar bij dit",
    "Polish": "i w na z do nie się że jest to jak o po co tak za od czy dla są",
    "Turkish": "ve bir bu için de da ile çok olarak daha ne gibi var kadar olan en ya ama mi",
    "Vietnamese": "và của là có cho không được các một trong với những này để người khi đã từ",
    "Indonesian": "yang dan di untuk dengan ini itu dari tidak pada adalah ke dalam akan atau",
}
LANGUAGES = {
    word: [language for language, words in FREQUENT.items() if word in words.split()]
    for words in FREQUENT.values()
    for word in words.split()
}
WORD = re.compile(r"[^\W\d_]+")
ENOUGH, AHEAD = 3, 1.25  # frequent words at least, and times as many as of any other language


def script_of(text: str) -> str:
    """The script of most letters of ``text``, with a guess at the language; "" without letters."""
    points = np.frombuffer(text[:SAMPLE].encode("utf-32-le", "replace"), np.uint32)
    kinds = KINDS[np.searchsorted(BOUNDS, points, "right") - 1]
    counts = np.bincount(kinds, minlength=len(NAMES))
    counts[0] = 0
    if not counts.any():
        return ""
    by_name = dict(zip(NAMES, counts.tolist(), strict=True))
    if by_name["Kana"] >= KANA * (by_name["Kana"] + by_name["Han"]) and by_name["Kana"]:
        by_name["Kana"] += by_name.pop("Han")
    script = max(by_name, key=lambda name: by_name[name])
    return _language(text[:SAMPLE]) if script == "Latin" else script


def _language(text: str) -> str:
    """Latin, with the language whose frequent words are in ``text``, if it is clear."""
    words = WORD.findall(text.lower())
    hits = Counter(language for word in words for language in LANGUAGES.get(word, ()))
    (language, most), (_, second) = [*hits.most_common(2), ("", 0), ("", 0)][:2]
    is_clear = most >= ENOUGH and most >= AHEAD * second
    return f"Latin ({language})" if is_clear else "Latin"
