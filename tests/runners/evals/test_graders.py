"""Answers in texts: the tables of the specification, verbatim."""

import pytest

from ling3export.runners.evals.graders import choice_letter, extract_answer, gold_answer, same_number

NUMBERS = [
    ("The answer is 1,234.", "1234"),
    ("so 5-3", "3"),  # a minus after a digit is not a sign
    ("-$5", "-5"),
    ("$18.00", "18.00"),
    ("ratio 3/4", "4"),  # the last number, by definition
    ("72.", "72"),
    ("50%", "50"),
    ("1,23", "23"),
    ("= -7", "-7"),
    ("\u22125", "-5"),
    ("共3个", "3"),
    ("１２", "12"),
    ("x12", None),
    ("no", None),
    ("Answer: 42\n\nQuestion: 7 apples", "7"),  # unless a stop string cut it
    ("", None),
    ("\u20135", "-5"),
    ("costs .5", ".5"),
    ("1,234,567 and 8", "8"),
    ("1,234,567", "1234567"),
    ("€ 5", "5"),
    ("so $1{,}234$", "1234"),  # LaTeX
    (r"\boxed{1{,}234{,}567}", "1234567"),
    ("10²", None),  # was 102; a power is not computed, as 3/4 is not
    ("2^{10}", None),
    ("10^2", None),
    ("10² = 100", "100"),
    ("12 m²", "12"),
    ("x² + 7", "7"),
    (r"so $1\,234$", "1234"),  # was 234, as the next ones
    ("1'000 or 1’234’567", "1234567"),
    ("18\u00a0000", "18000"),
    ("18\u202f000\u202f000 €", "18000000"),
    ("in 2024\u00a012 of them", "12"),
    ("_18_", "18"),  # was none
    ("x_1", None),
    ("- 5", "-5"),  # was 5
    ("x = - 5", "-5"),
    ("x = − $5", "-5"),
    (r"\boxed{- 5}", "-5"),  # was 5, as the next ones
    ("so $- 5$", "-5"),
    ("**- 5**", "-5"),
    ("2 - 7\n#### - 5", "-5"),
    ("7 - 5", "5"),
    ("3$ - 5", "5"),
    ("**7** - 5", "5"),
    ("The answer is - 5 of them", "5"),  # a dash
    ("they are\n- 4\n- 5", "5"),  # list items
    ("1.5e-3", "1.5e-3"),  # was 3
    ("2E5", "2E5"),
    ("3e", "3"),
    ("3½", "3.5"),  # was 2
    ("3 ¾ cups", "3.75"),
    ("½", "0.5"),
    ("2 and ⅓", None),  # was 3
    ("they are:\n- 5\n", "5"),
]
LETTERS = [
    ("The answer is (C).", "C"),
    ("the answer is: B", "B"),
    ("答案：E", "E"),
    ("答案是F", "F"),
    ("**Answer:** G", "G"),
    ("The answer is: **(H)**", "H"),
    ("so\nB.", "B"),
    ("both (C) and (D)", "D"),
    ("The answer is A. Wait, the answer is (J).", "J"),
    ("The answer is a good one", None),
    ("answer is Both", None),
    ("The answer is K", None),
    ("maybe A or B", None),
    ("I think it is a good one", None),
    ("", None),
    (r"\boxed{C}", "C"),
    (r"The answer is $\boxed{\text{D}}$", "D"),
    ("The answer is I think (C)", "C"),  # was I
    ("The answer is: I'm not sure", None),
    ("The answer is I.", "I"),
    ("The answer is (I) I think", "I"),
]


@pytest.mark.parametrize(("text", "answer"), NUMBERS)
def test_last_number(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(("text", "letter"), LETTERS)
def test_letter_of_a_choice(text, letter):
    assert choice_letter(text) == letter


def test_letters_beyond_the_choices_are_skipped():
    assert choice_letter("The answer is B. No, the answer is J.", 4) == "B"
    assert choice_letter("The answer is J. Or (C).", 4) == "C"  # the first stage finds no valid letter


def test_numbers_compare_as_decimals():
    assert same_number("18", "18.00")
    assert same_number("0.1", ".10")
    assert same_number("1.5e-3", "0.0015")
    assert not same_number("0.30000000000000004", "0.3")
    assert not same_number(None, "1")
    assert not same_number(None, None)


def test_gold_is_after_the_last_mark():
    assert gold_answer("She has 48/2 = <<48/2=24>>24.\n#### 1,072") == "1072"
    assert gold_answer("18") == "18"
    assert gold_answer("#### 3 #### 4") == "4"
