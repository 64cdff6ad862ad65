"""What the commands that fill run folders have in common."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from espalier.search.algorithms import needs_verifier
from espalier.search.request import SearchRequest

if TYPE_CHECKING:
    from espalier.experiments.evaluation.sample import Sample

EXIT_FAILED = 1
EXIT_PARTIAL = 3
"""Something was not searched, such as problems that exceed a context."""
EXIT_INTERRUPTED = 130


def both(one: Callable[["Sample"], None], other: Callable[["Sample"], None]) -> Callable[["Sample"], None]:
    """Calls one function, then the other."""

    def call(sample: "Sample") -> None:
        one(sample)
        other(sample)

    return call


def say_what_was_verified(fresh: "list[Sample]", searches: int, verifier: str) -> None:
    """Report how many searches `--verify-incremental` did not check, such as those of an earlier command."""
    verified = sum(not sample.refused for sample in fresh) if verifier else 0
    if verified < searches:
        why = "the other samples are of an earlier command, or refused; name another --out to search them again"
        why = why if verifier else "this search reads no scores"
        what = f"{verified} of {searches} searches" if verified else f"nothing, of {searches} searches"
        print(f"--verify-incremental verified {what}: {why}", file=sys.stderr)


@contextmanager
def kept_on_interrupt(folder: Path | None) -> Iterator[None]:
    """On Ctrl-C, print where finished work is stored."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"what was finished is in {folder}; the same command resumes" if folder else "nothing was kept"
        print(f"interrupted: {kept}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def verifier_for(request: SearchRequest, verifier: str) -> str:
    """The verifier to load: none for a search that uses no scores."""
    return verifier if needs_verifier(request) else ""
