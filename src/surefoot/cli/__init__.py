"""The command line: ``main`` is a table of commands, each in the module of its subject.

A command parses, calls ``run``, ``use`` or ``checkpoint``, and draws what it got: with ``table``
for people, as JSON for programs. Its module is imported when it is used, and what needs torch
inside the command, by ``loading``; so help and ``ckpt ls`` start at once, and what is wrong with a
recipe is reported before the slow imports. ``targets`` makes options of the fields of a target.
"""
