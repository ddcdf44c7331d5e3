"""Conversations that LLaMA-Factory's encodings were recorded for, and their tokenizer."""

import json

import tiny_tokenizers
from surefoot.data.text.families import families

TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "City"},
            "unit": {"type": "string", "description": "Unit", "enum": ["c", "f"]},
            "days": {"type": "array", "items": {"type": "integer"}, "description": "Days"},
        },
        "required": ["city"],
    },
}
CALL = {"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2]}}
ROME = {"name": "get_weather", "arguments": {"city": "Rome"}}


def calls(*found):
    return json.dumps(list(found), ensure_ascii=False)


U, A, F, O = "user", "assistant", "function", "observation"  # noqa: E741 - roles of theirs
ASKED = [(U, "Weather in Paris?"), (F, calls(CALL)), (O, '{"temp_c": 21}'), (A, "21 °C.")]
CASES = {  # name -> system message, turns, tools
    "single": ("", [(U, "What is the capital of France?"), (A, "Paris.")], []),
    "system": ("You are terse.", [(U, "Name a prime."), (A, "7")], []),
    "multi": (
        "",
        [(U, "Hi"), (A, "Hello! How can I help?"), (U, "Thanks\n\n"), (A, "Welcome.\n")],
        [],
    ),
    "chinese": ("你是助手。", [(U, "你好 🙂"), (A, "你好！"), (U, "再见"), (A, "再见。")], []),
    "tools": (
        "Help.",
        [*ASKED, (U, "And in Rome?"), (F, calls(ROME)), (O, "25"), (A, "25.")],
        [TOOL],
    ),
    "no_system": ("", ASKED, [TOOL]),
    "parallel": ("Help.", [(U, "Both?"), (F, calls(CALL, ROME))], [TOOL]),
}
THOUGHTS = {  # {0}, {1} are a template's words around a thought
    "thought": ("", [(U, "Two and two?"), (A, "{0}Easy.{1}4")], []),
    "thoughts": ("", [(U, "2+2?"), (A, "{0}Easy.{1}4"), (U, "3+3?"), (A, "{0}Hm.{1}6")], []),
    "some": ("", [(U, "2+2?"), (A, "{0}Easy.{1}4"), (U, "3+3?"), (A, "6")], []),
    "called": (
        "Help.",
        [(U, "Paris?"), (F, "{0}Ask.{1}" + calls(CALL)), (O, "21"), (A, "21.")],
        [TOOL],
    ),
}
MODES = {  # arguments of theirs
    "default": {},
    "last": {"mask_history": True},
    "off": {"enable_thinking": False, "mask_history": True},
    "off_all": {"enable_thinking": False},
    "open": {"enable_thinking": None, "mask_history": True},
}


def conversation(case, words=("<think>\n", "\n</think>\n\n")):
    """System message, turns and tools of a case."""
    if case in CASES:
        return CASES[case]
    system, turns, tools = THOUGHTS[case]
    return (
        system,
        [(r, t.replace("{0}", words[0]).replace("{1}", words[1])) for r, t in turns],
        tools,
    )


def of_family(family):
    """Every (case, mode) that is recorded of a family."""
    for case in CASES:
        for mode in ("default", "last"):
            yield case, mode
    if family.thoughts:
        for case in (*THOUGHTS, "multi", "tools"):
            for mode in MODES:
                if case in THOUGHTS or mode not in ("default", "last"):
                    yield case, mode


def wanted():
    """Every (family, case, mode) that is recorded."""
    for name, family in families().items():
        for case, mode in of_family(family):
            yield name, case, mode


def tokenizer():
    """A tokenizer with a token for each delimiter of each family."""
    made = tiny_tokenizers.tokenizer("qwen", pad_token="</s>")
    words = {token for family in families().values() for token in family.tokens}
    words |= {"sop", "<|endoftext|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<|EOT|>"}
    made.add_tokens(sorted(words), special_tokens=True)
    return made
