"""Generate responses."""
