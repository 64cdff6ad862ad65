"""Texts to score, and driving a verifier by hand over them."""

from engine_driver import drain

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.work import Scored
from espalier.prm.base import Verdict
from espalier.prm.generative import GenerativeVerification
from espalier.prm.verifier import Verification, Verifier

PROBLEM = "Tom starts with 38 coins. He finds 47 more.\nHow many has he?"
STEPS = {
    "one step": ["38+47=85\n\n"],
    "two steps": ["38+47=85\n\n", "\\boxed{85}"],
    "eight steps": [f"## Step {i}: add\n{i}+{i}={2 * i}\n\n" for i in range(1, 9)],
    "an empty line inside": ["First\n\n\nthen 3\n\n", "So\n \nthe answer\n\n"],
    "trailing and leading newlines": ["\n\nFirst\n\n\n\n", "Second", "Third\n"],
    "unicode": ["Größe: 3·4 = 12 ≈ 𝟙𝟚\n\n", "日本語のステップ 🪙\n\n"],
    "latex": ["\\[ \\frac{1}{2} \\cdot \\sqrt{x} = 3 \\]\n\n", "$$\\boxed{\\frac{3}{4}}$$\n\n"],
    "spaces around": ["  a step \n\n", "\tanother\t\n\n"],
    "punctuation before the delimiter": ["It is 85.\n\n", "Is it?\n\n", "So $85$.\n\n\n"],
    "a cyrillic tag inside": ["The word ки is a word ки here\n\n", "the next\n\n"],
}


def begin(engine: Engine, verifier: Verifier, problem: str = PROBLEM) -> Verification | GenerativeVerification:
    """The verification of the problem, its root computed."""
    verification = verifier.begin("me", problem, verifier.prompt_ids(problem))
    verification.prefill()
    (done,) = drain(engine)
    assert isinstance(done, Scored)
    assert verification.take(done) == Verdict(verification.root, None)
    return verification


def settle(engine: Engine, verification: Verification | GenerativeVerification) -> dict[KVSequence, float]:
    """Run until every step that is being scored has its score."""
    scores: dict[KVSequence, float] = {}
    while engine.busy:
        for done in engine.step():
            if (verdict := verification.take(done)) is not None:
                assert verdict.score is not None
                scores[verdict.sequence] = verdict.score
        engine.check_integrity()
    return scores


def score_step(
    engine: Engine,
    verification: Verification | GenerativeVerification,
    parent: KVSequence,
    *steps: str,
    in_place: bool = False,
    before: float | None = None,
) -> tuple[float, KVSequence]:
    """Score the newest of `steps` and nothing else."""
    scoring = verification.score(parent, steps, 10_000, in_place, before)
    assert scoring is not None
    ((sequence, score),) = settle(engine, verification).items()
    assert sequence is scoring.sequence
    return score, sequence


def score_path(
    engine: Engine, verification: Verification | GenerativeVerification, steps: list[str], in_place: bool = False
) -> list[float]:
    """Score all steps of a path one after the other; its sequences are released."""
    scores: list[float] = []
    path = [verification.root]
    for end in range(1, len(steps) + 1):
        before = scores[-1] if scores else None
        score, sequence = score_step(engine, verification, path[-1], *steps[:end], in_place=in_place, before=before)
        scores.append(score)
        path.append(sequence)
    for sequence in dict.fromkeys(path):
        if not sequence.released:
            engine.release(sequence)
    return scores
