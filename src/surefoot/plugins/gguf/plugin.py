"""GGUF files, which llama.cpp and Ollama run, by name."""

from ...extensions import Plugin

_HERE = __package__

PLUGIN = Plugin(
    name="gguf",
    targets={
        "gguf": f"{_HERE}.targets:GGUF",
        "gguf-adapter": f"{_HERE}.targets:GGUFAdapter",
    },
)
