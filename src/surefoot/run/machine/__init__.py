"""The machine: what is installed, and what is chosen by its device."""
