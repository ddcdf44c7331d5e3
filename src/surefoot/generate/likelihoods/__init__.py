"""How likely given continuations of prompts are."""
