"""GGUF files, which llama.cpp and Ollama run, by name."""

from ...extensions import Plugin

_HERE = __package__

PLUGIN = Plugin(
    name="gguf",
    exporters={
        "gguf": f"{_HERE}.exporters:GGUF",
        "gguf-adapter": f"{_HERE}.exporters:GGUF_ADAPTER",
    },
)
