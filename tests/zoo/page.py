"""The table of architectures in the documentation: written by doing what it says, read by tests.

``python tests/zoo/page.py`` writes all of it (ten minutes of a core), ``page.py llama gpt2`` these
rows.
"""

import logging
import sys
import tempfile
import warnings
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "architectures.md"
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

*refused* is an error that says what to do instead; *fails* is not right yet. The suffixes
`:window`, `:alibi`, `:bias` and `:tied` are variants of an architecture.
Doge: transformers computes rows longer than its `keep_window_size` otherwise with padding than
alone, so `data.cutoff_len` may not be more.

"""


def text(rows):
    """The page of ``{architecture: {column: (cell, reason)}}``."""
    columns = list(next(iter(rows.values())))
    lines = [f"| architecture | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, cells in rows.items():
        shown = [f"*{cell}*" if cell != "yes" else cell for cell, _ in cells.values()]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return HEAD + "\n".join(lines) + "\n"


def read():
    """The rows of the page, without reasons."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[0] == "architecture")
    columns = lines[start][1:]
    return {
        cells[0]: {
            column: (cell.strip("*"), "") for column, cell in zip(columns, cells[1:], strict=True)
        }
        for cells in lines[start + 2 :]
        if len(cells) > 1
    }


def main(names):
    sys.path.insert(0, str(TESTS))
    from zoo import architectures, sweep

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rows = read() if names else {}
    for name in names or architectures.SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = sweep.row(name, Path(folder) / "model")
        cells = {column: cell for column, (cell, _) in rows[name].items()}
        print(name, cells, flush=True)
        for column, (cell, reason) in rows[name].items():
            if cell == "fails":
                print(f"  {column}: {reason.splitlines()[0]}", flush=True)
    PAGE.write_text(text({name: rows[name] for name in architectures.SETTINGS if name in rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
