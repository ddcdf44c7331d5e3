"""Benchmarks: multiple choice by likelihood, tasks of lm-eval, and similarity to references."""
