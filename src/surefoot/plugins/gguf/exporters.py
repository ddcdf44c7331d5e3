"""``export --to gguf`` and ``--to gguf-adapter``; what writes is imported when it is used."""

from __future__ import annotations

from ...cli.exporter import Exporter

_EXACT = ("f16", "f32", "bf16", "q8_0")  # which an adapter can have, too
_BLOCKS = ("q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q5_0", "q4_0")


GGUF = Exporter(
    summary="one GGUF file for llama.cpp and Ollama, with a Modelfile beside it",
    writer=f"{__package__}.export:to_gguf",
    formats=(*_EXACT, *_BLOCKS),
    suffix=".gguf",
    may_not_open=True,
    package="gguf",
)
GGUF_ADAPTER = Exporter(
    summary="a LoRA adapter, not merged, as a GGUF file for a GGUF of its base",
    writer=f"{__package__}.export:to_gguf_adapter",
    formats=_EXACT,
    suffix=".gguf",
    may_not_open=True,
    package="gguf",
)
