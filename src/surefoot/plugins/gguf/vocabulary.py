"""The tokenizer in a GGUF file: tokens, merges or scores, the pre-tokenizer, special tokens.

Everything is read from the tokenizer's own ``tokenizer.json``. The pre-tokenizer is recognized by
its rule, not by a hash of what it makes of a text, so that added tokens do not hide it.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter, TokenType
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from ...data.text.templates import saved_source
from ...data.text.templates.render import Renderer
from ...errors import ModelError, TemplateError

logger = logging.getLogger(__name__)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS = "ByteLevel", "Digits, ByteLevel"  # which split by GPT-2's own expression
# The expression that splits a text, and the name of the same rule in llama.cpp.
PRE_TOKENIZERS: Mapping[str, str] = {
    _LLAMA3.replace("{1,3}", ""): "qwen2",
    _LLAMA3: "llama-bpe",
    _TEKKEN: "tekken",
    _GPT4O: "gpt-4o",
    _DIGITS: "smollm",
    _GPT2: "gpt-2",
}
_TEXTS = 20_000  # about a second
_BATCH = 500  # that are encoded at a time; an encoding takes much more memory than its ids
_TOLERATED = 1e-3  # of the texts
_PROBE = (
    "\n \n\n \n\n\n \t \t\t  \n   \n    a 3 33 333 3333 33333 3.3 3..3 a1b2 ------=== (x) '' "
    "``\"\" ....!!?? I've 'RE \"M we'LL é ß 你好 нещо 🙂🙂 กิน "
    "/path//x\r\n_under__score CamelCase ABCdef 1st"
)
_FIRST = '"prepend_scheme": "first"'  # a space before the first word only
_PHI = re.compile("phi-?3", re.IGNORECASE)
_NOT_OF_PHI = {"<unk>", "<s>", "<|endoftext|>"}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "▁"
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")


@dataclass(frozen=True)
class GGUFVocabulary:
    """The tokens of a tokenizer by id, as GGUF describes them."""

    model: str  # gpt2: byte-level BPE; llama: SentencePiece
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    has_space_prefix: bool | None = None


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, rows: int, where: str) -> GGUFVocabulary:
    """The vocabulary of a model with ``rows`` embeddings; ids without a token are padding. Raises
    ``ModelError`` for tokenizers that llama.cpp has not."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{where}: has no tokenizer.json, from which GGUF's tokens are made")
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise ModelError(f"{where}: a tokenizer of type {model['type']} has no form in GGUF here")
    if kinds := _normalizers(content.get("normalizer")):
        logger.warning(
            "%s: llama.cpp does not normalize texts (%s): one that this changes gets other tokens "
            "there",
            where,
            ", ".join(dict.fromkeys(kinds)),
        )
    added = {token["id"]: token for token in content["added_tokens"]}
    tokens, types = _tokens(model["vocab"], added, rows)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if not model.get("byte_fallback"):
        pre = _pre_tokenizer(content, where)
        return GGUFVocabulary("gpt2", pre, tokens, types, merges)
    unknown = model["vocab"].get(model.get("unk_token"))
    types = [
        TokenType.UNKNOWN if i == unknown else TokenType.BYTE if _BYTE.fullmatch(t) else kind
        for i, (t, kind) in enumerate(zip(tokens, types, strict=True))
    ]
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    _check_merges(pairs, model["vocab"], {t["content"] for t in added.values()}, where)
    scores = _scores(tokens, types, pairs)
    prefix = _has_space_prefix(content)
    if _FIRST in json.dumps(content.get("pre_tokenizer")):
        logger.warning("%s: llama.cpp writes a space after special tokens, too", where)
    return GGUFVocabulary("llama", "default", tokens, types, None, scores, prefix)


def add_vocabulary(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocabulary: GGUFVocabulary
) -> None:
    """Write it, with the special tokens and the chat template."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.has_space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.has_space_prefix)
    writer.add_add_bos_token(adds_first(tokenizer))
    # Whatever the tokenizer does with a text to train on: llama.cpp adds it to every prompt, also
    # to one that a chat template renders, which ends a conversation before its response.
    writer.add_add_eos_token(False)
    adders = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
    }
    for name, add in adders.items():
        if (token := getattr(tokenizer, f"{name}_token_id")) is not None:
            add(token)
    if source := saved_source(tokenizer):
        writer.add_chat_template(plain_template(source))


def model_name(stem: str, tokenizer: PreTrainedTokenizerBase, architecture: str, where: str) -> str:
    """``general.name`` of the file. llama.cpp drops the white space after special tokens, as the
    tokenizer of Phi-3 does, if and only if the name says phi3 (``llama-vocab.cpp``)."""
    added = json.loads(tokenizer.backend_tokenizer.to_str())["added_tokens"]
    dropping = {token["content"] for token in added if token["rstrip"]}
    of_phi = {token["content"] for token in added} - _NOT_OF_PHI
    is_phi = architecture == "phi3" and len(dropping ^ of_phi) < len(dropping)
    odd = dropping ^ (of_phi if is_phi else set())
    odd |= {token["content"] for token in added if token["lstrip"]}
    if odd:
        logger.warning(
            "%s: llama.cpp treats white space beside %s unlike the tokenizer, so prompts with it "
            "get other tokens there",
            where,
            ", ".join(sorted(odd)),
        )
    if is_phi:
        return stem if _PHI.search(stem) else f"phi3 {stem}"
    return _PHI.sub("phi 3", stem)


def add_stops(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> None:
    """The token that ends a turn, if it is not the one that ends a text."""
    # The file has one field for it; the Modelfile names all stops.
    if others := [token for token in stops if token != tokenizer.eos_token_id]:
        writer.add_eot_token_id(others[0])


def plain_template(source: str) -> str:
    """A chat template without the marks of trained text, which only transformers reads; white
    space is trimmed as the marks trim it."""
    return _GENERATION.sub(
        lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", source
    )


def adds_first(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a first token precedes every prompt: as in training, where a chat template writes it
    or not, whatever the tokenizer does with plain text."""
    bos = tokenizer.bos_token_id
    # By trial: in Llama 3 a post-processor adds it, and no add_bos_token says so.
    is_added = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return is_added and template_begins(tokenizer) is not False


def template_begins(tokenizer: PreTrainedTokenizerBase) -> bool | None:
    """Whether the chat template writes the first token; None without a template."""
    source, bos = saved_source(tokenizer), tokenizer.bos_token
    if not source or not bos:
        return None if not source else False
    try:
        text = Renderer(source, tokenizer).render([{"role": "user", "content": "a"}])
    except TemplateError:
        return None
    return text.startswith(str(bos))


def _tokens(
    vocab: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], rows: int
) -> tuple[list[str], list[int]]:
    """The text and the type of every row of the embeddings."""
    # Embeddings may have more rows than there are tokens; llama.cpp wants a text for each.
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    for token, index in vocab.items():
        if index < rows:
            tokens[index], types[index] = token, int(TokenType.NORMAL)
    for index, added_token in added.items():
        if index < rows:
            text, kind = added_token["content"], TokenType.CONTROL
            if not added_token["special"]:
                # llama.cpp looks for these tokens before it writes spaces as ▁.
                text, kind = text.replace(_SPACE, " "), TokenType.USER_DEFINED
            tokens[index], types[index] = text, int(kind)
    return tokens, types


def _pre_tokenizer(content: Mapping[str, Any], where: str) -> str:
    """llama.cpp's name of the rule that splits a text before merging."""
    pre_tokenizer = content["pre_tokenizer"] or {}
    # By its expression, not as in llama.cpp by a hash of the ids of a text: new tokens change the
    # hash, and its table has published vocabularies only (decisions/0063).
    name = PRE_TOKENIZERS.get(_rule(pre_tokenizer)) or _nearest_rule(content, where)
    if name is None:
        raise ModelError(
            f"{where}: its pre-tokenizer has no name in llama.cpp, which would split texts in "
            f"another way: {pre_tokenizer}"
        )
    return name


def _nearest_rule(content: Mapping[str, Any], where: str) -> str | None:
    """The rule of llama.cpp with which random texts of the tokenizer's own tokens get the same ids.

    A rule that splits less can do so, if no token crosses the difference. A rule that gives other
    ids to a few texts is returned with a warning. None if every rule changes more of them.
    """
    tokenizer = Tokenizer.from_str(json.dumps(content))
    decoded = tokenizer.decode_batch([[index] for index in content["model"]["vocab"].values()])
    # The same texts each time, so that one tokenizer always gets the same answer.
    pick = random.Random(0)
    texts = [_PROBE, *("".join(pick.choices(decoded, k=8)) for _ in range(_TEXTS))]
    batches = [texts[i : i + _BATCH] for i in range(0, len(texts), _BATCH)]
    expected_ids = [_ids(tokenizer, batch) for batch in batches]
    nearest, fewest = None, texts
    for rule, name in PRE_TOKENIZERS.items():
        tokenizer.pre_tokenizer = _splitter(rule)
        different = _different(tokenizer, batches, expected_ids)
        if len(different) <= _TEXTS * _TOLERATED and len(different) < len(fewest):
            nearest, fewest = name, different
    if nearest is not None and fewest:
        logger.warning(
            "%s: llama.cpp has not its pre-tokenizer; the nearest, %s, makes other tokens of %d "
            "in %d random texts, for example of %r",
            *(where, nearest, len(fewest), len(texts), min(fewest, key=len)),
        )
    return nearest


def _different(
    tokenizer: Any, batches: Sequence[Sequence[str]], expected_ids: Sequence[Sequence[list[int]]]
) -> list[str]:
    """The texts that get other ids, until they are too many."""
    different: list[str] = []
    for batch, expected in zip(batches, expected_ids, strict=True):
        pairs = zip(batch, expected, _ids(tokenizer, batch), strict=True)
        different += [text for text, ids, others in pairs if ids != others]
        if len(different) > _TEXTS * _TOLERATED:
            break
    return different


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    # Without offsets, which nobody reads here.
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _splitter(rule: str) -> Any:
    """The pre-tokenizer of a rule in ``PRE_TOKENIZERS``."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == _GPT2:
        return plain
    if rule == _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    coded = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule), "isolated"), coded])


def _rule(pre_tokenizer: Mapping[str, Any]) -> str:
    """The expression that splits a text, or the kinds of the steps; empty if there is neither."""
    is_sequence = pre_tokenizer.get("type") == "Sequence"
    steps = list(pre_tokenizer["pretokenizers"]) if is_sequence else [pre_tokenizer]
    last = steps.pop()
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return ""
    if last.get("use_regex", True):
        is_plain = all(step["type"] == "Digits" and step["individual_digits"] for step in steps)
        return ", ".join(step["type"] for step in [*steps, last]) if is_plain else ""
    if len(steps) != 1 or steps[0]["type"] != "Split":
        return ""
    # Removed comes with invert: it drops what lies between matches,
    # and these expressions match all.
    is_plain = steps[0]["behavior"] in ("Isolated", "Removed")
    return str(steps[0]["pattern"].get("Regex", "")) if is_plain else ""


def _normalizers(normalizer: Mapping[str, Any] | None) -> list[str]:
    """The kinds of the steps that do more to a text than SentencePiece does to its spaces."""
    if normalizer is None:
        return []
    if normalizer["type"] == "Sequence":
        return [kind for step in normalizer["normalizers"] for kind in _normalizers(step)]
    is_space = normalizer.get("prepend") == _SPACE or (
        normalizer.get("pattern") == {"String": " "} and normalizer.get("content") == _SPACE
    )
    return [] if is_space else [normalizer["type"]]


def _has_space_prefix(content: Mapping[str, Any]) -> bool:
    """Whether a space precedes the first word."""
    text = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return '"Prepend"' in text or _FIRST in text or '"always"' in text


def _check_merges(
    pairs: Sequence[Sequence[str]], vocab: Mapping[str, int], added: set[str], where: str
) -> None:
    """llama.cpp joins any two pieces that make a token, so all such pairs must be merges."""
    merges = {tuple(pair) for pair in pairs}
    for token in vocab:
        if token in added or _BYTE.fullmatch(token):
            continue
        for at in range(1, len(token)):
            pair = token[:at], token[at:]
            if pair[0] in vocab and pair[1] in vocab and pair not in merges:
                raise ModelError(
                    f"{where}: its tokenizer does not merge {pair[0]!r} and {pair[1]!r}, which "
                    "llama.cpp would; only vocabularies of SentencePiece can be written"
                )


def _scores(
    tokens: Sequence[str], types: Sequence[int], pairs: Sequence[Sequence[str]]
) -> list[float]:
    """The earlier a token is merged, the higher; SentencePiece merges the highest first."""
    # llama.cpp joins the two pieces with the best score first, so a rank is a score, and neither
    # tokenizer.model nor its package is needed (decisions/0063).
    ranks: dict[str, int] = {}
    for left, right in pairs:
        ranks.setdefault(left + right, len(ranks))
    normal = int(TokenType.NORMAL)
    return [
        -float(ranks.get(token, len(ranks))) if kind == normal else -1e3 * (kind != 2)
        for token, kind in zip(tokens, types, strict=True)
    ]
