"""Record what LLaMA-Factory's own code encodes, for ``test_families.py``.

    PYTHONPATH=src:tests:tests/contract:FOLDER python tests/contract/record_llamafactory.py

where FOLDER contains llamafactory 0.9.5. The file has the ids and the trained runs of each case;
equal ones are written once.
"""

import gzip
import json
import sys
import types
from copy import deepcopy
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import template_cases as cases

RECORD = Path(__file__).with_name("llamafactory_templates.json.gz")


def import_theirs():
    """Their templates and their processor, without the imports of their package, and sound."""
    for name in ("torchaudio", "torchaudio.functional", "torchaudio.transforms"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    folder = Path(find_spec("llamafactory").origin).parent
    for name in ("llamafactory", "llamafactory.data", "llamafactory.hparams"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder.parent.joinpath(*name.split(".")))]
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import TEMPLATES
    from llamafactory.hparams.data_args import DataArguments

    return TEMPLATES, SupervisedDatasetProcessor, DataArguments


def encoded(theirs, name, case, mode):
    """Ids, and the bounds and labels of each trained run."""
    templates, processor, arguments = theirs
    template = deepcopy(templates[name])
    tokenizer = cases.tokenizer()
    settings = arguments(template=name, cutoff_len=100_000, **cases.MODES[mode])
    template.mm_plugin = templates["alpaca"].mm_plugin  # as text alone needs no processor
    template.enable_thinking = settings.enable_thinking
    template.fix_special_tokens(tokenizer)
    system, turns, tools = cases.conversation(case, template.thought_words)
    messages = [{"role": role, "content": content} for role, content in turns]
    one = processor(template=template, tokenizer=tokenizer, processor=None, data_args=settings)
    schemas = json.dumps(tools, ensure_ascii=False) if tools else ""
    ids, labels = one._encode_data_example(
        messages[:-1], messages[-1:], system, schemas, [], [], []
    )
    return {"ids": ids, "labels": runs(labels)}


def runs(labels):
    """[start, labels] of each stretch of labels."""
    found = []
    for i, label in enumerate(labels):
        if label != -100:
            if not i or labels[i - 1] == -100:
                found.append([i, []])
            found[-1][1].append(label)
    return found


def main():
    theirs = import_theirs()
    found, kept, numbers = {}, [], {}
    for name, case, mode in cases.wanted():
        try:
            made = encoded(theirs, name, case, mode)
        except (ValueError, RuntimeError) as error:
            made = {"error": str(error)}
        key = json.dumps(made)
        if key not in numbers:
            numbers[key] = len(kept)
            kept.append(made)
        found[f"{name} {case} {mode}"] = numbers[key]
    text = json.dumps({"encodings": kept, "cases": found}, separators=(",", ":"))
    RECORD.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{len(found):,} cases, {len(kept):,} encodings, {RECORD.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
