"""Predicates of a grid, as `model.d_model // model.heads >= 16`.

They consist of arithmetic and comparisons of keys; anything else is refused, and nothing is run.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from qkablate.errors import UserError, nearest_hint

_CONSTANTS = {"null": None, "true": True, "false": False}
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
    """Return whether the predicate is true of an arm's values; raise UserError if it is invalid."""
    try:
        if "\0" in predicate:  # whose error depends on the version of Python
            raise SyntaxError
        return bool(_value(ast.parse(predicate.strip(), mode="eval").body, values))
    except SyntaxError:
        reason = " is not an expression; write for instance model.d_model // model.heads >= 16"
    except (UserError, TypeError, ValueError, ArithmeticError) as error:
        reason = f": {error}"
    except (RecursionError, MemoryError):
        reason = " is too long or too deeply nested"
    text = " ".join(predicate.split())
    text = text if len(text) <= 80 else f"{text[:80]}…"
    raise UserError(f"sweep.filter: '{text}'{reason}")


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.Tuple() | ast.List():
            return [_value(item, values) for item in node.elts]
        case ast.Name() | ast.Attribute():
            name = ast.unparse(node)
            if name in _CONSTANTS:
                return _CONSTANTS[name]
            if name not in values:
                raise UserError(f"there is no key '{name}'{nearest_hint(name, values)}")
            return values[name]
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
                raise UserError("arithmetic needs numbers")
            return _BINARY[type(node.op)](left, right)
        case ast.Compare():
            sides = [_value(side, values) for side in (node.left, *node.comparators)]
            return all(
                _COMPARE[type(op)](left, right)
                for op, left, right in zip(node.ops, sides[:-1], sides[1:], strict=True)
                if type(op) in _COMPARE or _refuse(node)
            )
    return _refuse(node)


def _refuse(node: ast.expr) -> Any:
    raise UserError(
        f"'{ast.unparse(node)}' cannot be computed (allowed: keys, numbers,"
        " 'text', lists, + - * / // %, comparisons, in, and, or, not)"
    )
