"""Receipts of exports: what an artefact was made from, and proof that it computes the same."""
