import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.search.grading.answers import boxed, canonical, extract_answer, extract_gold


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{85}.", "85"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{ x^{2^{3}} }", "x^{2^{3}}"),
        (r"\boxed{7\;}", r"7\;"),
        (r"First \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{}", ""),
        ("a\n\\boxed{multi\nline}", "multi\nline"),
    ],
)
def test_the_last_complete_box_is_the_answer(text: str, answer: str):
    assert boxed(text).answer == answer
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \fbox{5}.", "5"),
        (r"\boxed {5}", "5"),
        (r"$\boxed 18$ dollars", "18"),
        (r"\boxed5", "5"),
        (r"\boxed-5.", "-5"),
        (r"\boxed\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed(3, 4)", "(3, 4)"),
        (r"\boxed{5}, as asked in \boxed{}", "5"),
        (r"\boxed{x=2} and \boxed{x=3}", "x=2, x=3"),
        (r"$\boxed{2}$, $\boxed{3}$", "2, 3"),
        (r"\boxed{2}, that is, \boxed{2}", "2"),
        (r"\boxed{3/2} or \boxed{1.5}", "3/2"),
        (r"\boxed{17}. No, wait. \boxed{18}", "18"),
        (r"Put it in \boxed notation", ""),
        (r"\boxed{18", ""),
        (r"\boxed{18}\text{ dollars}", "18"),
        (r"\boxed{1} \quad \text{and} \quad \boxed{2}", "1, 2"),
        (r"x=\boxed{1},\quad y=\boxed{2}", "x=1, y=2"),
        (r"x_1=\boxed{1},\quad x_1=\boxed{2}", "1, 2"),
        ("x = \\boxed{1}\n\nf(1) = \\boxed{2}", "x=1, f(1)=2"),
        (r"\begin{align} x&=\boxed{1}\\ y&=\boxed{2} \end{align}", "x=1, y=2"),
        ("\\boxed{1}\n\\boxed{2}", "1, 2"),
        ("\\boxed{x+1}\n\\boxed{1+x}", "1+x"),
        ("\\boxed{x}\n\nso\n\n\\boxed{y}", "y"),
        (r"\boxed 1 und \boxed 2", "1, 2"),
        (r"\boxed{\boxed{18}}", "18"),
    ],
)
def test_boxes_of_other_kinds_are_read(text: str, answer: str):
    assert extract_answer(text) == answer


def test_of_many_boxes_beside_one_another_the_last_sixteen_are_the_answer():
    text = ", ".join(f"\\boxed{{{number}}}" for number in range(1, 21))
    assert extract_answer(text) == ", ".join(map(str, range(5, 21)))
    assert extract_answer(text.replace("\\boxed{5}", "then \\boxed{5}")) == ", ".join(map(str, range(5, 21)))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>\n```python\nreturn a + b\n```\n</answer>", "return a + b"),
        ("<answer>\ndef f(x):\n    return x + 1\n</answer>", "def f(x):\n    return x + 1"),
        ("<answer>Two files:\n```\na = 1  \n```\nand\n~~~py\nb()\n~~~\n</answer>", "a = 1\n\nb()"),
        ('<answer>print("a b c d e f")</answer>', 'print("a b c d e f")'),
        ("The answer is:\n```python\nprint(5)\n```\nIt prints 5.", "print(5)"),
        ("**Answer:**\n\n~~~\nint main() {\n  return 0;\n}\n~~~", "int main() {\n  return 0;\n}"),
        ("Answer: 6. No, the answer is this program:\n```\nx = 5\nprint(x)\n```", "x = 5\nprint(x)"),
        ("答案：\n```python\nprint(5)\n```", "print(5)"),
        ("The answer is:\n```\n42\n```", "42"),
        ("<answer>\n```latex\n\\boxed{5}\n```\n</answer>", "5"),
        ("The answer is 5. As a program, the answer is:\n```python\nprint(", ""),
        ("The answer is:\n```python\n" + "x += 1\n" * 400 + "```", "\n".join(["x += 1"] * 400)),
        ("<answer>We add a and b; then we return it.</answer>", ""),
    ],
)
def test_a_program_is_the_answer_without_its_fence(text: str, answer: str):
    assert extract_answer(text) == answer


def test_a_gold_answer_may_be_a_program():
    program = "def f(x):\n    return x + 1"
    assert extract_gold(program) == extract_gold(f"```python\n{program}\n```\n") == program
    assert extract_gold("She has 9; then\n9 * 2 = 18 (coins);\n#### 18") == "18"


def test_programs_vote_by_their_texts():
    texts = ["return a + b", "return a - b", "return a + b "]
    paths = [f"<answer>\n```python\n{text}\n```\n</answer>" for text in texts]
    one, other, again = (canonical(extract_answer(path)) for path in paths)
    assert one == again != other
    assert canonical("if a:\n    b()\nc()") != canonical("if a:\n    b()\n    c()")
    assert canonical("print('A')") != canonical("print('a')")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"I get \boxed{5} first. But checking, it must be \boxed{6", ""),
        (r"\boxed{5}, \boxed{6", ""),
        ("The answer is 5.\n#### 5\nIn a box: \\boxed{5", ""),
        (r"\boxed{\text{5 km}. So the answer is 6.", "6"),
        ("\\boxed{5\n\n#### 6", "6"),
        (r"\boxed{5} as asked: in \boxed, in \boxed{}", "5"),
        (r"<answer>\boxed{5}</answer> Again: \boxed{", ""),
        (r"\boxed{6 <answer>5</answer>", "5"),
    ],
)
def test_a_box_that_is_not_closed_ends_what_stands_before_it(text: str, answer: str):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>18</answer>", "18"),
        ("<answer>\n18 dollars\n</answer>", "18 dollars"),
        (r"\boxed{17} <answer>\boxed{18}</answer>", "18"),
        (r"<think>\boxed{17}</think><answer>18</answer>", "18"),
        (r"<answer>17</answer> or rather \boxed{18}", "18"),
        ("<answer>17</answer><answer>18</answer>", "18"),
        ("<answer>17</answer> <answer>18", "17"),
        ("<Answer>The answer is (B).</Answer>", "B"),
        ("<answer>We add all that there is to add and see.</answer>", ""),
        ("</answer>18<answer>", ""),
    ],
)
def test_the_last_answer_between_tags_is_read(text: str, answer: str):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 18 dollars", "18 dollars"),
        ("#### $18$", "18"),
        ("#### x = 18", "x = 18"),
        ("#### (B)", "B"),
        ("#### \\frac{1}{2}", "\\frac{1}{2}"),
        ("#### 18 because 9*2=18", "18"),
        ("#### 17\n#### 18", "18"),
        ("#### 3. Add the parts", ""),
        ("#### 2 Solution", ""),
        ("#### Solution", ""),
        ("The answer is 18 dollars.", "18 dollars"),
        ("The answer is 18 fresh duck eggs per day.", "18 fresh duck eggs per day"),
        ("The answer is 18 because nine and nine make 18.", "18"),
        ("The answer is 18 - because she sells nine.", "18"),
        ("The answer is 18 (since $9*2=18$).", "18"),
        ("The answer is 18, so we are done.", "18"),
        ("The answer is 18 given that she sells nine.", "18"),
        ("The answer should be 18.", "18"),
        ("The answer is $18 dollars$.", "18 dollars"),
        ("The answer is no solution.", "no solution"),
        ("The answer is no solution that we could find in the time", ""),
    ],
)
def test_units_and_reasons_after_an_answer_do_not_hide_it(text: str, answer: str):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text", ["", "no box", r"\boxed", r"\boxed as asked", r"\boxed{5", "boxed{5}"])
def test_without_a_complete_box_there_is_none(text: str):
    assert boxed(text).answer == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("38+47=85\n#### 85", "85"),
        ("#### 1\n#### 1,234 ", "1,234"),
        ("The answer is 42.", "42"),
        ("the final answer is: $\\frac{3}{4}$.", r"\frac{3}{4}"),
        ("The answer is 3.5. We are done.", "3.5"),
        ("The Answer is 1.\nNo, the answer is 2.\n", "2"),
        ("The answer is\n7", "7"),
        ("There is no answer", ""),
        ("", ""),
    ],
)
def test_other_spellings_of_an_answer_are_found(text: str, answer: str):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{\textbf{(A)}}", "A"),
        (r"\boxed{\textbf{(A) }}", "A"),
        (r"\boxed{\mathrm{D}.}", "D"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{E}", "E"),
        ("The answer is (B).", "B"),
        ("The answer is **(B)**.", "B"),
        ("The answer is $(B)$.", "B"),
        ("The answer is (B) because both are even.", "B"),
        ("The answer is (B) 42.", "B"),
        ("The answer is option D", "D"),
        ("So the correct option is (D).", "D"),
        ("Answer: C", "C"),
        ("Answer: C) 42", "C"),
        ("**Answer:** B. Paris", "B"),
    ],
)
def test_a_choice_comes_as_its_letter(text: str, answer: str):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{(A, B)}", "(A, B)"),
        (r"\boxed{\textbf{(C)}\ 25}", r"\textbf{(C)}\ 25"),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
        (r"\boxed{X}", "X"),
        ("The answer is A + B.", "A + B"),
        ("The answer is (A) and (C).", "(A) and (C)"),
    ],
)
def test_what_only_looks_like_a_choice_stays_whole(text: str, answer: str):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 42", "42"),
        ("answer = 42.", "42"),
        ("**Answer:** 42", "42"),
        ("**Answer: 42**", "42"),
        ("**Final Answer:** **42**.", "42"),
        ("### Answer\n42", "42"),
        ("**Final Answer**\n\n$42$", "42"),
        ("Answer: `42`", "42"),
        ("The answer is 2**3.", "2**3"),
        ("Answer: 5!", "5!"),
        ("The answer is $5.50.", "5.50"),
        (r"The answer is \$18.", "18"),
        ("#### $1,234", "1,234"),
        ("#### **-42**", "-42"),
        ("#### 25%", "25%"),
        (r"\boxed{$5$}", "5"),
        (r"\boxed{5.}", "5"),
        (r"The answer is \(x^2\).", "x^2"),
        ("The answer is\n\\[\n42\n\\]", "42"),
        ("The answer is $x=2$ or $x=3$.", "x=2 or x=3"),
        ("The answer is $7$, as we saw.", "7"),
        ("The answer is 42, because 6*7=42.", "42"),
        ("The answer, therefore, is 42.", "42"),
        ("The answer to the question is 42.", "42"),
        ("The answer is therefore 42.", "42"),
        ("The answer is (3, 4).", "(3, 4)"),
        ("The answer is Evelyn.", "Evelyn"),
        ("Final Answer: The final answer is $5$. I hope it is correct.", "5"),
        ("The answer is 4. The answer is not 5.", "4"),
    ],
)
def test_markdown_dollars_and_punctuation_are_no_part_of_an_answer(text: str, answer: str):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "so 6*7=42",
        "42",
        "The answer is not obvious.",
        "The answer is obtained by adding 3 and 4.",
        "The answer is the number of ways, which is 12.",
        "The answer is that Tom has 5 coins.",
        "The answer is $5 and she has $3 left.",
        "Answer:\nTo find it we add 3 and 4.",
        "### Answer\nWe see that it is 5",
        "What is the answer? It may be 5.",
        "Now check the answer: it should be 5.",
        "Both answers: 5",
        "#### Step 1: add 3 and 4",
        "The answer is .",
        "Answer: $[$",
        "The answer is",
    ],
)
def test_a_text_that_states_no_answer_gives_none(text: str):
    assert extract_answer(text) == ""


@given(st.text("answer is:\n$*#([{\\}])AB5,. ", max_size=60))
def test_of_any_text_an_answer_is_a_part_without_space_around_it(text: str):
    answer = extract_answer("Answer: " + text)
    assert answer == answer.strip()
    assert not answer or any(c.isalnum() for c in answer)


def test_a_box_counts_before_hashes_and_hashes_before_words():
    assert extract_answer("the answer is 1\n#### 2\n\\boxed{3}\nthe answer is 4") == "3"
    assert extract_answer("#### 2\nthe answer is 4") == "2"


nested = st.recursive(st.sampled_from(["1", "x", r"\frac"]), lambda inner: inner.map(lambda s: "{" + s + "}") | inner)


@given(st.lists(nested, min_size=1, max_size=5).map("".join), st.text("ab {}", max_size=5))
def test_any_balanced_content_comes_out_whole(content: str, before: str):
    assert boxed(before + "\\boxed{" + content + "}").answer == content


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("85", " 85. "),
        ("$85$", "85"),
        ("1,234,567", "1234567"),
        ("0.5", "1/2"),
        (".50", "2/4"),
        ("+3", "3.0"),
        ("-0", "0"),
        (r"\dfrac{1}{2}", r"\tfrac{1}{2}"),
        ("x + 1", "x+1"),
        (r"1\!234", "1234"),
        (r"\text{(C)}", "C"),
        (r"\$5", "5"),
    ],
)
def test_equal_answers_meet(one: str, other: str):
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"), [("85", "86"), ("-1", "1"), ("1,2", "12"), ("x", "X"), ("0.3333", "1/3"), ("1/0", "0"), ("", "0")]
)
def test_different_answers_stay_apart(one: str, other: str):
    assert canonical(one) != canonical(other)


@given(st.text(max_size=20))
def test_canonical_takes_any_text_and_ignores_space_around_it(text: str):
    assert canonical(f" {text}\n") == canonical(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1, 200", "1200"),
        ("2 1/2", "21/2"),
        ("1 2", "12"),
        ("(1,200)", "(1200)"),
        (r"\{1,200\}", r"\{1200\}"),
        ("1,200,3", "1200,3"),
        ("3,100,200", "3100,200"),
    ],
)
def test_what_may_be_several_numbers_is_not_one(one: str, other: str):
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize("text", ["1,200", " $1,200$ ", "1,\\!200", "\\$1,200", "1,200.0"])
def test_commas_of_thousands_are_no_difference(text: str):
    assert canonical(text) == canonical("1200")


LONG = 100_000


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 7" + " " * LONG + "x", "7"),
        ("The answer is 7." + "\n" * LONG, "7"),
        ("#### 1" + "." * LONG + "x", ""),
        ("#### 1" + " " * LONG + "x", ""),
        ("#" * LONG + "x", ""),
        ("\\boxed{" * (LONG // 7), ""),
        ("\\boxed{3}" + "\\boxed{" * (LONG // 7), ""),
        ("\\boxed{3}, " * (LONG // 11), "3"),
        ("x=\\boxed{3}\\quad " * (LONG // 17), "3"),
        ("\\boxed{3" + "0" * LONG + "}", "3" + "0" * LONG),
        ("答案" * (LONG // 2), ""),
        ("respuesta " * (LONG // 10), ""),
        ("答案是不对" * (LONG // 5), ""),
        ("✅" * LONG, ""),
        ("Answer: 5" + "✅" * LONG, "5"),
        ("<b>" * (LONG // 3) + "5", ""),
        ("\\boxed{7" + "." * LONG + "x}", "7" + "." * LONG + "x"),
        ("answer to the" + " " * LONG + "x", ""),
        ("\\boxed{7" + ". " * LONG + "}", "7"),
        ("\\boxed{2} and " * (LONG // 10), "2"),
        ("\\boxed " * (LONG // 7), ""),
        ("<answer>" * (LONG // 8) + "</answer>", ""),
        ("</answer>" * (LONG // 9), ""),
        ("#### 1 egg\n" * (LONG // 9), "1 egg"),
        ("#### and so on\n" * (LONG // 9), ""),
        ("the answer is not that " * (LONG // 10), ""),
        ("the answer is 1 " * (LONG // 10), "1"),
    ],
    ids=range(27),
)
def test_long_repetitions_are_read_in_time(text: str, answer: str):
    """With a method whose time grows as the square of the text these would run for hours."""
    assert extract_answer(text) == answer
    canonical(text)
