"""Numbers of thousands of digits, and constants with more digits than can be computed, are compared within seconds."""

import pytest

from espalier.search.grading.answers import canonical, exact_match_key, extract_answer
from espalier.search.grading.equality import is_right, is_same_value
from espalier.search.grading.formulas import differ, parsed

TOWER = "9^{9^{9^{9}}}"
ROOT = "1.41421356237309504880168872420969807856967187537694807317667973799"


@pytest.mark.parametrize("digits", [500, 5_000, 20_000])
@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("1/3", "0.{3}", True),
        ("\\frac{1}{3}", "-0.{3}", False),
        ("5", "0.{3}", False),
        ("5", "{3}", False),
        ("5", "5.{0}", True),
        ("{3}", "{3}.0", True),
        ("{3}", "{3}4", False),
        ("\\sqrt{2}", "1.{4}", False),
        ("x", "0.{3}", False),
        ("x+1", "x+{3}", False),
        ("5", "x={3}", False),
        ("5", "\\frac{1}{{3}}", False),
        ("5", "1/{3}", False),
    ],
)
def test_decimals_of_thousands_of_digits_are_read(gold: str, answer: str, right: bool, digits: int):
    one, other = (
        text.replace("{3}", "3" * digits).replace("{4}", "4" * digits).replace("{0}", "0" * digits)
        for text in (gold, answer)
    )
    assert is_right(one, other) == right
    assert is_same_value(one, other) == (right and gold != "1/3")


def test_a_long_decimal_is_a_rounded_constant_if_all_of_its_digits_are():
    assert is_right("\\sqrt{2}", ROOT)
    assert is_right("\\sqrt{2}", ROOT[:-1])
    assert not is_right("\\sqrt{2}", ROOT[:-1] + "2")


def test_long_decimals_have_keys_by_value():
    assert canonical("0.5" + "0" * 9_000) == "1/2"
    assert canonical("1," * 3 + "000," * 2_000 + "000") != canonical("1" + "000" * 2_003)
    assert exact_match_key("3" * 9_000 + ".0") == exact_match_key("3" * 9_000) == "3" * 9_000
    assert canonical("3" * 200_000) == "3" * 200_000
    assert extract_answer("\\boxed{" + "3" * 9_000 + "}") == "3" * 9_000


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TOWER, "5"),
        (TOWER, "0"),
        (f"\\frac{{1}}{{{TOWER}}}", "0"),
        (TOWER, f"-{TOWER}"),
        (TOWER, "-" + TOWER.replace("9", "8") + "^{-1}"),
        (f"\\frac{{1}}{{{TOWER}}}", "5"),
        (f"\\frac{{1}}{{{TOWER}}}", TOWER),
        (f"-{TOWER}+7", "\\frac{1}{7}"),
        (f"\\sqrt{{{TOWER}}}", "\\pi"),
        ("\\frac{9^{9^9}}{9^{9^9}}", "5"),
        ("2^{10000000}", "2^{10000001}"),
        ("2^{-10000000}", "2^{-10000001}"),  # tiny, and yet one is twice the other
        ("10^{10^{10}}", "10^{10^{10}+1}"),
        ("99999999!", "99999998!"),
        ("((1000!)!)!", "5"),
        ("e^{e^{e^{e}}}", "5"),
        ("\\binom{1000000}{500000}", "2^{1000000}"),
        ("(\\sin 3)^{10^{9}}", "\\frac{1}{7}"),
    ],
)
def test_constants_that_differ_for_certain(one: str, other: str):
    assert differ(parsed(one), parsed(other))
    assert differ(parsed(other), parsed(one))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TOWER, TOWER),
        (TOWER, "9^{9^{9^{9^{9}}}}"),  # both beyond
        ("2^{10000000}", "2^{10000000}+1"),
        ("2^{10000000}", "4^{5000000}"),
        ("\\frac{9^{9^9}}{9^{9^9}}", "1"),
        (f"\\frac{{{TOWER}}}{{{TOWER}}}", "5"),
        ("9^{9^9}-9^{9^9}", "0"),
        ("(e^{2^{51}})^{10^{-16}}", "e^{2^{51} \\cdot 10^{-16}}"),
        (f"0 \\cdot {TOWER}", "0"),
        ("9^{9^9}-9^{9^9}", "5"),
        ("9^{9^9}-(9^{9^9}-5)", "5"),
        (f"1^{{{TOWER}}}", "1"),
        (f"0^{{{TOWER}}}", "0"),
        (f"(1+9^{{-{TOWER}}})^{{{TOWER}}}", "1"),
        ("(1+10^{-30000})^{10^{30000}}", "e"),
        ("(1+10^{-30000})^{10^{30000}}", "2"),
        (f"(-1)^{{{TOWER}}}", "-1"),
        (f"\\sin({TOWER})", "0"),
        ("0 \\cdot 9^{9^9}", "0"),
        ("2^{-10000000}", "4^{-5000000}"),
        ("2", "3"),  # sympy computes these
        ("\\sqrt{2}", "\\sqrt{3}"),
        ("10!", "11!"),
        ("i^{10^{9}}", "1"),
    ],
)
def test_of_constants_that_may_be_equal_nothing_is_said(one: str, other: str):
    assert not differ(parsed(one), parsed(other))
    assert not differ(parsed(other), parsed(one))
