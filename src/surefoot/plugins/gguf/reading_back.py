"""A GGUF file as llama.cpp reads it: its chat template and special tokens, read from the file, and
its tokens by llama.cpp itself where ``llama-cpp-python`` is installed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from transformers import PreTrainedTokenizerBase

from ...data.text.templates.render import Renderer
from ...storage.files import read_file

_STOP = "PARAMETER stop "
_ENDS = ("eos", "eot", "eom")


@dataclass(frozen=True)
class GGUFAlone:
    """The file."""

    path: Path
    tokenizer: PreTrainedTokenizerBase  # of the run, for ids where llama.cpp is not installed

    def prompt_ids(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Its template's text, with the tokens that llama.cpp adds."""
        renderer = Renderer(str(self._field("tokenizer.chat_template")), self.tokenizer)
        text = renderer.render([{**message} for message in messages], prompt=True)
        first, last = (
            [self._field(f"tokenizer.ggml.{name}_token_id")]
            if self._field(f"tokenizer.ggml.add_{name}_token")
            else []
            for name in ("bos", "eos")
        )
        return [*first, *self.text_ids(text), *last]

    def text_ids(self, text: str) -> list[int]:
        """By llama.cpp, or else by the tokenizer that the file was made from."""
        if self._model is not None:
            return list(self._model.tokenize(text.encode(), add_bos=False, special=True))
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def ends(self) -> Collection[int]:
        """The tokens that the file names, and those that its Modelfile does."""
        ids = [self._field(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
        modelfile = self.path.with_suffix(".Modelfile")
        text = read_file(modelfile).decode() if modelfile.is_file() else ""
        lines = text.splitlines()
        stops = {line.removeprefix(_STOP) for line in lines if line.startswith(_STOP)}
        tokens = self.tokenizer.get_vocab().items()
        return {*ids, *(i for name, i in tokens if json.dumps(name, ensure_ascii=False) in stops)}

    def _field(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        return None if field is None else field.contents()

    @cached_property
    def _reader(self) -> GGUFReader:
        return GGUFReader(self.path)

    @cached_property
    def _model(self) -> Any:
        if find_spec("llama_cpp") is None:
            return None
        llama_cpp = import_module("llama_cpp")
        return llama_cpp.Llama(str(self.path), vocab_only=True, verbose=False)


def head_size(path: Path) -> Mapping[str, object]:
    """``head_dim`` by the file's own settings, which transformers 5.23 does not read: it would take
    the embedding length over the number of heads, and another shape than the file's."""
    fields = GGUFReader(path).fields
    found = [field for name, field in fields.items() if name.endswith(".attention.key_length")]
    return {"head_dim": found[0].contents()} if found else {}
