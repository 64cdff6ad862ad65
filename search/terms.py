"""On what terms a search runs, beside what it asks for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Terms:
    """What whoever submits a search says of it; nothing here changes its result.

    Attributes:
        priority: searches of a larger one start first, take the place and memory of those of a smaller one where there
            is no other, and keep theirs where others must give theirs up.
        salt: prompts computed for one search are reused for another only under the same salt: give callers that must
            not learn of each other, by how fast an answer comes, different ones.
        waited: seconds it waited before it was submitted; its time in the queue and its time limit count them.
        timed_from_start: whether its time limit counts from when it leaves the queue, and not from when it came: for
            many that are submitted at once and that nobody waits for one by one.
    """

    priority: int = 0
    salt: bytes = b""
    waited: float = 0.0
    timed_from_start: bool = False


USUAL = Terms()
