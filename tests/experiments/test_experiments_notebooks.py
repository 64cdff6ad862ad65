"""A result as notebooks show it."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from hand_made import BEST, LONG, NODES, node, result

from espalier.search.result import Candidate, ScoredStep

FOLDED = {"details", "summary", "pre"}
LINE = LONG.strip()[:87] + "…  (length)"
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


def test_a_result_shows_its_answer_its_text_its_votes_its_tree_and_what_that_cost():
    shown = result(candidates=(BEST, OTHER), warnings=("a & b",))._repr_html_()
    assert Tags(shown).seen == {*FOLDED, "div", "b", "table", "tr", "th", "td", "small"}
    text = words(shown)
    assert text.startswith("48 &ensp; score 0.8, finished, beam")
    assert "warning: a &amp; b" in text
    assert "answer paths best score &lt;script&gt;alert(1)&lt;/script&gt; 3 0.25 48 1 0.8" in text
    assert f"{len(result().nodes) - 1} in the tree, 2 deep" in text
    assert "1.50 s" in text
    assert '<div style="white-space: pre-wrap; margin: .5em 0">47+25=72\n\n72-24=48\n\n\\boxed{48}</div>' in shown
    shown = result()._repr_html_()
    tree = shown[shown.index("<pre>") + 5 : shown.index("</pre>")].split("\n")
    assert tree[:3] == [
        "<b>└ 0.912  47+25=72 ×3</b>",
        "<b>  └ 0.800  72-24=48 \\boxed{48}  → 48</b>",
        "  └ 0.950  " + LINE,
    ]
    assert tree[-1] == "└ 0.200  47+25=73  (pruned)"
    assert len(tree) == len([node for node in NODES if node.depth and node.termination != "duplicate"])


def test_a_thought_is_folded_and_a_large_tree_cut_but_for_the_selected_path():
    best = replace(BEST, steps=(ScoredStep("so <so> 48", 0.9, 10), *BEST.steps))
    many = (*NODES[:4], *(node(100 + i, 0, 1, f"{i}", 0.5) for i in range(400)), replace(NODES[4], node_id=999))
    shown = result(best=replace(best, node_id=999), nodes=many)._repr_html_()
    Tags(shown)
    assert "<summary>thought</summary>" in shown
    assert "so &lt;so&gt; 48" in shown
    assert shown.count("\n", shown.index("<pre>")) == 199
    assert "<b>└ 0.800  72-24=48" in shown
    assert f"… and {len(many) - 1 - 200} more steps</pre>" in shown
    assert result(best=None, answer="", candidates=())._repr_html_().count("<pre>") == 1


def test_a_search_without_an_answer_or_a_tree_says_so():
    shown = result(answer="", score=None, best=None, candidates=(), nodes=(), error="the disk is <full>")._repr_html_()
    assert Tags(shown).seen == {"div", "b", "small"}
    assert words(shown).startswith("no answer &ensp; finished, beam error: the disk is &lt;full&gt;")
    assert "in the tree" not in shown
