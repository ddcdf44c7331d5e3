"""Complete models and other formats, written from checkpoints and adapters."""
