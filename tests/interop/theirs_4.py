"""What transformers 4 makes of folders, run in a Python that has it: ``theirs_4.py FOLDER``.

Imports nothing of ours. Each folder in FOLDER has a model, a tokenizer, or both.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(root):
    """The logits of fixed ids, and the ids of a text, by folder; or the error."""
    logits, ids, errors = {}, {}, {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        try:
            if (folder / "config.json").exists():
                model = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, attn_implementation="eager"
                )
                with torch.no_grad():
                    logits[folder.name] = model.eval()(torch.load(root / "ids.pt")).logits
            if (folder / "tokenizer.json").exists():
                known = AutoTokenizer.from_pretrained(folder)
                text = known.apply_chat_template(
                    [{"role": "user", "content": "Hé <new> x"}], tokenize=False
                )
                ids[folder.name] = [text, known(text)["input_ids"], known.pad_token]
        except Exception as error:
            errors[folder.name] = f"{type(error).__name__}: {error}"[:300]
    torch.save(logits, root / "logits.pt")
    print(json.dumps({"ids": ids, "errors": errors}))


main(Path(sys.argv[1]))
