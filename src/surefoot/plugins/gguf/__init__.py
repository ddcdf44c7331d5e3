"""Models and adapters as GGUF files, which llama.cpp and Ollama run, written without a compiler."""
