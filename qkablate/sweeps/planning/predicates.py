"""Predicates of a grid: `model.d_model // model.heads >= 16`. Arithmetic and comparisons of keys,
and nothing that could do anything else.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from qkablate.errors import UserError, nearest

_WORDS = {"null": None, "true": True, "false": False}
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


def holds(predicate: str, values: Mapping[str, Any]) -> bool:
    """Whether the predicate is true of an arm's values; UserError for what is no predicate."""
    try:
        return bool(_value(_parsed(predicate), values))
    except UserError as mistake:
        raise UserError(f"sweep.where: '{_line(predicate)}': {mistake}") from None
    except SyntaxError:
        raise UserError(
            f"sweep.where: '{_line(predicate)}' cannot be read; write for instance"
            " model.d_model // model.heads >= 16"
        ) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"sweep.where: '{_line(predicate)}': {error}") from None
    except (RecursionError, MemoryError):
        raise UserError(f"sweep.where: '{_line(predicate)}' is too long to be read") from None


def _parsed(predicate: str) -> ast.expr:
    if "\0" in predicate:  # which Pythons tell in several ways
        raise SyntaxError
    return ast.parse(predicate.strip(), mode="eval").body


def _line(predicate: str) -> str:
    """What is told of it: one line, and not all of one without end."""
    text = " ".join(predicate.split())
    return text if len(text) <= 80 else f"{text[:80]}…"


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.Tuple() | ast.List():
            return [_value(item, values) for item in node.elts]
        case ast.Name() | ast.Attribute():
            return _key(ast.unparse(node), values)
        case ast.BoolOp():
            parts = (_value(part, values) for part in node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, values)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, values)
        case ast.BinOp() if type(node.op) in _BINARY:
            left, right = _value(node.left, values), _value(node.right, values)
            if isinstance(left, str | list) or isinstance(right, str | list):
                raise UserError("only numbers can be reckoned with")
            return _BINARY[type(node.op)](left, right)
        case ast.Compare():
            sides = [_value(side, values) for side in (node.left, *node.comparators)]
            return all(
                _COMPARE[type(op)](left, right)
                for op, left, right in zip(node.ops, sides[:-1], sides[1:], strict=True)
                if type(op) in _COMPARE or _refuse(node)
            )
    return _refuse(node)


def _key(name: str, values: Mapping[str, Any]) -> Any:
    if name in _WORDS:
        return _WORDS[name]
    if name not in values:
        raise UserError(f"there is no key '{name}'{nearest(name, values)}")
    return values[name]


def _refuse(node: ast.expr) -> Any:
    raise UserError(f"'{ast.unparse(node)}' is no comparison or sum of keys and numbers")
