"""Trackers other than TensorBoard, each fed from ``metrics.jsonl`` by a worker process.

To add one: write its file with ``open_run``, and its name in ``training.section.TrackerName``.
"""
