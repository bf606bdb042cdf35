"""Pairs from Python sources: expressions and their postfix notation.

    f(x + 1, y)[0]  →  f x 1 + y 2() 0 []

Names and constants stand as they are written. A number precedes the mark of what has as many parts:
`2()` is a call of two arguments, `3,` a tuple, `3[]` a list.
"""

import ast
from collections.abc import Iterator, Sequence

SHORTEST, LONGEST = 8, 96  # characters of an expression; its notation is no longer
_OPERATORS: dict[type[ast.AST], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//"},
    **{ast.Mod: "%", ast.Pow: "**", ast.MatMult: "@", ast.LShift: "<<", ast.RShift: ">>"},
    **{ast.BitOr: "|", ast.BitAnd: "&", ast.BitXor: "^", ast.And: "and", ast.Or: "or"},
    **{ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
    **{ast.In: "in", ast.NotIn: "not-in", ast.Is: "is", ast.IsNot: "is-not"},
    **{ast.Not: "not", ast.Invert: "~", ast.USub: "neg", ast.UAdd: "pos"},
}
_ROOTS = (ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.IfExp, ast.Subscript, ast.UnaryOp)


def read_expressions(source: bytes) -> Iterator[tuple[str, str]]:
    """Yield the expressions of a file that stand in one line, and their postfix notation."""
    try:
        nodes: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):  # as in templates
        return
    lines = source.split(b"\n")
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.JoinedStr):  # positions inside are not those of the file
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, _ROOTS) and node.lineno == node.end_lineno:
            line = lines[node.lineno - 1]
            text = line[node.col_offset : node.end_col_offset].decode("utf-8", "replace")
            if SHORTEST <= len(text) <= LONGEST and text.isascii() and text.isprintable():
                words = postfix(node, line)
                if words is not None and len(target := " ".join(words)) <= LONGEST:
                    yield text, target


def postfix(node: ast.AST, line: bytes) -> list[str] | None:
    """Return the words of the notation of an expression in a line; None if it has none."""
    match node:
        case ast.Name() | ast.Constant():
            return [line[node.col_offset : node.end_col_offset].decode()]
        case ast.Attribute(value, name):
            return _join([value], [f".{name}"], line)
        case ast.BinOp(left, operator, right) | ast.Compare(left, [operator], [right]):
            return _join([left, right], [_OPERATORS[type(operator)]], line)
        case ast.UnaryOp(operator, operand):
            return _join([operand], [_OPERATORS[type(operator)]], line)
        case ast.BoolOp(operator, values):
            return _join(values, [_OPERATORS[type(operator)]] * (len(values) - 1), line)
        case ast.IfExp(test, body, orelse):
            return _join([test, body, orelse], ["?:"], line)
        case ast.Subscript(value, index):
            return _join([value, index], ["[]"], line)
        case ast.Tuple(parts):
            return _join(parts, [f"{len(parts)},"], line)
        case ast.List(parts):
            return _join(parts, [f"{len(parts)}[]"], line)
        case ast.Call(function, arguments, keywords):
            count = len(arguments) + len(keywords)
            return _join([function, *arguments, *keywords], [f"{count}()"], line)
        case ast.keyword(str(name), value):
            return _join([value], [f"{name}="], line)
        case _:  # such as lambda, comprehensions, slices
            return None


def _join(parts: Sequence[ast.AST], marks: list[str], line: bytes) -> list[str] | None:
    words: list[str] = []
    for part in parts:
        if (own := postfix(part, line)) is None:
            return None
        words += own
    return words + marks
