"""The page's files as they are: what they refer to, what they allow, and what they may not do."""

import base64
import hashlib
import html
import json
import re
from dataclasses import fields
from html.parser import HTMLParser

import pytest
from page_server import data_of, recorded
from page_traces import trace

from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.result import Candidate, CandidateDone, Finished, NodeRecord, SearchResult, Started, StepDone
from espalier.search.schema import declared
from espalier.search.service.page.files import CONTENT_SECURITY_POLICY, page_files, standalone_page
from espalier.search.trace import SCHEMA, VERSION

FILES = page_files()
INDEX = FILES["/"].content.decode()


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.cdata_elem in ("script", "style"):
            self.blocks.append((self.found[-1][1], data))


def test_the_server_is_given_each_file_with_its_type():
    types = {path.rpartition(".")[2]: file.media_type for path, file in FILES.items()}
    assert types == {
        "/": "text/html; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
    }


def test_all_that_the_page_refers_to_is_there_and_of_its_own_origin():
    named = {a.get("src") or a.get("href") for tag, a in Elements(INDEX).found if tag in ("script", "link", "img")}
    named.discard("data:,")
    scripts = {path: file.content.decode() for path, file in FILES.items() if path.endswith(".js")}
    for text in scripts.values():
        named |= set(re.findall(r'from "\./([\w.]+)"', text))
    assert {f"/{name}" for name in named} == set(FILES) - {"/"}


@pytest.mark.parametrize("path", FILES)
def test_no_file_needs_more_than_the_policy_allows(path):
    text = FILES[path].content.decode()
    for tag, attributes in Elements(text).found if path == "/" else []:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(\"style"
    assert not re.search(ways, text)
    assert not re.search(r"https?://(?!www\.w3\.org/(?:2000/svg|1998/Math/MathML)|html\.spec\.whatwg\.org)", text)
    assert "unsafe" not in CONTENT_SECURITY_POLICY


def test_the_form_offers_every_algorithm_and_the_ranges_of_the_request():
    body = INDEX[INDEX.index('name="algorithm"') :]
    offered = re.findall(r"<option.*?>([\w-]+)</option>", body[: body.index("</select>")])
    assert sorted(offered) == sorted(AlgorithmName)
    inputs = {a["name"]: a for tag, a in Elements(INDEX).found if tag == "input" and "name" in a}
    known = {field.name: field for field in declared(SearchRequest) if field.name in inputs}
    assert inputs.keys() == known.keys()
    for name, field in known.items():
        ends = [field.kind(inputs[name][end]) for end in ("min", "max")]
        assert [field.violation(value) for value in ends] == [None, None]
        assert field.default == (field.kind(inputs[name]["value"]) if "value" in inputs[name] else None)


def test_the_examples_are_problems():
    body = INDEX[INDEX.index('id="example"') : INDEX.index("</select>")]
    problems = re.findall(r"<option>(.*?)</option>", body)
    assert len(problems) > 1
    for problem in problems:
        SearchRequest(html.unescape(problem)).validate()


def test_the_default_algorithm_is_chosen_on_the_page():
    assert re.findall(r"<option[^>]* selected>([\w-]+)</option>", INDEX) == ["beam"]


@pytest.mark.parametrize("page", [INDEX, standalone_page([])], ids=["served", "of traces"])
def test_numbers_that_an_algorithm_does_not_use_are_known_to_the_page(page: str):
    """N or M of which a change makes no other request."""
    uses = {name: used for used, name in re.findall(r'<option data-uses="(\w*)"[^>]*>([\w-]+)</option>', page)}
    for algorithm in AlgorithmName:
        request = SearchRequest("x", algorithm, 2, 3)
        width, children = SearchRequest("x", algorithm, 4, 3), SearchRequest("x", algorithm, 2, 5)
        changed = {"N": width, "M": children}
        used = "".join(name for name, other in changed.items() if other.candidates != request.candidates)
        if algorithm is AlgorithmName.ADAPTIVE:
            used = "NM"  # N at most, M at a time
        assert uses[algorithm] == used, algorithm


# ---- the contract of events and traces


@pytest.mark.parametrize("name", ["beam", "best-of-n"])
def test_the_recorded_events_have_the_fields_of_the_dataclasses(name):
    kinds = {"started": Started, "step": StepDone, "candidate": CandidateDone, "result": Finished}
    for event in recorded(name):
        kind, data = kinds[event.partition("\n")[0].removeprefix("event: ")], data_of(event)
        assert data.keys() == {field.name for field in fields(kind)}
        for node in data.get("nodes", []):
            assert node.keys() == {field.name for field in fields(NodeRecord)}
        if kind is Finished:
            assert data["result"].keys() == {field.name for field in fields(SearchResult)} - {"sampled"}
        if kind is CandidateDone:
            assert data["candidate"].keys() == {field.name for field in fields(Candidate)}


def test_the_recorded_traces_are_of_the_version_that_the_page_reads():
    assert trace("beam")["version"] == VERSION
    reads = f'trace.schema !== "{SCHEMA}" || trace.version !== {VERSION}'
    assert reads in FILES["/main.js"].content.decode()


# ---- the self-contained file

HOSTILE = "</script><script>alert(1)</script><!-- <script> ]]> & &amp; \u2028 \u00e9 \U0001f333 \x00 '\""


def block_of(page: str, **wanted: str) -> str:
    (text,) = [text for attributes, text in Elements(page).blocks if wanted.items() <= attributes.items()]
    return text


def test_the_file_holds_its_traces_unchanged_whatever_they_say():
    hostile = trace("beam")
    for node in hostile["nodes"]:
        node["text"] = HOSTILE
    hostile[HOSTILE] = HOSTILE
    page = standalone_page([hostile, trace("best-of-n")])
    assert json.loads(block_of(page, id="traces")) == [hostile, trace("best-of-n")]
    tags = [tag for tag, _ in Elements(page).found]
    assert tags == [tag for tag, _ in Elements(standalone_page([trace("beam")])).found]


def test_the_policy_of_the_file_names_its_blocks_and_nothing_else():
    page = standalone_page([trace("beam")])
    (policy,) = [a["content"] for tag, a in Elements(page).found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = {name: rule for name, _, rule in (rule.strip().partition(" ") for rule in policy.split(";"))}
    assert rules["default-src"] == "'none'"
    style = page[page.index("<style>") + len("<style>") : page.index("</style>")]
    for name, block in (("script-src", block_of(page, type="module")), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert "connect-src" not in rules
    assert page.index("Content-Security-Policy") < page.index("<style>"), "what comes before it is not bound by it"


def test_the_file_needs_no_other():
    page = standalone_page([trace("beam")])
    assert not [
        a for tag, a in Elements(page).found if (tag == "link" and a.get("rel") == "stylesheet") or a.get("src")
    ]
    assert not re.search(r"^(import|export)\b", block_of(page, type="module"), re.MULTILINE)


def test_a_number_that_json_has_no_word_for_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        standalone_page([trace("beam") | {"score": float("nan")}])
