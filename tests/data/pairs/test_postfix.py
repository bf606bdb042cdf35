"""Python expressions to postfix notation."""

import ast

import pytest

from qkablate.data.pairs.postfix import postfix, read_expressions

NOTATIONS = {
    "a + b * c": "a b c * +",
    "(a + b) * c": "a b + c *",
    "f(x + 1, y)[0]": "f x 1 + y 2() 0 []",
    "print(x, file=out.err)": "print x out .err file= 2()",
    "not a and b or -c": "a not b and c neg or",
    "a and b and c": "a b c and and",
    "x not in (1, 2)": "x 1 2 2, not-in",
    "'a b' if n is None else [n]": "n None is 'a b' n 1[] ?:",
    "f(0x1F, b'\\n')": "f 0x1F b'\\n' 2()",
}


def notation(text):
    words = postfix(ast.parse(text, mode="eval").body, text.encode())
    return words and " ".join(words)


@pytest.mark.parametrize("text", NOTATIONS)
def test_postfix_notation(text):
    assert notation(text) == NOTATIONS[text]


@pytest.mark.parametrize("text", ["x[1:2]", "a < b < c", "f(*x)", "f(**x)", "[x for x in y]", "{}"])
def test_expressions_without_a_notation(text):
    assert notation(text) is None


SOURCE = """\
total = (first +
         second) + long_name[index]  # ∑
text = f"{not_in_here + 1}" + name.upper()
é = über + value
x = a + b
z = very_long_name_a + very_long_name_b + very_long_name_c + very_long_name_d + very_long_name_e
"""


def test_expressions_of_one_line_and_of_some_length_are_read():
    pairs = dict(read_expressions(SOURCE.encode()))
    assert pairs["long_name[index]"] == "long_name index []"
    assert pairs["name.upper()"] == "name .upper 0()"
    assert all(8 <= len(text) <= 96 >= len(target) for text, target in pairs.items())
    assert not {text for text in pairs if "\n" in text or "not_in_here" in text or "über" in text}


def test_what_is_no_python_is_skipped():
    assert [*read_expressions(b"def :")] == [*read_expressions(b"x = 1 + \0 1")] == []
