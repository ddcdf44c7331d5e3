"""What Surefoot knows of MindSpore and MindSpore Transformers, by name."""

from ...extensions import Plugin

_HERE = __package__

PLUGIN = Plugin(
    name="mindspore",
    layouts={"mindspore": f"{_HERE}.opening:LAYOUT"},
    openers={"mindspore": f"{_HERE}.model:open_named"},
    reading={"mindspore": f"{_HERE}.reading:ReadingOptions"},
    row_files={".mindrecord": f"{_HERE}.mindrecord:read_rows"},
    callbacks={"mindspore": f"{_HERE}.saving:MindSporeSaves"},
    targets={"mindspore": f"{_HERE}.target:MindSporeFolder"},
    trainers={"mindspore": f"{_HERE}.resume:TRAINER"},
    importers={"mindspore": f"{_HERE}.recipe:IMPORTER"},
)
