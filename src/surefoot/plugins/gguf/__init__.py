"""Models and adapters as GGUF files, which llama.cpp and Ollama run, written without a compiler.

``targets`` has the options. ``export`` writes a model or an adapter: ``architectures`` says what
llama.cpp takes for granted, ``vocabulary`` describes the tokenizer, ``formats`` chooses the type of
each tensor and packs it, ``gguf_file`` streams tensors into the file.
"""
