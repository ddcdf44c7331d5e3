"""Object stores and hubs, by name."""

from ...extensions import Plugin

_HERE = __package__

PLUGIN = Plugin(
    name="cloud",
    commands={
        "push": (
            "Upload a model or checkpoints to Hugging Face, with a model card.",
            f"{_HERE}.command:push",
        )
    },
    hubs={
        "huggingface": f"{_HERE}.hubs:HUGGING_FACE",
        "modelscope": f"{_HERE}.hubs:MODELSCOPE",
    },
    stores={"fsspec": f"{_HERE}.remote_run:STORES"},
    uploads={"huggingface": f"{_HERE}.publisher:uploads_of"},
)
