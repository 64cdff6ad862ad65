"""The words of the task: who or what holds a quantity, and the sentences that raise or lower it.

`{n}` is the operand. `{who}` is the holder's name or pronoun, `{items}` the plural noun.
"""

from dataclasses import dataclass

HE = ("Tom", "Ben", "Sam", "Leo", "Max", "Omar", "Ivan", "Hugo", "Kofi", "Raj", "Finn", "Luis")
SHE = ("Anna", "Mia", "Zoe", "Lucy", "Nina", "Sara", "Emma", "Ada", "Mei", "Rosa", "Lena", "Ines")
ITEMS = (
    "coins", "shells", "stamps", "marbles", "stickers", "beads", "cards", "stones", "pencils", "apples",
    "buttons", "books", "photos", "badges", "tickets", "eggs", "plums", "nuts", "keys", "pins",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Theme:
    """Sentence templates of one kind of story.

    Attributes:
        subject: The benchmark record's subject.
        openings: State the initial quantity.
        gains: Raise the quantity by `{n}`.
        losses: Lower the quantity by `{n}`.
        questions: Ask for the final quantity.
        holders: Fixed holders, or empty when the holder is a named person.
        items: The nouns counted.
    """

    subject: str
    openings: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    questions: tuple[str, ...]
    holders: tuple[str, ...] = ()
    items: tuple[str, ...] = ITEMS


THEMES = (
    Theme(
        subject="Collections",
        openings=("{name} starts with {n} {items}.", "{name} has {n} {items}.", "At first {name} has {n} {items}."),
        gains=(
            "{who} finds {n} more.", "{who} gets {n} more.", "{who} buys {n}.", "{who} wins {n}.",
            "Then {who} finds {n}.", "A friend gives {name} {n} more.", "Next {who} adds {n}.", "{who} picks up {n}.",
        ),
        losses=(
            "{who} gives away {n}.", "{who} loses {n}.", "{who} sells {n}.", "{who} drops {n}.",
            "Then {who} loses {n}.", "A friend takes {n}.", "Next {who} sells {n}.", "{who} throws away {n}.",
        ),
        questions=("How many {items} does {name} have now?", "How many {items} does {name} have in the end?"),
    ),
    Theme(
        subject="Transport",
        openings=("{name} leaves with {n} {items}.", "{name} carries {n} {items}."),
        gains=("{n} get on.", "{n} more get on.", "Then {n} get on.", "At the next stop {n} get on."),
        losses=("{n} get off.", "Then {n} get off.", "At the next stop {n} get off.", "{n} of them leave."),
        questions=("How many {items} are on board now?", "How many {items} are left on board?"),
        holders=("A bus", "A train", "A ship", "A tram", "A ferry"),
        items=("people", "passengers", "travelers"),
    ),
    Theme(
        subject="Stock",
        openings=("{name} opens with {n} {items}.", "{name} has {n} {items} in stock."),
        gains=("It buys {n}.", "It gets {n} more.", "A truck brings {n}.", "Then {n} come back.", "It makes {n} more."),
        losses=("It sells {n}.", "It sends out {n}.", "A customer takes {n}.", "Then {n} are sold.", "It loses {n}."),
        questions=("How many {items} are in stock now?", "How many {items} does it have now?"),
        holders=("A shop", "A market", "A store", "A farm", "A kiosk"),
    ),
    Theme(
        subject="Measures",
        openings=("{name} holds {n} {items}.", "At first {name} holds {n} {items}."),
        gains=("Rain adds {n}.", "A pump adds {n}.", "Someone pours in {n}.", "Then {n} flow in."),
        losses=("A leak drains {n}.", "Someone takes out {n}.", "Then {n} flow out.", "The garden needs {n}."),
        questions=("How many {items} does it hold now?", "How many {items} are left?"),
        holders=("A tank", "A pool", "A barrel", "A well"),
        items=("liters", "gallons", "buckets of water"),
    ),
)  # fmt: skip
