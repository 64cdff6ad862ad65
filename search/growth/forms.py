"""Forms: what an answer, or a whole text, may be. A path that cannot go on within its form ends with an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.engine.guidance.matcher import Matcher
from espalier.engine.work import Generated, StopCause
from espalier.search.growth.policies import Branch, Draft, Expansion, PathPolicy

if TYPE_CHECKING:
    from espalier.search.growth.thoughts import PathThoughts


class PathForms(PathPolicy):
    """Binds the answers of paths by a matcher; thoughts are free."""

    def __init__(self, answer: Matcher, thoughts: PathThoughts | None) -> None:
        """Bind every path by `answer`, a matcher at its beginning."""
        self._answer = answer
        self._thoughts = thoughts
        self._failures: dict[str, int] = {}  # paths that ended with an error, by its text

    def shape(self, expansion: Expansion, draft: Draft) -> None:
        """See `PathPolicy`."""
        branch = expansion.branch
        if self._thoughts and self._thoughts.position(branch.node).inside:
            return
        draft.matcher = branch.matcher
        if draft.matcher is None:
            draft.matcher = self._thoughts.matcher(self._answer, branch.node) if self._thoughts else self._answer

    def sampled(self, branch: Branch, done: Generated) -> None:
        """See `PathPolicy`."""
        if done.cause is StopCause.ERROR and done.matcher:
            self._failures[done.matcher.error] = self._failures.get(done.matcher.error, 0) + len(done.indices)

    @property
    def warnings(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of paths that ended with an error."""
        return tuple(f"{count} paths ended with an error: {error}." for error, count in self._failures.items())
