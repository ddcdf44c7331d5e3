"""Rollouts of a policy: their one form, and what is kept of them for people."""
