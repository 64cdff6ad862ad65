"""Searches of the user's own, MODULE:CLASS: what a class must have, and who can name one."""

import copy
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.search.algorithms import (
    algorithm_of,
    answers_suffice,
    has_independent_paths,
    make_algorithm,
    memory_estimate,
    needs_verifier,
    own_code,
    stops_early,
    unused_fields,
    with_defaults,
)
from espalier.search.algorithms.base import Expand, MemoryEstimate
from espalier.search.request import AlgorithmName, SearchRequest, Vote, make_request, with_own_code
from espalier.search.schema import CodeName, from_values
from espalier.search.service.grpc_api.convert import request_from_wire, request_to_wire
from espalier.search.tree import Node, Termination
from espalier.v1 import search_pb2 as pb

METHODS = """
    def ask(self): return []
    def tell(self, nodes): pass
    def finished(self): return True
    def kept(self): return []
"""
MODULE = f"""
from dataclasses import dataclass
from typing import Annotated
from annotated_types import Interval
from espalier.search.algorithms.base import Growth, MemoryEstimate, SearchAlgorithm

class Plain(SearchAlgorithm):
    def __init__(self, request, root): self.request, self.root = request, root
{METHODS}
class Unscored(Plain):
    scores = "none"

class Told(Plain):
    vote = "naive"
    scores = "answers"
    uses = ("beam_width", "vote", "early_stop")
    growth = Growth.INDEPENDENT
    @dataclass
    class Parameters:
        exploration: float = 2.0
        keep: Annotated[float, Interval(gt=0, le=1)] = 0.5
        name: str = "it"
    @classmethod
    def memory(cls, request): return (MemoryEstimate(paths=7),)

class Keeping(Plain):
    def tell(self, nodes):
        assert self.request.vote == "weighted" and self.root.path == ()

class Scripted(Plain):
    asked, keeps = [], []
    def ask(self): return self.asked
    def tell(self, nodes): pass
    def kept(self): return self.keeps
    def finished(self): return self.nothing

class Half(SearchAlgorithm):
    scores = "some"
    def ask(self): return []
    def finished(self): return True

class Alone(Plain):
    def __init__(self, root): pass

class BadVote(Plain):
    vote = "loudest"

class BadUses(Plain):
    uses = ("beam_width", "beem_width")

class NoUses(Plain):
    uses = None

class OneUse(Plain):
    uses = "beam_width"

class NoFixed(Plain):
    fixed = None

class BadFixed(Plain):
    fixed = dict(temperature="hot", beam_widht=2, problem="another")

class BadParameters(Plain):
    class Parameters: keep = 3

class BadKind(Plain):
    @dataclass
    class Parameters:
        growth: list = None

class BadDefault(Plain):
    @dataclass
    class Parameters:
        growth: float = "much"

class NoClassMethod(Plain):
    def candidates(self, request): return 3

class Wide(Plain):
    @classmethod
    def candidates(cls, request): return 1000 * request.beam_width

class FailsFor(Plain):
    @classmethod
    def candidates(cls, request): return 8 // (request.beam_width - 3)
    @classmethod
    def memory(cls, request): return 7
    @classmethod
    def sampled(cls, request): return request.no_field
    @classmethod
    def violations(cls, request): return ["too many"] if request.beam_width < 5 else []

class Duck:
    def __init__(self, request, root): pass
{METHODS}
class Failing(Plain):
    def __init__(self, request, root): raise ZeroDivisionError("of mine")

def function(request, root): pass
"""


@pytest.fixture(scope="module", autouse=True)
def my_searches(tmp_path_factory):
    """A module of the user's in the current folder."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_searches.py").write_text(MODULE)
    (folder / "my_broken.py").write_text("import math\n\nmath.sqrt(-1)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        yield folder
        sys.modules.pop("my_searches", None)


def request(name: str, **fields) -> SearchRequest:
    return SearchRequest("-", CodeName(f"my_searches:{name}"), **fields)


def test_a_class_that_says_nothing_more_is_a_scored_search_of_n_times_m_children():
    plain = request("Plain", beam_width=2, expansion=3)
    plain.validate()
    assert needs_verifier(plain)
    assert with_defaults(plain) == replace(plain, vote=Vote.WEIGHTED, max_steps=40, max_step_tokens=256)
    assert memory_estimate(plain) == (MemoryEstimate(paths=6, steps=6),)
    assert not answers_suffice(plain)
    assert {"exploration", "early_stop"} <= unused_fields(plain)
    assert not {"beam_width", "expansion", "aggregation"} & unused_fields(plain)


def test_the_constructor_gets_the_request_with_its_defaults_and_the_root():
    root = Node(0, None, ())
    made = make_algorithm(request("Keeping"), root)
    assert list(made.kept()) == [root]
    made.tell([])
    assert made.finished()


def test_a_class_without_scores_votes_by_majority_and_needs_no_verifier_unless_its_vote_does():
    assert with_defaults(request("Unscored")).vote is Vote.MAJORITY
    assert not needs_verifier(request("Unscored"))
    assert "aggregation" in unused_fields(request("Unscored"))
    assert needs_verifier(request("Unscored", vote=Vote.WEIGHTED))


def test_a_class_may_declare_its_vote_its_fields_its_memory_and_its_scores():
    told = request("Told")
    assert with_defaults(told) == replace(told, vote=Vote.NAIVE, exploration=2.0, max_steps=40, max_step_tokens=256)
    assert with_defaults(request("Told", exploration=1.0)).exploration == 1.0
    assert "exploration" not in unused_fields(told)
    assert memory_estimate(told) == (MemoryEstimate(paths=7),)
    assert answers_suffice(told)
    assert {"expansion", "temperature"} <= unused_fields(told)
    assert not {"beam_width", "early_stop", "aggregation"} & unused_fields(told)
    assert not stops_early(told)
    assert stops_early(request("Told", vote=Vote.WEIGHTED))
    assert has_independent_paths(told)
    assert replace(told, beam_width=3, expansion=5).candidates == 3


def test_a_class_may_have_parameters_of_its_own_given_by_its_name_or_by_a_field_of_the_same_name():
    def parameters(name, **fields):
        asked = request(name, **fields)
        return vars(algorithm_of(asked).parameters(with_defaults(asked)))

    assert parameters("Told") == {"exploration": 2.0, "keep": 0.5, "name": "it"}
    given = {"exploration": 2.0, "keep": 0.25, "name": "true north"}
    assert parameters("Told:keep=0.25:name=true north") == given
    assert parameters("Told:exploration=3", exploration=4.0)["exploration"] == 4.0
    assert with_defaults(request("Told:exploration=3")).exploration == 3
    request("Told:keep=1").validate()
    with pytest.raises(InvalidRequestError, match="exploration: must be between 0 and 100"):
        request("Told", exploration=101.0).validate()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "my_searches:Half",
            "lacks the methods kept, tell, lacks a constructor that takes a request and a root, its scores must be one",
        ),
        ("my_searches:Alone", "lacks a constructor that takes a request and a root"),
        ("my_searches:function", "must be a subclass of espalier.search.algorithms.base.SearchAlgorithm"),
        (
            "my_searches:BadVote",
            "its vote must be one of naive, weighted, majority, confidence, tail-confidence, lowest-confidence, "
            "is 'loudest'",
        ),
        ("my_searches:Duck", "must be a subclass of espalier.search.algorithms.base.SearchAlgorithm"),
        ("my_searches:BadUses", "its uses must be of beam_width, early_stop, expansion, min_p, seed, "),
        ("my_searches:NoUses", "its uses must be a tuple of names, is None"),
        ("my_searches:OneUse", "its uses must be a tuple of names, is 'beam_width'"),
        ("my_searches:NoFixed", "its fixed must be a mapping of fields to values, is None"),
        (
            "my_searches:BadFixed",
            "its fixed temperature must be a number, is 'hot', its fixed has 'beam_widht', which is no option of a "
            "search, its fixed has 'problem', which is no option",
        ),
        ("my_searches:BadParameters", "its Parameters must be a dataclass with a default for each field"),
        ("my_searches:BadKind", "its parameter growth must be an int, a float, a bool, a str or a StrEnum"),
        ("my_searches:BadDefault", "the default of its parameter growth must be a number, is 'much'"),
        ("my_searches:NoClassMethod", "its candidates must be a class method"),
        ("my_searches:make.<locals>.Inner", "'; define the class at the top of its module"),
        ("my_searches.py:Plain", "; write my_searches:Plain, without .py"),
        ("my_searches:Told:keep", "parameters are written NAME=VALUE:NAME=VALUE, not keep"),
        ("my_searches:Told:keep=2", "keep must be above 0 and at most 1, is 2"),
        (
            "my_searches:Told:kept=1:keep=none",
            "kept is unknown; did you mean 'keep'?, keep must be a number, is 'none', its parameters are exp",
        ),
        ("my_searches:Plain:keep=1", "keep is unknown, it has no parameters"),
        ("my_searches:Nothing", "has no attribute 'Nothing'"),
        ("my_searches:", "has no attribute ''"),
        ("no_such_module:Search", "No module named 'no_such_module'"),
        (":Search", "Empty module name"),
        ("my_broken:Search", "my_broken.py:3: ValueError: math domain error"),
    ],
)
def test_what_a_class_lacks_is_said_in_one_line(name: str, said: str):
    with pytest.raises(InvalidRequestError) as caught:
        needs_verifier(SearchRequest("-", CodeName(name)))
    (violation,) = caught.value.violations
    assert violation.field == "algorithm"
    assert violation.description.startswith(f"{name}: ")
    assert said in violation.description
    assert "\n" not in violation.description


@pytest.mark.parametrize(
    ("ask", "width", "said"),
    [
        (lambda asked: asked.candidates, 3, r"candidates failed, .*my_searches.py:\d+: ZeroDivisionError: "),
        (lambda asked: asked.candidates, 2, "candidates must return a whole number above 0, returned -8"),
        (SearchRequest.validate, 3, r"violations must return a list of Violations, returned \['too many'\]"),
        (memory_estimate, 5, "memory must return at least one MemoryEstimate, returned 7"),
        (lambda asked: algorithm_of(asked).sampled(asked), 5, "sampled failed, .*: AttributeError: "),
    ],
)
def test_a_class_method_that_fails_or_returns_the_wrong_thing_is_an_invalid_request(ask, width: int, said: str):
    with pytest.raises(InvalidRequestError, match=f"^algorithm: my_searches:FailsFor: {said}"):
        ask(request("FailsFor", beam_width=width))


def test_the_limit_on_a_round_names_the_product_only_where_it_is_one():
    with pytest.raises(InvalidRequestError, match="beam_width \\* expansion must be at most 1024, is 2048"):
        request("Plain", beam_width=256, expansion=8).validate()
    with pytest.raises(InvalidRequestError, match="the number of children in a round must be at most 1024, is 2000"):
        request("Wide", beam_width=2).validate()


def test_a_constructor_that_fails_is_named_with_its_line():
    with pytest.raises(
        InvalidRequestError, match=r"my_searches:Failing: creating it failed, .*: ZeroDivisionError: of m"
    ):
        make_algorithm(request("Failing"), Node(0, None, ()))


def test_what_breaks_the_contract_fails_the_search_and_is_told():
    root = Node(0, None, ())
    children = [Node(1 + i, root, (i,)) for i in range(3)]
    ended = Node(9, root, (3,), termination=Termination.EOS)
    plan = request("Scripted", beam_width=1, expansion=2)
    made = make_algorithm(plan, root)
    its = sys.modules["my_searches"].Scripted
    its.asked = []
    with pytest.raises(EspalierError, match="--algorithm my_searches:Scripted: is not finished and asks for nothing"):
        made.ask()
    its.asked = [Expand(root, 3)]
    with pytest.raises(
        EspalierError,
        match=r"asks for 3 children in a round; its `candidates\(request\)` allows 2: override it, or `memory`",
    ):
        made.ask()
    its.asked = [Expand(root, 2)]
    assert made.ask() == its.asked
    its.keeps = children
    with pytest.raises(EspalierError, match="keeps 3 open paths"):
        made.tell(children)
    its.keeps = [children[0], ended]
    made.tell(children)
    for node in (root, children[1], ended):
        its.asked = [Expand(node, 1)]
        with pytest.raises(EspalierError, match="no Expand of a node that it kept and that has not ended"):
            made.ask()
    with pytest.raises(
        EspalierError, match=r"finished failed, .*: AttributeError: 'Scripted' object has no attribute 'noth"
    ):
        made.finished()
    its.keeps = None
    with pytest.raises(EspalierError, match=r"kept failed, .*NoneType"):
        made.tell(children)


def test_text_never_loads_code(my_searches: Path):
    (my_searches / "my_trap.py").write_text("raise SystemExit('loaded')\n")
    name = "my_trap:Search"
    usual = "must be one of greedy, chain"
    with pytest.raises(InvalidRequestError, match=usual):
        from_values(SearchRequest, {"problem": "-", "algorithm": name})
    with pytest.raises(InvalidRequestError, match=usual):
        make_request("-", {"algorithm": name})
    with pytest.raises(InvalidRequestError, match=usual):
        SearchRequest("-", name).validate()  # pyright: ignore[reportArgumentType] - as a caller in Python may
    with pytest.raises(KeyError):
        needs_verifier(SearchRequest("-", name))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequestError, match="algorithm: cannot be sent"):
        request_to_wire(SearchRequest("-", CodeName(name)))
    _, violations = request_from_wire(pb.SolveProblemRequest(problem="-", algorithm=99))  # pyright: ignore[reportArgumentType]
    assert [violation.field for violation in violations] == ["algorithm"]
    assert "my_trap" not in sys.modules


def test_a_name_is_code_where_whoever_runs_the_process_gives_it():
    made = make_request("-", with_own_code({"algorithm": "my_searches:Plain"}))
    assert isinstance(made.algorithm, CodeName)
    assert make_request("-", with_own_code({"algorithm": "dvts"})).algorithm is AlgorithmName.DVTS
    assert with_own_code({"seed": 1}) == {"seed": 1}


def test_a_class_itself_may_be_given_in_python_and_a_newer_one_of_its_name_is_taken(my_searches: Path):
    import my_searches as module  # pyright: ignore[reportMissingImports]

    made = make_request("-", with_own_code({"algorithm": module.Told}))
    assert made.algorithm == "my_searches:Told"
    assert issubclass(algorithm_of(made), module.Told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Told", module.Unscored)
        assert algorithm_of(made).scores == "none"


def test_a_parameter_of_its_own_given_as_a_field_is_told_where_to_write():
    given = with_own_code({"algorithm": "my_searches:Told", "keep": 0.25, "kept": 1})
    with pytest.raises(InvalidRequestError) as caught:
        make_request("-", given)
    assert [violation.description for violation in caught.value.violations] == [
        "is unknown; write it behind the class: my_searches:Told:keep=0.25",
        "is unknown",
    ]


def test_a_name_stays_one_in_copies_and_in_other_processes():
    plain = request("Plain")
    for same in (make_request(plain, {}), pickle.loads(pickle.dumps(plain)), copy.deepcopy(plain)):
        assert same == plain
        assert isinstance(same.algorithm, CodeName)


def test_the_code_of_a_search_has_a_digest_and_built_in_ones_have_none():
    (digest,) = own_code(request("Plain")).values()
    assert len(digest) == 64
    assert own_code(SearchRequest("-")) == {}
