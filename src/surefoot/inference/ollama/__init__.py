"""What Ollama needs beside a GGUF file: a Modelfile, with the chat template in Go's language."""
