"""The page as a server sends it, on recorded searches, in a browser."""

import json
from typing import Any

import pytest
from page_server import HERE, PATIENCE, PageServer, data_of

from espalier.search.conversation import ToolCall
from espalier.search.tools.declared import answer_of_calls

pytestmark = pytest.mark.browser

PROBLEM = "Tom has 38 coins. He finds 47 more. How many has he now?"


@pytest.fixture
def page(browser: Any, server: PageServer) -> Any:
    browser.open(server.url)
    browser.fill("#problem-text", PROBLEM)
    return browser


def known(events: list[str]) -> set[int]:
    """The nodes that these events tell of, but for those merged into others."""
    records = {node["node_id"]: node for event in events for node in data_of(event).get("nodes", [])}
    return {0} | {node_id for node_id, node in records.items() if node["termination"] != "duplicate"}


def over(page: Any) -> bool:
    return page.one("#start").is_enabled()


def wait_for_end(page: Any) -> None:
    page.wait(lambda: over(page))
    page.settle()


def test_a_tree_grows_with_the_events_of_its_search(page, server):
    server.hold()
    events = server.plays["beam"]
    page.click("#start")
    assert page.text(".outcome span") == "waiting for the server"
    for number in range(1, len(events)):
        server.go_on(1)
        page.wait(lambda number=number: page.steps() == known(events[:number]))
        if number == 4:
            assert page.text(".outcome span").endswith("searching")
            assert page.text("#moment").startswith("round 3")
            assert len(page.steps(kind="living")) >= 1
            assert page.text(".details") == "Choose a step to read it."
    assert not over(page)
    server.go_on()
    wait_for_end(page)
    result = data_of(events[-1])["result"]
    assert page.text(".outcome strong") == result["answer"]
    assert page.steps() == {n["node_id"] for n in result["nodes"] if n["termination"] != "duplicate"}
    assert page.texts(".won .answer text") == [result["answer"]]
    page.slide(2)
    assert page.steps() == known(events[:3]), "it can be replayed at once"


def test_warnings_of_a_result_are_shown_as_text(page, server):
    *before, last = server.plays["beam"]
    server.plays["beam"] = [*before, last.replace('"warnings": []', '"warnings":["never taught <b>noon</b>"]', 1)]
    page.click("#start")
    wait_for_end(page)
    assert page.text(".warnings") == "never taught <b>noon</b>"
    assert page.one(".warnings").is_displayed()


def test_calls_that_a_running_search_reports_are_shown_by_their_names_and_arguments(page, server):
    *before, last = server.plays["beam"]
    answer = json.dumps(data_of(last)["result"]["answer"])
    calls = json.dumps(answer_of_calls([ToolCall("get_weather", '{"city": "Oslo"}')]))
    server.plays["beam"] = [event.replace(f'"answer": {answer}', f'"answer": {calls}') for event in (*before, last)]
    page.click("#start")
    wait_for_end(page)
    assert page.text(".outcome strong") == 'get_weather(city="Oslo")'
    assert page.texts(".won .answer title") == ['get_weather(city="Oslo")']
    assert 'get_weather(city="Oslo")' in page.texts(".facts dd")


def test_paths_to_the_end_grow_step_by_step(page, server):
    server.hold()
    page.run("document.querySelector('[name=algorithm]').value = 'best-of-n'")
    page.run("document.querySelector('[name=algorithm]').dispatchEvent(new Event('change'))")
    page.click("#start")
    events, sizes = server.plays["best-of-n"], list[int]()
    for number in range(1, 8):
        server.go_on(1)
        page.wait(lambda number=number: page.steps() == known(events[:number]))
        sizes.append(len(page.steps()))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 4, "a report may come before there is a step"
    server.go_on()
    wait_for_end(page)


def test_a_request_says_what_the_form_says(page, server):
    for name, value in {"beam_width": "8", "expansion": "2", "seed": "7", "time_limit": "2.5"}.items():
        page.fill(f"[name={name}]", value)
    page.fill("#token", "s3cret")
    page.click("#start")
    (call,) = server.wait_for_calls(1)
    assert call.body == {
        "path": "/v1/searches",
        "problem": PROBLEM,
        "algorithm": "beam",
        "beam_width": 8,
        "expansion": 2,
        "seed": 7,
        "time_limit": 2.5,
    }
    assert call.headers["authorization"] == "Bearer s3cret"
    assert call.headers["accept"] == "text/event-stream"
    assert call.headers["content-type"] == "application/json"
    wait_for_end(page)
    kept = page.run("return [JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie]")
    assert not any("s3cret" in text for text in kept)


def test_without_a_token_no_header_is_sent_and_unused_numbers_are_left_out(page, server):
    page.run(
        "const choice = document.querySelector('[name=algorithm]'); choice.value = 'best-of-n';"
        "choice.dispatchEvent(new Event('change'))"
    )
    assert not page.one("[name=expansion]").is_enabled()
    page.click("#start")
    (call,) = server.wait_for_calls(1)
    assert "authorization" not in call.headers
    assert call.body.keys() == {"path", "problem", "algorithm", "beam_width", "seed"}
    wait_for_end(page)


def test_an_example_fills_the_problem_in(page):
    option = page.all("#example option")[1]
    text = option.get_attribute("value")
    page.run("arguments[0].selected = true; arguments[0].parentElement.dispatchEvent(new Event('change'))", option)
    assert page.run("return document.getElementById('problem-text').value") == text


def test_cancelling_closes_the_connection_and_keeps_what_grew(page, server):
    server.hold()
    page.click("#start")
    server.go_on(5)
    page.wait(lambda: page.steps() == known(server.plays["beam"][:5]))
    page.click("#cancel")
    (call,) = server.calls
    assert call.left.wait(PATIENCE)
    wait_for_end(page)
    assert page.text(".outcome span").endswith("cancelled")
    assert page.steps() == known(server.plays["beam"][:5])
    page.slide(1)
    assert page.steps() == known(server.plays["beam"][:2])


def test_leaving_the_page_closes_the_connection(page, server):
    server.hold()
    page.click("#start")
    (call,) = server.wait_for_calls(1)
    page.open("about:blank")
    assert call.left.wait(PATIENCE)


def test_starting_again_gives_the_running_search_up(page, server):
    server.hold()
    page.click("#start")
    first = server.wait_for_calls(1)[0]
    page.run("document.getElementById('form').requestSubmit()")
    server.wait_for_calls(2)
    assert first.left.wait(PATIENCE)
    assert not over(page)
    server.go_on()
    wait_for_end(page)
    assert page.text(".outcome strong") == data_of(server.plays["beam"][-1])["result"]["answer"]


def test_two_searches_of_one_problem_run_at_the_same_time(page, server):
    server.hold()
    page.click("#compare")
    page.click("#start")
    calls = server.wait_for_calls(2)
    assert {call.body["algorithm"] for call in calls} == {"beam", "best-of-n"}
    assert {call.body["problem"] for call in calls} == {PROBLEM}
    server.go_on(3)
    for panel, name in enumerate(("beam", "best-of-n")):
        page.wait(lambda panel=panel, name=name: page.steps(panel) == known(server.plays[name][:3]))
    server.go_on()
    wait_for_end(page)
    answers = [data_of(server.plays[name][-1])["result"]["answer"] for name in ("beam", "best-of-n")]
    assert page.texts(".outcome strong") == answers
    page.click("#compare")
    assert len(page.all(".wish")) == 1


def test_a_slider_that_was_moved_stays_while_the_tree_grows(page, server):
    server.hold()
    page.click("#start")
    server.go_on(5)
    page.wait(lambda: page.steps() == known(server.plays["beam"][:5]))
    page.slide(2)
    server.go_on(3)
    page.wait(lambda: page.one("#slider").get_attribute("max") == "7")
    page.settle()
    assert page.run("return document.getElementById('slider').value") == "2"
    assert page.steps() == known(server.plays["beam"][:3])
    server.go_on()
    wait_for_end(page)


ERROR = {"message": "must be between 1 and 256, is 300", "type": "invalid_request", "param": "beam_width", "code": None}


@pytest.mark.parametrize("named", ["", "beam_width: "], ids=["message", "message with the field"])
def test_a_refusal_is_shown_with_the_field(page, server, browser, named):
    server.refusal = 400, ERROR | {"message": named + ERROR["message"]}
    page.click("#start")
    wait_for_end(page)
    assert page.text(".outcome span") == "beam_width: must be between 1 and 256, is 300"
    assert page.text("body").count("must be between 1 and 256, is 300") == 1
    assert all("400" in line for line in browser.console()), "the browser itself notes the status, nothing else"
    server.refusal = None
    page.click("#start")
    page.wait(lambda: page.text(".outcome strong") == "295")
    assert not page.one("#notice").is_displayed()


def test_an_error_in_the_stream_is_shown_and_the_tree_stays(page, server):
    error = json.dumps({"error": {"message": "the server is shutting down", "type": "unavailable", "param": None}})
    server.plays["beam"] = [*server.plays["beam"][:4], f"event: error\ndata: {error}\n\n"]
    page.click("#start")
    wait_for_end(page)
    assert page.text(".outcome span").endswith("the server is shutting down")
    assert page.steps() == known(server.plays["beam"][:4])


def test_a_connection_that_breaks_is_told(page, server):
    server.plays["beam"] = server.plays["beam"][:4]
    page.click("#start")
    wait_for_end(page)
    assert page.text(".outcome span").endswith("The connection ended before the result.")


def test_a_report_that_was_cut_is_made_up_for_by_the_result(page, server):
    """A server leaves the changes out where they are larger than it may send."""
    cut = data_of(server.plays["beam"][3])
    event = f"event: step\ndata: {json.dumps(cut | {'nodes': [], 'kept': []})}\n\n"
    server.plays["beam"][3] = event
    page.click("#start")
    wait_for_end(page)
    nodes = data_of(server.plays["beam"][-1])["result"]["nodes"]
    assert page.steps() == {node["node_id"] for node in nodes if node["termination"] != "duplicate"}


def test_events_are_read_however_they_are_cut_into_lines(page, server):
    """Lines may end in CR and LF, data may be on several lines, and comments and other fields mean nothing."""
    for place, event in enumerate(server.plays["beam"]):
        name, data = event.strip().split("\n")
        whole = data.removeprefix("data: ")
        cut = whole.index(", ") + 2
        server.plays["beam"][place] = f": hello\r\nid: 7\r\n{name}\r\ndata:{whole[:cut]}\r\ndata: {whole[cut:]}\r\n\r\n"
    page.click("#start")
    wait_for_end(page)
    assert page.text(".outcome strong") == "295"


def test_what_a_live_model_says_is_only_ever_text(page, server):
    hostile = "<img src=x onerror='window.owned = 1'></script><script>window.owned = 2</script>\n\n"
    for place, event in enumerate(server.plays["beam"]):
        name, data = event.split("\n")[0], data_of(event)
        for node in [*data.get("nodes", []), *data.get("kept", []), *data.get("result", {}).get("nodes", [])]:
            if node["node_id"]:
                node["text"] = hostile
        server.plays["beam"][place] = f"{name}\ndata: {json.dumps(data)}\n\n"
    page.click("#start")
    wait_for_end(page)
    assert page.text(".steps .here button") == hostile.strip()
    assert page.all("img, body script") == []
    assert page.run("return window.owned ?? null") is None


def test_a_saved_trace_can_be_opened(page):
    files = [str(HERE / f"{name}.json") for name in ("beam", "best-of-n")]
    page.one("#open").send_keys("\n".join(files))
    page.wait(lambda: len(page.all(".panel")) == 2)
    assert page.texts(".outcome strong") == [json.loads((HERE / f).read_text())["answer"] for f in files]
    page.one("#open").send_keys(files[0])
    page.wait(lambda: len(page.all(".panel")) == 1)


@pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ('{"version": 1}', "no trace of version 2")])
def test_a_file_that_is_no_trace_is_refused(page, tmp_path, text, said):
    file = tmp_path / "other.json"
    file.write_text(text)
    page.one("#open").send_keys(str(file))
    page.wait(lambda: page.one("#notice").is_displayed())
    assert f"other.json {'is ' if said.startswith('no') else ''}{said}" in page.text("#notice")


def test_the_form_can_be_used_on_a_phone(page, browser):
    browser.view(390, 844)
    page.click("#compare")
    assert page.run("return document.documentElement.scrollWidth") <= 390
    assert all(field.is_displayed() for field in page.all("#form input:not([type=file]), #form select, #form textarea"))


def test_a_search_that_tells_of_no_changes_shows_its_tree_at_the_end(page, server):
    for place, event in enumerate(server.plays["beam"]):
        data = data_of(event)
        if "nodes" in data:
            server.plays["beam"][place] = f"event: step\ndata: {json.dumps(data | {'nodes': []})}\n\n"
    page.click("#start")
    wait_for_end(page)
    nodes = data_of(server.plays["beam"][-1])["result"]["nodes"]
    assert page.steps() == {node["node_id"] for node in nodes if node["termination"] != "duplicate"}


def test_a_server_without_a_verifier_offers_what_runs_and_no_examples_but_its_own(browser, server):
    server.served = server.served | {
        "model_names": {"generator": "small"}, "searches": ["greedy", "majority"], "default_search": "majority",
        "notice": "no verifier is loaded", "examples": False,
    }  # fmt: skip
    browser.open(server.url)
    browser.wait(lambda: browser.one("#models").is_displayed())
    assert browser.text("#models") == "Generator small. No verifier is loaded."
    assert "answer hard questions better by searching" in browser.text(".about")
    assert not browser.one(".examples").is_displayed()
    assert browser.value("#problem-text") == ""
    browser.click("#compare")
    assert browser.texts("[name=algorithm] option") == ["greedy", "majority"] * 2
    shown = "return [...document.querySelectorAll('.wish [name=' + arguments[0] + ']')].map((e) => e.value)"
    assert browser.run(shown, "algorithm") == ["majority", "majority"]
    assert browser.run(shown, "beam_width") == ["4", "16"]
    assert not browser.one("[name=expansion]").is_enabled()


def test_the_bundled_pairs_server_has_examples_and_the_first_is_there(browser, server):
    browser.open(server.url)
    browser.wait(lambda: browser.one(".examples").is_displayed())
    assert browser.text("#models") == "Generator talker, verifier judge."
    assert browser.value("#problem-text").startswith("A market has 811 photos")


FORMULAS = {
    r"so \(\frac12 x^{10}\)": "so |mrow mfrac mn mn msup mi mn",
    r"\[\sum_{i=1}^n i\]": "mrow munderover mo mrow mi mo mn mi mi",
    r"$x_1^2$ or $5 and $7": "msubsup mi mn mn| or $5 and $7",
    r"\boxed{\sqrt[3]{27}}": "mrow mroot mn mn",
    r"$$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$$": "mrow mo mtable mtr mtd mn mtd mn mtr mtd mn mtd mn mo",
    r"\begin{align*} x &= 2 \\ \end{align*}": "mrow mtable mtr mtd mi mtd mrow mo mn",
    r"\(\left\{ a \right.\)": "mrow mo mi",
    r"\(\text{5 \% of } 10\%\)": "mrow mtext mn mo",
    r"unknown \(\foo{3}\), \(\frac{1}\), \(}{\), \(": r"unknown \(\foo{3}\), \(\frac{1}\), \(}{\), \(",
    "<b>1</b> costs $3": "<b>1</b> costs $3",
    "\\(" + "{" * 200 + "}" * 200 + "\\)": "\\(" + "{" * 200 + "}" * 200 + "\\)",
}


def test_formulas_are_drawn_and_what_is_none_or_unknown_stays(browser, server):
    browser.open(server.url)
    browser.wait(lambda: browser.one("#models").is_displayed())
    script = """
        const [texts, done] = arguments;
        const tags = (part) => [...part.querySelectorAll("*")].map((each) => each.localName).join(" ");
        const drawn = (part) => (typeof part === "string" ? part : tags(part));
        import("/formula.js").then((its) => done(texts.map((text) => its.withFormulas(text).map(drawn).join("|"))));"""
    drawn = browser.driver.execute_async_script(script, list(FORMULAS))
    assert dict(zip(FORMULAS, drawn, strict=True)) == FORMULAS
    answers = (
        "return import('/formula.js').then((m) => arguments[0].map((each) => m.answerParts(each)[0].localName ?? each))"
    )
    assert browser.run(answers, [r"\frac{3}{4}", "x^2", "42", "a_b", r"\foo"]) == ["math", "math", "42", "a_b", r"\foo"]
