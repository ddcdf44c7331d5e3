"""The table of architectures in the documentation: written by doing what it says, read by tests.

``python tests/zoo/page.py`` writes all of it (fifteen minutes of a core), ``page.py llama gpt2``
these rows, ``page.py pictures`` the table of types that read pictures.
"""

import logging
import re
import sys
import tempfile
import warnings
from itertools import takewhile
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "architectures.md"
WIDEST = 150  # characters of a reason
HEAD = """# Architectures

Each row is a tiny random model of the architecture, on one CPU, in float32, made and tried by
`make architectures`. `make proof` tries all rows again, `make test` some.

| column | yes means |
|---|---|
| full | full fine-tuning has the losses of a plain torch loop, row by row |
| packed | packed rows have the losses of padded ones, with documents beyond every window |
| lora | `method: lora` with its defaults trains |
| tp | two ranks that share every matrix (`parallel.tp: 2`) have the losses of one |
| resume | a stopped and resumed run ends in the same bits, full and LoRA |
| export | a LoRA run exports to a model with the logits that PEFT computes |
| head | log-probabilities are computed in chunks, full and LoRA |
| kept tensors | a full run exports every tensor of the base's files, of unbuilt layers, too |

*refused* is an error that says what to do instead; *fails* is not right yet. *Full logits* take
more time and memory than chunks, and the log of a run says why. The suffixes `:window`, `:alibi`,
`:bias` and `:tied` are variants of an architecture.
Doge: transformers computes rows longer than its `keep_window_size` otherwise with padding than
alone, so `data.cutoff_len` may not be more.
Layers with a state (of Mamba, Qwen3.5, LFM2 and others) are found by trying, and
compute packed rows document by document; a pipeline (`parallel.pp`) of such layers cannot pack.

"""
PICTURES = """
## Types that read pictures

The types that `AutoModelForImageTextToText` of transformers knows, each tried as a tiny random
model with its own processor, by rows with no, one and two pictures. The reference is transformers
alone: processor and model, row by row. *refused* is an error with this reason before the first
step; rows of text train such a model all the same. *not tried* says that no tiny model with its
processor could be made here without a download.

| column | yes means |
|---|---|
| full | three steps of full fine-tuning have the losses of a plain torch loop |
| packed | so have packed rows |
| lora | `method: lora` with its defaults trains |

"""


def text(rows, pictures=None):
    """The page of ``{architecture: {column: (cell, reason)}}``, and of the same of ``pictures``."""
    page = HEAD + table("architecture", rows)
    return page + PICTURES + table("type", pictures, has_reasons=True) if pictures else page


def table(first, rows, *, has_reasons=False):
    """The rows as a table whose first column has this name."""
    columns = [*next(iter(rows.values())), *(["why not"] if has_reasons else [])]
    lines = [f"| {first} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, cells in rows.items():
        shown = [f"*{cell}*" if cell != "yes" else cell for cell, _ in cells.values()]
        if has_reasons:
            shown.append(next((short(why) for _, why in cells.values() if why), ""))
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def short(reason):
    """The beginning of a reason, without the folder of its model."""
    plain = re.sub(r"^/\S+/model: ", "", " ".join(reason.split())).replace("|", "\\|")
    return plain if len(plain) <= WIDEST else plain[: plain.rindex(" ", 0, WIDEST)] + " ..."


def read(first="architecture"):
    """The rows of the table whose first column has this name, each with its reason."""
    lines = [re.split(r" \| ?", line.strip("|").strip()) for line in PAGE.read_text().splitlines()]
    start = next((i for i, cells in enumerate(lines) if cells[0] == first), None)
    if start is None:
        return {}
    columns, rows = lines[start][1:], {}
    for cells in takewhile(lambda cells: len(cells) > 1, lines[start + 2 :]):
        found = dict(zip(columns, cells[1:], strict=True))
        why = found.pop("why not", "")
        rows[cells[0]] = {
            column: (cell.strip("*"), "" if cell == "yes" else why)
            for column, cell in found.items()
        }
    return rows


def main(names):
    sys.path.insert(0, str(TESTS))
    from zoo import architectures, picture_models, picture_sweep, sweep

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    kinds = picture_models.KINDS
    tables = {sweep: read() if names else {}, picture_sweep: read("type") if names else {}}
    names = kinds if names == ["pictures"] else names or [*architectures.SETTINGS, *kinds]
    for name in names:
        tried = sweep if name in architectures.SETTINGS else picture_sweep
        with tempfile.TemporaryDirectory() as folder:
            tables[tried][name] = row = tried.row(name, Path(folder) / "model")
        print(name, {column: cell for column, (cell, _) in row.items()}, flush=True)
        for column, (cell, reason) in row.items():
            if cell == "fails":
                print(f"  {column}: {reason.splitlines()[0]}", flush=True)
    rows, pictures = tables.values()
    PAGE.write_text(
        text(
            {name: rows[name] for name in architectures.SETTINGS if name in rows},
            {name: pictures[name] for name in kinds if name in pictures},
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
