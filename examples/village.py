"""The village of the demo: its people, goods and cities, and how its folk speak of them."""

from __future__ import annotations

import random
from dataclasses import dataclass


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


FIRST = words("""
    Ada Anna Ben Bruno Clara Daria Edith Emil Felix Flora Greta Hanna Hugo Ida Ivan Jakob Jonas
    Julia Karl Lena Leo Lina Marek Maria Marta Mila Nina Noah Olga Oskar Paula Pavel Rosa Ruben
    Selma Simon Sonja Tomas Vera Viktor
""")
LAST = words("""
    Adler Baker Becker Berg Brandt Carver Costa Dahl Ferrari Fischer Garcia Hale Hansen Horvat
    Ivanova Jensen Keller Kovac Larsen Lindgren Marino Mason Meyer Moreau Nagy Novak Olsen
    Petrova Porter Rivera Rossi Silva Smith Sokolov Tanner Thorne Vargas Walker Weber Winter
""")
CITIES = words("""
    Athens Basel Bergen Berlin Bremen Cardiff Dublin Geneva Genoa Ghent Graz Hamburg Helsinki
    Krakow Lisbon London Lyon Madrid Malmo Milan Munich Naples Nice Oslo Paris Porto Prague Riga
    Rome Seville Split Turin Venice Vienna Warsaw Zurich
""")
KINDS = words("""
    blue brass clay copper cotton glass golden green grey iron leather linen oak paper pine red
    round silk silver small steel white wooden woollen
""")
NOUNS = words("""
    apron basket bell blanket bottle bowl broom bucket button candle carpet chair clock comb cup
    curtain drum hammer hat jar jug kettle key lamp mirror pillow plate ribbon ring spoon stool
    table toy tray vase wheel whistle glove
""")
GOODS = {noun: noun + "s" for noun in NOUNS} | {  # one: many
    "box": "boxes",
    "brush": "brushes",
    "dish": "dishes",
    "knife": "knives",
    "scarf": "scarves",
    "shelf": "shelves",
    "torch": "torches",
    "watch": "watches",
    "diary": "diaries",
}
NUMBERS = words("""
    one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty
""")
MONTHS = words("""
    January February March April May June July August September October November December
""")
DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
WEATHER = """The wind was cold.|Rain fell all morning.|The sun was warm.|Snow lay on the roofs.
It was a quiet day.|The church bells rang.|The cat slept by the stove.|The road was full of mud.
The river was high.|The baker sang in the street.|Two carts stood at the gate.|The tea was hot.
The children played in the square.|A dog barked at the postman.|The lamps were lit early.
Fog hung over the fields.|The old bill was null and void.""".replace("\n", "|").split("|")


@dataclass(frozen=True)
class Scene:
    """Who wants how many of what, where and when: what a text is about."""

    first: str
    last: str
    kind: str
    noun: str
    count: int
    city: str
    day: int
    month: int  # from 1

    @property
    def name(self) -> str:
        """First and last name."""
        return f"{self.first} {self.last}"

    @property
    def item(self) -> str:
        """One of the goods: ``brass lamp``."""
        return f"{self.kind} {self.noun}"

    @property
    def items(self) -> str:
        """The goods, in the number that fits the count: ``brass lamps``."""
        return self.item if self.count == 1 else f"{self.kind} {GOODS[self.noun]}"

    @property
    def goods(self) -> str:
        """Count in a word, and goods: ``three brass lamps``."""
        return f"{NUMBERS[self.count - 1]} {self.items}"

    @property
    def date(self) -> str:
        """``5 March``."""
        return f"{self.day} {MONTHS[self.month - 1]}"

    @property
    def stamp(self) -> str:
        """``03-05``."""
        return f"{self.month:02}-{self.day:02}"

    @property
    def them(self) -> str:
        """The pronoun for the goods."""
        return "it" if self.count == 1 else "them"


def is_reserved(left: int, right: int) -> bool:
    """Whether this pair of words (by place in their lists) occurs in held-out notes only.

    Every word is in reserved and in free pairs, so that each is known while the pair is new.
    """
    return (left + 3 * right) % 8 == 0


def draw(rng: random.Random, *, reserved: bool) -> Scene:
    """A scene whose full name and goods are both reserved, or both free."""
    nouns = list(GOODS)

    def pair(lefts: list[str], rights: list[str]) -> tuple[str, str]:
        while True:
            left, right = rng.randrange(len(lefts)), rng.randrange(len(rights))
            if is_reserved(left, right) == reserved:
                return lefts[left], rights[right]

    first, last = pair(FIRST, LAST)
    kind, noun = pair(KINDS, nouns)
    month = rng.randint(1, 12)
    return Scene(
        first=first,
        last=last,
        kind=kind,
        noun=noun,
        count=rng.randint(1, 20),
        city=rng.choice(CITIES),
        day=rng.randint(1, DAYS[month - 1]),
        month=month,
    )


def upper(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[0].upper() + text[1:]


def ordinal(day: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th`` ..."""
    ending = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


def spoken_date(scene: Scene, rng: random.Random) -> str:
    """The date in one of the ways people write it."""
    month = MONTHS[scene.month - 1]
    ways = (f"{scene.day} {month}", f"{month} {scene.day}", f"the {ordinal(scene.day)} of {month}")
    return rng.choice((*ways, f"{ordinal(scene.day)} {month}"))


def spoken_goods(scene: Scene, rng: random.Random) -> str:
    """Count and goods in one of the ways people write them."""
    ways = [NUMBERS[scene.count - 1], str(scene.count)]
    if scene.count == 1:
        ways = ["one", "an" if scene.kind[0] in "aeiou" else "a"]
    ways += {2: ["a pair of"], 12: ["a dozen"]}.get(scene.count, [])
    return f"{rng.choice(ways)} {scene.items}"
