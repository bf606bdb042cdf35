"""Python statements and the roles of their names."""

import sys

import pytest

from qkablate.data.pairs.roles import read_statements, read_typed_statements

TAGGED = {
    "self.total = add(x, by=n)": "self/value . total/attribute = add/call ( x/argument , by/keyword"
    " = n/argument )",
    "def area(width, height=unit):": "def area/function ( width/parameter , height/parameter ="
    " unit/value ) :",
    "async def run(*, job: Job):": "async def run/function ( * , job/parameter : Job/value ) :",
    "class Cat(Animal):": "class Cat/class ( Animal/value ) :",
    "for x, y in rows.items():": "for x/target , y/target in rows/value . items/method ( ) :",
    "key = lambda row: row[key]": "key/target = lambda row/parameter : row/value [ key/value ]",
    "from os import path, sep": "from os import path/import , sep/import",
    "x = f(g(y) + 1.5, 'a b')": "x/target = f/call ( g/call ( y/argument ) + <number> , <string> )",
    "x = f'{a + b}' 'c' + y": "x/target = <string> <string> + y/value",
    "with open(name) as file: pass": "with open/call ( name/argument ) as file/target : pass",
    "del x[i], y": "del x/value [ i/value ] , y/value",
}


def tagged(source):
    return [
        " ".join(
            word + f"/{tag.strip('<>')}" * (tag != "<>")
            for word, tag in zip(words.split(), tags.split(), strict=True)
        )
        for words, tags in read_statements(source.encode())
    ]


@pytest.mark.parametrize("line", TAGGED)
def test_roles_of_names(line):
    source = f"{line}\n    pass" if line.endswith(":") else line
    indented = "".join(f"    {part}\n" for part in source.splitlines())
    assert tagged(source)[:1] == [TAGGED[line]]
    assert tagged(f"if t:\n{indented}")[:1] == [TAGGED[line]]


SOURCE = """\
'''A docstring without names.'''
naïve = first(  # a comment, ∑
    'ü', second)

def f(a):  # ∑
    return a
x
x = 1; y = z
@cache
"""


def test_statements_span_lines_and_leave_out_comments():
    assert tagged(SOURCE.rpartition("@")[0]) == [
        "naxve/target = first/call ( <string> , second/argument )",
        "def f/function ( a/parameter ) :",
        "x/target = <number> ; y/target = z/value",
    ]


def test_files_that_are_no_python_are_skipped():
    assert tagged(SOURCE) == []  # a decorator of nothing
    assert tagged("def f(:") == []
    assert tagged("x = \0y + z") == []


def test_long_and_short_statements_are_left_out():
    calls = [f"f({', '.join(['x'] * n)})" for n in (14, 15)]  # of 30 words, and of 32
    calls.append(f"f({', '.join(['x'] * 16)})")
    assert [len(words.split()) for words in tagged("\n".join(calls))] == [30, 32]
    assert tagged("x = y\nreturn_ = x . y") == ["return_/target = x/value . y/attribute"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x", [("x", "<value>")]),
        ("return f(x)", [("return f ( x )", "<> <call> <> <argument> <>")]),
        ("f ( <number> , <string> )", [("f ( <number> , <string> )", "<call> <> <> <> <> <>")]),
        ("for x in <unknown> :", [("for x in _unknown_ :", "<> <target> <> <value> <>")]),
        ("x = 1\n  ", [("x = <number>", "<target> <> <>")]),
        ("if x:\n    y", [("if x :", "<> <value> <>"), ("y", "<value>")]),
        ("f(x)  # note:", [("f ( x )", "<call> <> <argument> <>")]),
        ("if x:  # why", [("if x :", "<> <value> <>")]),
        ("1 +", []),
        ("1 + 2", []),
    ],
)
def test_typed_statements_are_python_or_words_of_the_data(text, found):
    """They may be of any length."""
    assert read_typed_statements(text) == found


@pytest.mark.skipif(sys.version_info < (3, 14), reason="template strings")
def test_template_strings_are_one_word():
    assert tagged("x = f(t'{y}')") == ["x/target = f/call ( <string> )"]
