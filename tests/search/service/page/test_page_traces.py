"""The page with traces in it, as `espalier view` writes it, in a browser."""

import re
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from page_driver import Keys
from page_traces import trace, wide_trace

from espalier.search.conversation import ToolCall
from espalier.search.service.page.files import standalone_page
from espalier.search.tools.declared import answer_of_calls

pytestmark = pytest.mark.browser

COMPLETE = ("eos", "boxed")


def known_at(recorded: dict[str, Any], rounds: int) -> set[int]:
    """Nodes that are drawn once this many rounds of a trace are over."""
    count = recorded["rounds"][rounds - 1]["moments"][-1]["nodes"] if rounds else 1
    return {node["node_id"] for node in recorded["nodes"][:count] if node["termination"] != "duplicate"}


def ids_by_path(recorded: dict[str, Any]) -> dict[tuple[int, ...], int]:
    return {tuple(node["path"]): node["node_id"] for node in recorded["nodes"]}


def lineage(recorded: dict[str, Any], node_id: int) -> list[int]:
    path = []
    while node_id:
        path.append(node_id)
        node_id = recorded["nodes"][node_id]["parent_id"]
    return path[::-1]


@pytest.mark.parametrize("name", ["beam", "best-of-n"])
def test_it_opens_from_disk_with_the_whole_tree_and_the_answer(open_traces, name):
    recorded = trace(name)
    page = open_traces(recorded)
    assert page.steps() == known_at(recorded, len(recorded["rounds"]))
    assert page.text(".outcome strong") == recorded["answer"]
    assert page.text("#problem") == recorded["configuration"]["problem"]
    assert f"{recorded['usage']['generated_tokens']:,} tokens" in page.text(".usage")
    shown = Counter(page.texts(".complete .answer text"))
    by_id = {candidate["node_id"]: candidate["answer"] for candidate in recorded["candidates"]}
    assert shown == Counter(by_id.values())
    assert page.texts(".won .answer text") == [by_id[recorded["best"]]]
    chosen = {int(element.get_attribute("data-id")) for element in page.all(".step.chosen")}
    assert chosen == {0, *lineage(recorded, recorded["best"])}


CALLS = answer_of_calls([ToolCall("find", '{"text": "</script><b>x^2", "days": 3}'), ToolCall("stop", "{}")])
CALLED = 'find(days=3, text="</script><b>x^2"); stop()'


def test_calls_of_tools_are_shown_as_text_by_their_names_and_arguments(open_traces):
    recorded = trace("beam")
    for candidate in recorded["candidates"]:
        candidate["answer"] = CALLS
    page = open_traces(recorded | {"answer": CALLS})
    assert page.text(".outcome strong") == CALLED
    assert CALLED in page.texts(".facts dd")
    assert len(page.all(".outcome math")) == len(page.all("b b")) == 0
    assert page.texts(".complete .answer title") == [CALLED] * len(recorded["candidates"])
    assert {text[:3] for text in page.texts(".complete .answer text")} == {"fin"}
    assert f"answer {CALLED}" in page.one(".step.won").get_attribute("aria-label")


def test_json_that_only_begins_like_calls_stays_as_it_is(open_traces):
    for text in ('{"tool_calls":[', '{"tool_calls":[1]}', '{"tool_calls":[]}'):
        page = open_traces(trace("beam") | {"answer": text})
        assert page.text(".outcome strong") == text


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("name", ["beam", "best-of-n"])
def test_no_step_lies_on_another(open_traces, name, labelled):
    page = open_traces(name)
    if page.one("#labels").is_selected() != labelled:
        page.click("#labels")
    places = page.run(
        "return [...document.querySelectorAll('.step .dot')].map((e) => e.getBoundingClientRect().toJSON())"
    )
    for one, other in combinations(places, 2):
        apart = one["right"] <= other["left"] or other["right"] <= one["left"]
        assert apart or one["bottom"] <= other["top"] or other["bottom"] <= one["top"]


def test_the_slider_replays_the_search_round_by_round(open_traces):
    recorded = trace("beam")
    page, rounds = open_traces(recorded), len(recorded["rounds"])
    assert page.one("#slider").get_attribute("max") == str(rounds + 1)
    for number in (0, 1, 4, rounds, 2):
        page.slide(number)
        assert page.steps() == known_at(recorded, number)
        name = f"round {number} of {rounds}" if number else "start"
        assert page.text("#moment").startswith(name)
        assert page.one("#slider").get_attribute("aria-valuetext") == page.text("#moment")
    page.slide(rounds + 1)
    assert page.text("#moment").startswith("result")


def test_steps_are_living_pruned_or_complete_as_the_algorithm_kept_them(open_traces):
    recorded = trace("beam")
    page, ids = open_traces(recorded), ids_by_path(recorded)
    told: set[int] = set()
    for number, done in enumerate(recorded["rounds"], start=1):
        page.slide(number)
        kept = {ids[tuple(path)] for path in done["kept"]}
        told |= {ids[tuple(node["path"])] for node in done["told"]}
        complete = {node for node in kept if recorded["nodes"][node]["termination"] in COMPLETE}
        assert page.steps(kind="living") == kept - complete
        assert page.steps(kind="complete") == complete
        pruned = {node for node in told - kept if recorded["nodes"][node]["termination"] == "pruned"}
        assert page.steps(kind="pruned") == pruned


def test_shared_kv_is_marked_as_far_as_several_living_paths_stand_on_it(open_traces):
    recorded = trace("beam")
    page, ids = open_traces(recorded), ids_by_path(recorded)
    seen = 0
    for number, done in enumerate(recorded["rounds"], start=1):
        standing: Counter[int] = Counter()
        for node in {ids[tuple(path)] for path in done["kept"]}:
            if recorded["nodes"][node]["termination"] == "":
                for above in lineage(recorded, node):
                    standing[above] += recorded["nodes"][node]["multiplicity"]
        page.slide(number)
        shared = sum(count > 1 for count in standing.values())
        assert len(page.all(".shared path")) == shared
        seen += shared
    assert seen > 10
    page.slide(len(recorded["rounds"]) + 1)
    assert page.all(".shared path") == [], "a search that has ended holds nothing"
    assert "in memory once" in page.text("#legend")


def test_paths_to_the_end_are_seen_to_grow_within_their_one_round(open_traces):
    recorded = trace("best-of-n")
    page = open_traces(recorded)
    moments = recorded["rounds"][0]["moments"]
    assert len(recorded["rounds"]) == 1
    for number, moment in enumerate(moments, start=1):
        page.slide(number)
        assert page.steps() == set(range(moment["nodes"]))
        assert page.text("#moment").startswith("round 1 of 1")
        complete = {node["node_id"] for node in recorded["nodes"][: moment["nodes"]] if node["termination"] in COMPLETE}
        assert page.steps(kind="complete") == complete


def test_the_chart_tells_the_blocks_of_both_models_at_each_moment(open_traces):
    recorded = trace("beam")
    page = open_traces(recorded)
    moments = [done["moments"][-1]["blocks"] for done in recorded["rounds"]]
    most = max(sum(blocks.values()) for blocks in moments)
    places = []
    for number, blocks in enumerate(moments, start=1):
        page.slide(number)
        numbers = [sum(blocks.values()), blocks["generator"], blocks["verifier"], most]
        assert page.texts(".memory b") == [str(each) for each in numbers]
        places.append(float(page.one(".cursor").get_attribute("x1")))
    assert places == sorted(set(places))
    page.slide(0)
    assert page.texts(".memory b")[0] == "0"


def test_a_click_shows_the_text_score_tokens_and_end_of_a_step(open_traces):
    recorded = trace("beam")
    page = open_traces(recorded)
    node = next(n for n in recorded["nodes"] if n["termination"] == "pruned" and n["multiplicity"] > 1)
    page.click_step(node["node_id"])
    assert page.text(".details h3") == f"Step {len(node['path'])}"
    facts = dict(zip(page.texts(".facts dt"), page.texts(".facts dd"), strict=True))
    assert facts["Tokens"] == str(node["tokens"])
    assert facts["Samples"] == str(node["multiplicity"])
    assert facts["State"].startswith("pruned")
    shown = re.sub(r"[<>]", "", facts["Score"])
    assert abs(float(shown) - node["score"]) <= 0.001
    path = [recorded["nodes"][above]["text"].strip() for above in lineage(recorded, node["node_id"])]
    path = [re.sub(r"\\boxed\{(\d+)\}", r"\1", text) for text in path]  # which is drawn
    assert page.texts(".steps button") == path
    assert page.text(".steps .here button") == path[-1]
    page.press(Keys.ESCAPE)
    assert page.text(".details h3") == "Selected path"
    page.click(page.all(".steps button")[0])
    assert page.focused == lineage(recorded, recorded["best"])[0]


def test_arrow_keys_move_among_steps_and_what_is_focused_can_be_seen(open_traces):
    recorded = trace("beam")
    page = open_traces(recorded)
    path = lineage(recorded, recorded["best"])
    page.run("document.querySelector('[data-id=\"0\"]').focus()")
    page.press(*[Keys.RIGHT] * len(path))
    assert page.focused == path[-1], "right leads along what leads somewhere"
    page.press(Keys.LEFT)
    assert page.focused == path[-2]
    assert page.text(".details h3") == f"Step {len(path) - 1}"
    before = page.focused
    page.press(Keys.DOWN)
    below = page.focused
    assert below != before
    assert len(recorded["nodes"][below]["path"]) == len(path) - 1
    assert page.style(f'[data-id="{below}"] .halo', "stroke") not in ("none", page.style(".dead .halo", "stroke"))
    page.press(Keys.UP)
    assert page.focused == before
    page.press(Keys.HOME)
    assert page.focused == 0
    page.press(Keys.ENTER)
    assert page.text(".details h3") == "The problem"
    assert [element.get_attribute("data-id") for element in page.all('[role=treeitem][tabindex="0"]')] == ["0"]


def test_tab_leads_into_the_tree_and_out_of_it(open_traces):
    page = open_traces("beam")
    page.press(Keys.TAB)
    assert page.focused == 0
    page.press(Keys.TAB)
    assert page.focused == -1


def test_a_focused_step_that_a_replay_has_not_reached_gives_the_focus_back(open_traces):
    recorded = trace("beam")
    page = open_traces(recorded)
    page.click_step(recorded["best"])
    page.slide(1)
    assert page.steps() == known_at(recorded, 1)
    assert [element.get_attribute("data-id") for element in page.all('[role=treeitem][tabindex="0"]')] == ["0"]


def test_space_plays_to_the_end_and_pauses(open_traces):
    recorded = trace("beam")
    page, last = open_traces(recorded), len(recorded["rounds"]) + 1
    page.press(Keys.SPACE)
    page.wait(lambda: page.one("#play").get_attribute("aria-label") == "Pause")
    page.press(Keys.SPACE)
    assert page.one("#play").get_attribute("aria-label") == "Play"
    assert int(page.run("return document.getElementById('slider').value")) < last
    page.click("#play")
    page.wait(lambda: page.run("return Number(document.getElementById('slider').value)") == last)
    page.wait(lambda: page.one("#play").get_attribute("aria-label") == "Play")
    assert page.steps() == known_at(recorded, last - 1)


def test_two_traces_stand_side_by_side_at_the_same_moment(open_traces):
    beam, best = trace("beam"), trace("best-of-n")
    page = open_traces(beam, best)
    assert page.texts("h2") == ["beam, N = 4, M = 4", "best-of-n, N = 16"]
    boxes = [panel.rect for panel in page.all(".panel")]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    moments = [[m for done in each["rounds"] for m in done["moments"]] for each in (beam, best)]
    stops = sorted(
        {0.0, *(m["seconds"] for each in moments for m in each), *(each["usage"]["seconds"] for each in (beam, best))}
    )
    assert page.one("#slider").get_attribute("max") == str(len(stops) - 1)
    for stop in range(0, len(stops), 3):
        page.slide(stop)
        for panel, (each, recorded) in enumerate(zip(moments, (beam, best), strict=True)):
            over = stops[stop] >= recorded["usage"]["seconds"]
            count = max([1, *(m["nodes"] for m in each if m["seconds"] <= stops[stop])])
            assert len(page.steps(panel)) == (len(recorded["nodes"]) if over else count)
    page.click(page.all(".panel")[1].find_element("css selector", '[data-id="5"] .dot'))
    assert page.texts(".details h3")[0] == "Selected path", "only one of them shows the step"


def test_two_traces_of_different_problems_each_say_theirs(open_traces):
    other = trace("beam")
    other["configuration"]["problem"] = "What is 2 + 3?"
    page = open_traces("beam", other)
    assert not page.one("#problem").is_displayed()
    assert page.texts(".own-problem") == [trace("beam")["configuration"]["problem"], "What is 2 + 3?"]


HOSTILE = [
    "</script><script>window.owned = 1</script>",
    "<!--<script>window.owned = 2</script>-->",
    '<img src="x" onerror="window.owned = 3">',
    "\u2028</style><b>bold</b>\U0001f333 & &lt;i&gt; ${owned} `",
    "javascript:window.owned=4",
]


def test_what_a_model_says_is_only_ever_text(open_traces):
    recorded = trace("beam")
    recorded["configuration"]["problem"] = HOSTILE[0] + HOSTILE[1]
    for node in recorded["nodes"][1:]:
        node["text"] = HOSTILE[node["node_id"] % len(HOSTILE)] + "\n\n"
    for candidate in recorded["candidates"]:
        candidate["answer"] = HOSTILE[2]
    recorded["answer"] = HOSTILE[2]
    page = open_traces(recorded)
    elements = len(page.all("body *"))
    for node in recorded["nodes"][1:8]:
        page.click_step(node["node_id"])
        assert page.text(".steps .here button") == node["text"].strip()
    assert page.text(".outcome strong") == HOSTILE[2]
    assert page.text("#problem") == HOSTILE[0] + HOSTILE[1]
    assert page.run("return window.owned ?? null") is None
    assert page.all("img, body b:not(.memory b), body style, body script") == []
    assert len(page.all("body *")) < elements + 100


def test_the_policy_of_the_file_refuses_scripts_and_styles_that_are_not_its_own(open_traces):
    page = open_traces("beam")
    page.run(
        "const script = document.createElement('script'); script.textContent = 'window.owned = 1';"
        "document.body.append(script); document.body.setAttribute('style', 'opacity: 0');"
        "fetch('https://example.org/').catch(() => {});"
    )
    assert page.run("return window.owned ?? null") is None
    assert page.style("body", "opacity") == "1"
    said = page.wait(lambda: [line for line in page.console() if "Content Security Policy" in line])
    assert any("script" in line for line in said)


Colour = tuple[float, ...]


def luminance(colour: Colour) -> float:
    """Relative luminance, by WCAG 2."""
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Colour, other: Colour) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_writing_can_be_read_in_light_and_dark(open_traces, browser, dark):
    browser.view(1440, 900, dark)
    page = open_traces("beam")
    paper, card = page.rgb("body", "background-color"), page.rgb(".drawing", "background-color")
    assert (luminance(paper) < 0.1) == dark
    for selector in ("body", ".usage", ".legend", ".facts dt", ".score"):
        assert contrast(page.rgb(selector, "color"), paper) >= 4.5, selector
    for selector in (".chosen .label", ".pruned .label"):
        assert contrast(page.rgb(selector, "fill"), card) >= 4.5, selector
    assert contrast(page.rgb(".won .answer text", "fill"), page.rgb(".won .answer rect", "fill")) >= 4.5
    for kind in (".chosen:not(.root)", ".pruned"):  # the number of samples on the colour of a step
        assert contrast(page.rgb(f"{kind} .samples", "fill"), page.rgb(f"{kind} .dot", "fill")) >= 4.5, kind
    assert contrast(page.rgb(".branch.chosen", "stroke"), card) >= 7


def test_colours_follow_the_score(open_traces):
    recorded = trace("best-of-n")
    recorded["nodes"][1]["score"], recorded["nodes"][2]["score"] = 0.0, 1.0
    page = open_traces(recorded)
    low, high = (page.rgb(f'[data-id="{node}"] .dot', "fill") for node in (1, 2))
    assert low[0] > 2 * low[2], "low scores are brown"
    assert high[2] > 2 * high[0], "high scores are teal"


def test_pruned_steps_are_hollow_and_keep_the_colour_of_their_score(open_traces):
    recorded = trace("beam")
    one, other = [node for node in recorded["nodes"] if node["termination"] == "pruned"][:2]
    one["score"], other["score"] = 0.0, 1.0
    page = open_traces(recorded)
    low, high = (page.rgb(f'[data-id="{node["node_id"]}"] .dot', "stroke") for node in (one, other))
    assert low[0] > 2 * low[2], "low scores are brown"
    assert high[2] > 2 * high[0], "high scores are teal"
    hollow = page.rgb(f'[data-id="{one["node_id"]}"] .dot', "fill")
    assert hollow == page.rgb(".drawing", "background-color") != page.rgb(".chosen:not(.root) .dot", "fill")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["beam", "best-of-n"])
def test_all_answers_can_be_seen_without_scrolling_to_the_side(open_traces, browser, name, width):
    browser.view(width, 900)
    page = open_traces(name)
    frame, left, right = page.run(
        """
        const frame = document.querySelector(".scroll").getBoundingClientRect();
        const boxes = [...document.querySelectorAll(".answer rect, .root .dot")].map((e) => e.getBoundingClientRect());
        const [left, right] = [boxes.map((box) => box.left), boxes.map((box) => box.right)];
        return [[frame.left, frame.right], Math.min(...left), Math.max(...right)];
        """
    )
    assert frame[0] <= left
    assert right <= frame[1]


def test_a_search_without_scores_is_plain(open_traces):
    recorded = trace("best-of-n")
    for node in recorded["nodes"]:
        node["score"] = None
    recorded["score"] = None
    page = open_traces(recorded)
    fills = {page.style(f'[data-id="{node}"] .dot', "fill") for node in (1, 2, recorded["best"])}
    assert len(fills) == 1
    assert page.text(".outcome span") == "answer"


def test_on_a_phone_nothing_is_wider_than_the_screen(open_traces, browser):
    browser.view(390, 844)
    page = open_traces("beam", "best-of-n")
    assert page.run("return document.documentElement.scrollWidth") <= 390
    boxes = [panel.rect for panel in page.all(".panel")]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
    assert float(page.style(".steps button", "font-size").removesuffix("px")) >= 13
    page.click_step(3)
    assert page.texts(".details h3")[0].startswith("Step")


def test_the_text_of_steps_can_be_asked_for_and_left_out(open_traces, browser):
    browser.view(390, 844)
    page = open_traces("beam")
    assert not page.one("#labels").is_selected()
    assert set(page.texts(".label")) == {""}
    page.click("#labels")
    assert any(text.startswith("(a) 811") for text in page.texts(".label"))
    assert page.run("return document.documentElement.scrollWidth") <= 390, "the tree scrolls, not the page"


def test_a_trace_that_contradicts_itself_is_told(browser, tmp_path):
    recorded = trace("beam")
    recorded["nodes"] = recorded["nodes"][:3]
    file = tmp_path / "page.html"
    file.write_text(standalone_page([recorded]))
    browser.open(file.as_uri())
    assert browser.text("#notice") == "A trace contradicts itself and cannot be shown."


def test_a_tree_of_thousands_of_steps_is_drawn_and_replayed(open_traces):
    recorded = wide_trace(rounds=10, children=256)
    page = open_traces(recorded)
    assert len(page.steps()) == 1 + 2560
    page.slide(3)
    assert len(page.steps()) == 1 + 3 * 256
    page.slide(11)
    assert len(page.steps()) == 1 + 2560
    page.click_step(recorded["best"])
    assert page.text(".details h3") == "Step 10"


def test_a_thought_is_folded_until_one_of_its_steps_is_chosen(open_traces):
    recorded = trace("beam")
    thought, *_, last = lineage(recorded, recorded["best"])
    node = recorded["nodes"][thought]
    probe = {"answer": "<b>12</b>", "certainty": 0.934, "tokens": 9}
    recorded["probed"] = {"answer": recorded["answer"], "share": 0.666, "node_id": last}
    node |= {"thought_chars": len(node["text"]), "appended": "Time is up.", "probe": probe}
    recorded["nodes"][last]["probe"] = {"answer": "", "certainty": 0.0, "tokens": 9}
    page = open_traces(recorded)
    assert page.text(".outcome span").startswith("answer of probes, with 67% of their vote")
    assert page.text(".thought summary") == "Thought: 1 step"
    assert not page.one(".thought").get_property("open")
    page.run("document.querySelector('.thought').open = true")
    assert page.text(".appended") == "Written by the host: Time is up."
    assert page.text(".thought .probe") == f"Probe at token {node['tokens']}: <b>12</b>, 93% sure"
    tokens = sum(recorded["nodes"][each]["tokens"] for each in lineage(recorded, recorded["best"]))
    assert page.text(".details > .steps > li:last-child .probe") == f"Probe at token {tokens}: no answer"
    page.click_step(thought)
    assert "Probe<b>12</b>, 93% sure" in page.text(".facts").replace("\n", "")
    assert last != thought
