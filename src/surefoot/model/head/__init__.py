"""The output head: log-probabilities without full logits."""
