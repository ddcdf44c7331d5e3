"""Requests to prompts, and tokens to what a response says."""
