"""Asynchronous saves: a snapshot in memory, and a process that writes it."""
