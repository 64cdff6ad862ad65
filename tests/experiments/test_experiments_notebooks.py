"""A result as notebooks show it."""

import re
from html.parser import HTMLParser

from hand_made import BEST, result

from espalier.search.result import Candidate, ScoredStep

OTHER = Candidate(5, "<script>alert(1)</script>", 0.25, 3, (ScoredStep("x", 0.25),))


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)
        assert self.open == [], "every element ends"

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def words(text: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


def test_a_result_shows_its_answer_its_votes_and_what_the_tree_cost():
    shown = result(candidates=(BEST, OTHER), warnings=("a & b",))._repr_html_()
    assert Tags(shown).seen == {"div", "b", "table", "tr", "th", "td", "small"}
    text = words(shown)
    assert text.startswith("48 &ensp; score 0.8, finished, beam")
    assert "warning: a &amp; b" in text
    assert "answer paths best score &lt;script&gt;alert(1)&lt;/script&gt; 3 0.25 48 1 0.8" in text
    assert f"{len(result().nodes) - 1} in the tree, 2 deep" in text
    assert "1.50 s" in text


def test_a_search_without_an_answer_or_a_tree_says_so():
    shown = result(answer="", score=None, best=None, candidates=(), nodes=(), error="the disk is <full>")._repr_html_()
    assert Tags(shown).seen == {"div", "b", "small"}
    assert words(shown).startswith("no answer &ensp; finished, beam error: the disk is &lt;full&gt;")
    assert "in the tree" not in shown
