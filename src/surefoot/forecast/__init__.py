"""Estimates and measurements of a run: ``plan`` estimates, ``bench`` measures."""
