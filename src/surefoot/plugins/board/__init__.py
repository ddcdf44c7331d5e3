"""The board: runs, curves, checkpoints, recipes and conversations in a browser, read from files.

``plugin`` names the commands of ``command``: ``board`` in a browser, ``runs`` and ``watch`` on the
terminal. Folders are found by ``run_folders``, which also says what a name from a browser may mean;
``run_state`` tells from locks and records whether a run trains, ``metrics`` has its curves, and
``board`` puts them together as plain data. ``app`` answers over HTTP, behind a guard: ``api`` has
the addresses of runs, ``recipes`` those of new ones. ``static`` are the pages.

The board owns no training and imports neither torch nor transformers: what needs them is a child
process of the command line (``processes``).
"""
