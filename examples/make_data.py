"""Write the demo's texts: a corpus to pretrain on, and notes with their records to fine-tune on.

Everything happens in the world of a small village shop. The corpus is prose: stories, letters,
diary pages, questions and answers. The instruction rows turn a short order into a record. All of it
follows from the seed, and needs nothing but Python.

Held out is more than the rows: one in eight of all full names and one in eight of all kinds of
goods ("brass lamp") occur in held-out notes only. Neither the corpus nor a training row ever
has them, so that a held-out note can't be answered from memory.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from village import (
    FIRST,
    GOODS,
    KINDS,
    LAST,
    NUMBERS,
    WEATHER,
    Scene,
    draw,
    is_reserved,
    ordinal,
    spoken_date,
    spoken_goods,
    upper,
)

INSTRUCTION = "Write this order as a record."
NOTES = """{name} ordered {goods}{to}{by}.
Please send {goods} to {name}{at}{by}.
{Goods} for {name}{at}{by}, please.
Order from {name}: {goods}{to}{by}.
{name}{at} needs {goods}{by}.
I would like {goods}{to}{by}. Yours, {name}
My name is {name}. Send {goods}{to}{by}.
Can {name}{at} have {goods}{by}?
Deliver {goods}{to}{by}. {name} will pay.
Hello, this is {name}{of}. {Goods}{by}, please!
{name} asked for {goods}. Send {them}{to}{by}.
A letter came{of}: {name} wants {goods}{by}.
Put {goods} on the cart{to}{by}; {name} bought {them}.
{Goods}{to}{by}, and the bill to {name}.
Has {name}{at} bought {goods}? Pack {them}{by}.
Dear shop, send me {goods}{by}. {name}{of}
We promised {goods}{by} to {name}{of}.
The cart{to} takes {goods}{by}; {name} waits for {them}.""".splitlines()


# ---- the corpus: each function tells one kind of little text about scenes


def visit(a: Scene, b: Scene, rng: random.Random) -> str:
    """Someone comes to the shop."""
    ask = rng.choice((f"I need {a.goods}", f"Do you have {a.goods}", f"{upper(a.goods)}, please"))
    count = ", ".join(NUMBERS[: a.count])
    return (
        f'{a.name} came from {a.city} to the shop. "Good morning, {a.first}," said {b.first}. '
        f'"{ask}," said {a.first}. {b.first} counted the {a.items}: {count}. {a.name} paid for '
        f"the {a.goods} and went home to {a.city}."
    )


def letter(a: Scene, b: Scene, rng: random.Random) -> str:
    """A letter of thanks or of complaint."""
    middle = rng.choice((
        f"Every {a.item} is whole and the children love {a.them}.",
        f"I asked for {a.goods} but you sent {b.goods}. Please send the {a.items}.",
        f"My neighbour would like {b.goods} as well.",
        f'On the parcel was written "{a.city}", and on the box "{a.item}".',
    ))  # fmt: skip
    return (
        f"Dear {b.first}, thank you for your letter from {b.city}. The {a.goods} came to {a.city} "
        f"on {spoken_date(a, rng)}. {middle} {rng.choice(WEATHER)} Yours, {a.name}"
    )


def diary(a: Scene, b: Scene, rng: random.Random) -> str:
    """A page of the shopkeeper's diary."""
    end = rng.choice((
        f"Tomorrow the {a.items} go to {a.city}.",
        f"{b.name} of {b.city} sent {b.goods}, and I put the {b.items} on the shelf.",
        f"I will write this order in the book for {b.name}.",
    ))  # fmt: skip
    return (
        f"{upper(spoken_date(a, rng))}. {rng.choice(WEATHER)} {a.name} looked in and wanted "
        f"{spoken_goods(a, rng)}. I had only {b.goods}, but {a.first} would not have the "
        f"{b.items}. {end}"
    )


def answers(a: Scene, b: Scene, rng: random.Random) -> str:
    """Something happened; questions and their answers."""
    goods, date = spoken_goods(a, rng), spoken_date(a, rng)
    told = rng.choice((
        f"{a.name} bought {goods} in {a.city} on {date}.",
        f"On {date} {a.name} took {goods} to {a.city}.",
        f"In {a.city} lives {a.name}, who lost {goods} on {date}.",
        f"{upper(goods)} came from {a.city} on {date} for {a.name}.",
    ))  # fmt: skip
    facts = [
        rng.choice((("Who was it", a.name), ("What was the name", a.name))),
        rng.choice((("What was it", a.items), ("Which item", a.item))),
        rng.choice((("Where was it", a.city), ("Which city", a.city))),
        rng.choice((("When was it", a.date), ("What was the date", a.stamp))),
        rng.choice((("How many", NUMBERS[a.count - 1]), ("What was the quantity", str(a.count)))),
    ]
    rng.shuffle(facts)
    talk = [f'{question}? "{answer}," said {b.first}.' for question, answer in facts]
    return " ".join([told, *talk])


def parcel(a: Scene, b: Scene, rng: random.Random) -> str:
    """A parcel is packed, labelled and stamped."""
    goods, date = spoken_goods(a, rng), spoken_date(a, rng)
    lines = [
        f'On the label {b.first} wrote "{a.name}".',
        f'Below stood "{a.city}".',
        f'On each box was written "{a.item}".',
        f"In the corner stood the number {a.count}.",
        f"The postmark said {a.stamp}.",
    ]
    rng.shuffle(lines)
    start = rng.choice((
        f"{b.name} packed {goods} for {a.name} of {a.city} on {date}.",
        f"A parcel with {goods} left for {a.city} on {date}; it was for {a.name}.",
        f"On {date} {a.name} from {a.city} got {goods} by post.",
    ))  # fmt: skip
    return " ".join([start, *lines])


def mixed_up(a: Scene, b: Scene, rng: random.Random) -> str:
    """Two orders get mixed up, and are set right."""
    return (
        f"{a.name} waited for {a.goods}, and {b.name} waited for {b.goods}. The carter brought the "
        f"{a.items} to {b.first} and the {b.items} to {a.first}. {rng.choice(WEATHER)} "
        f"{a.first} {a.last} drove to {b.city} with the {b.items}, and {b.first} {b.last} came to "
        f"{a.city} with the {a.items}."
    )


def echo(a: Scene, b: Scene, rng: random.Random) -> str:
    """Two people who say everything twice."""
    said = [
        (a.goods, a.goods),
        (a.items, f"{a.item}"),
        (a.city, a.city),
        (a.name, a.name),
        (spoken_date(a, rng), a.date),
        (a.stamp, a.stamp),
        (str(a.count), NUMBERS[a.count - 1]),
    ]
    rng.shuffle(said)
    talk = " ".join(f'"{x}?" asked {b.first}. "{y}," said {a.first}.' for x, y in said[:4])
    return f"{a.name} met {b.name} at the gate. {rng.choice(WEATHER)} {talk}"


def shelf(a: Scene, b: Scene, rng: random.Random) -> str:
    """What stands on the shelves."""
    return (
        f"On the top shelf stood {spoken_goods(a, rng)} from {a.city}, below them "
        f"{spoken_goods(b, rng)} from {b.city}. {rng.choice(WEATHER)} The card on the top shelf "
        f'said "{a.item}" and {a.count}, the card below said "{b.item}" and {b.count}. '
        f"{a.first} dusted each {a.item}, {b.first} dusted each {b.item}."
    )


def roll_call(a: Scene, b: Scene, rng: random.Random) -> str:
    """A list is read aloud and repeated."""
    scenes = [a, b, *(draw(rng, reserved=False) for _ in range(rng.randint(0, 3)))]
    lists = (
        ("names", [s.name for s in scenes]),
        ("goods", [s.item for s in scenes]),
        ("orders", [f"{spoken_goods(s, rng)} to {s.city}" for s in scenes]),
        ("people", [f"{s.name} of {s.city}" for s in scenes]),
        ("dates", [f"{s.date} for {s.first}" for s in scenes]),
    )
    what, entries = rng.choice(lists)
    if rng.random() < 0.5:
        entries = [f'"{entry}"' for entry in entries]
    line = ", ".join(entries)
    if rng.random() < 0.5:
        rng.shuffle(entries)
    return (
        f"{a.first} read the {what} from the book: {line}. {rng.choice(WEATHER)} "
        f'"Once more," said {b.first}, and {a.first} read: {", ".join(entries)}.'
    )


def song(a: Scene, b: Scene, rng: random.Random) -> str:
    """A song with a refrain."""
    line = rng.choice((
        f"{a.goods} for {a.name}",
        f"{a.name} went to {a.city}",
        f"{a.item} and {b.item}",
        f"{a.name} loves {b.name}",
        f"{a.city} is far from {b.city}",
    ))  # fmt: skip
    middle = rng.choice((f"and all the way to {a.city}", f"on the {ordinal(a.day)} of May"))
    return (
        f'{b.name} sang: "{line}, {line}, {middle}, {line}." {rng.choice(WEATHER)} '
        f'And {a.name} sang: "{line}, {line}, {middle}, {line}."'
    )


def order_book(a: Scene, b: Scene, rng: random.Random) -> str:
    """An order comes in, and some of it is written into the columns of the order book."""
    goods, date = spoken_goods(a, rng), spoken_date(a, rng)
    told = rng.choice((
        f"{a.name} came for {goods} and wanted them in {a.city} on {date}.",
        f"On {date} {goods} must be in {a.city}, where {a.name} lives.",
        f'"Send {goods} to {a.city}," wrote {a.name} on {date}.',
    ))  # fmt: skip
    columns = [
        ("name", a.name),
        ("item", a.item),
        ("quantity", str(a.count)),
        ("city", a.city),
        ("date", a.stamp),
    ]
    picked = rng.sample(columns, rng.randint(2, 4))
    heads = " and ".join(f'"{head}"' for head, _ in picked)
    rng.shuffle(picked)
    wrote = ", ".join(f'under "{head}" stands "{value}"' for head, value in picked)
    return f"{told} The book of {b.name} has columns for {heads}: {wrote}."


def typewriter(a: Scene, b: Scene, rng: random.Random) -> str:
    """Someone tries every key of a typewriter: so that no sign is new to who reads it."""
    keys = string.ascii_letters + string.digits + string.punctuation
    one, two = ("".join(rng.choices(keys, k=rng.randint(3, 8))) for _ in range(2))
    return (
        f"{a.name} tried the typewriter and typed {one} and {two}. "
        f'"What is {one}?" asked {b.first}. '
        f'"{one} is what I typed, and then {two}," said {a.first}. '
        f"{rng.choice(WEATHER)} So {b.first} typed {two} and {one} too."
    )


TEXTS = (
    *(visit, letter, diary, answers, answers, answers, parcel, parcel, parcel),
    *(mixed_up, echo, shelf, roll_call, roll_call, song, song),
    *(order_book, order_book, typewriter),
)


def corpus(num_texts: int, seed: int) -> Iterable[dict[str, str]]:
    """Prose about free pairs only."""
    rng = random.Random(f"corpus {seed}")
    for _ in range(num_texts):
        a, b = draw(rng, reserved=False), draw(rng, reserved=False)
        yield {"text": rng.choice(TEXTS)(a, b, rng)}


# ---- the instruction rows


def note(scene: Scene, rng: random.Random) -> dict[str, str]:
    """One row: an order as someone would write it, and the same as a record."""
    has_city, has_date = rng.random() > 0.1, rng.random() > 0.1
    city = f" {scene.city}" if has_city else ""
    date = f" {spoken_date(scene, rng)}" if has_date else ""
    goods = spoken_goods(scene, rng)
    text = rng.choice(NOTES).format(
        name=scene.name,
        goods=goods,
        Goods=upper(goods),
        them=scene.them,
        to=city and f" to{city}",
        at=city and f" in{city}",
        of=city and f" from{city}",
        by=date and rng.choice((" for", " by", " on")) + date,
    )
    record = {
        "name": scene.name,
        "item": scene.item,
        "quantity": scene.count,
        "city": scene.city if has_city else "none",
        "date": scene.stamp if has_date else "none",
    }
    answer = "; ".join(f"{field}: {value}" for field, value in record.items())
    return {"instruction": INSTRUCTION, "input": text, "output": answer}


def notes(num_rows: int, seed: int, *, reserved: bool) -> list[dict[str, str]]:
    """Rows that all differ in their input."""
    rng = random.Random(f"notes {seed} {reserved}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < num_rows:
        row = note(draw(rng, reserved=reserved), rng)
        rows[row["input"]] = row
    return list(rows.values())


def preference(row: dict[str, str]) -> dict[str, str] | None:
    """The row as a pair, if its record has gaps: one that leaves them out is better than one that
    writes ``none``."""
    fields = row["output"].split("; ")
    known = [field for field in fields if not field.endswith(": none")]
    if len(known) == len(fields):
        return None
    better = "; ".join(known)
    return {
        "instruction": row["instruction"],
        "input": row["input"],
        "chosen": better,
        "rejected": row["output"],
    }


def preferences(num_rows: int, seed: int, *, reserved: bool) -> list[dict[str, str]]:
    """Pairs about other orders, which do not say everything."""
    pairs = map(preference, notes(8 * num_rows, seed + 1_000_000, reserved=reserved))
    return [pair for pair in pairs if pair is not None][:num_rows]


def marked(pairs: list[dict[str, str]]) -> list[dict[str, object]]:
    """One answer of each pair, the better and the worse one in turn, and whether it is good."""
    found: list[dict[str, object]] = []
    for number, pair in enumerate(pairs):
        is_good = number % 2 == 0
        question = {name: pair[name] for name in ("instruction", "input")}
        answer = pair["chosen" if is_good else "rejected"]
        found.append({**question, "output": answer, "is_good": is_good})
    return found


# ---- files


def word_pairs(text: str) -> set[tuple[str, str]]:
    """All pairs of neighbouring words, in lower case."""
    return set(pairwise(re.findall(r"[a-z]+", text.lower())))


def reserved_pairs() -> set[tuple[str, str]]:
    """Every full name and every kind of goods, one or many, that only held-out notes may have."""
    names = [(a, b) for i, a in enumerate(FIRST) for j, b in enumerate(LAST) if is_reserved(i, j)]
    for i, kind in enumerate(KINDS):
        for j, (one, many) in enumerate(GOODS.items()):
            names += [(kind, one), (kind, many)] if is_reserved(i, j) else []
    return {(left.lower(), right.lower()) for left, right in names}


def check_nothing_leaks(seen: Iterable[str], held_out: list[dict[str, str]]) -> None:
    """Stop if a reserved pair stands in a text to learn from, or a held-out note lacks one."""
    reserved = reserved_pairs()
    for text in seen:
        leaked = word_pairs(text) & reserved
        if leaked:
            raise SystemExit(f"held-out words {sorted(leaked)} in: {text}")
    for row in held_out:
        if len(word_pairs(row["input"]) & reserved) < 2:
            raise SystemExit(f"held-out note without a new name and new goods: {row['input']}")


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> None:
    """Write the corpus, and the rows to learn and those held out of both kinds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--texts", type=int, default=100_000, help="texts in the corpus")
    parser.add_argument("--rows", type=int, default=3000, help="rows to fine-tune on")
    parser.add_argument("--held-out", type=int, default=200, help="rows to evaluate on")
    parser.add_argument("--pairs", type=int, default=600, help="pairs to learn a preference from")
    parser.add_argument("--held-out-pairs", type=int, default=100, help="pairs to evaluate on")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    texts = list(corpus(arguments.texts, arguments.seed))
    train = notes(arguments.rows, arguments.seed, reserved=False)
    held_out = notes(arguments.held_out, arguments.seed, reserved=True)
    pairs = preferences(arguments.pairs, arguments.seed, reserved=False)
    held_out_pairs = preferences(arguments.held_out_pairs, arguments.seed, reserved=True)
    seen = [*(t["text"] for t in texts), *(r["input"] for r in (*train, *pairs))]
    check_nothing_leaks(seen, [*held_out, *held_out_pairs])
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_rows(arguments.out / "corpus.jsonl", texts)
    write_rows(arguments.out / "orders_train.jsonl", train)
    write_rows(arguments.out / "orders_held_out.jsonl", held_out)
    write_rows(arguments.out / "pairs_train.jsonl", pairs)
    write_rows(arguments.out / "pairs_held_out.jsonl", held_out_pairs)
    write_rows(arguments.out / "marked_train.jsonl", marked(pairs))
    write_rows(arguments.out / "marked_held_out.jsonl", marked(held_out_pairs))


if __name__ == "__main__":
    main()
