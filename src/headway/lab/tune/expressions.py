"""Conditions and constraints over keys of a config, as `model.dim % model.heads == 0`; nothing else can be said."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

#: Longest expression, and largest exponent, so that no expression takes long.
_MOST_CHARACTERS = 500
_MOST_EXPONENT = 64

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, among: value in among,
    ast.NotIn: lambda value, among: value not in among,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}
#: Names that YAML writes in lower case.
_CONSTANTS = {"true": True, "false": False, "null": None}


class Expression:
    """An expression over keys: numbers, texts and lists, arithmetic, comparisons, `and`, `or`, `not`, `min`, `max`.

    Args:
        text: As it is written, with dotted keys in place of names.

    Raises:
        ValueError: it is not such an expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"an expression has at most {_MOST_CHARACTERS} characters")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"'{text}' is not an expression; write for example model.dim % model.heads == 0") from None
        self.keys = tuple(dict.fromkeys(self._keys(self._tree)))

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Return the value of the expression.

        Args:
            values: By dotted key; every key of the expression is among them.

        Raises:
            ValueError: it has no value for these, as after a division by zero.
        """
        try:
            return self._value(self._tree, values)
        except (TypeError, ArithmeticError) as error:
            raise ValueError(f"'{self.text}' has no value here: {error}") from None

    def _keys(self, node: ast.expr) -> list[str]:
        """Return the keys within a node, and check that nothing else is in it."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return []
            case ast.Name() | ast.Attribute():
                key = _dotted(node)
                if key is not None:
                    return [] if key in _CONSTANTS else [key]
            case ast.BoolOp(values=nodes) | ast.List(elts=nodes) | ast.Tuple(elts=nodes):
                return self._keys_of(nodes)
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=operand):
                return self._keys(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._keys_of([left, right])
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
                return self._keys_of([left, *others])
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
                return self._keys_of(arguments)
        raise ValueError(f"'{ast.unparse(node)}' has no meaning in an expression over keys")

    def _keys_of(self, nodes: list[ast.expr]) -> list[str]:
        return [key for node in nodes for key in self._keys(node)]

    def _value(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() | ast.Attribute():
                key = str(_dotted(node))
                return _CONSTANTS[key] if key in _CONSTANTS else values[key]
            case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
                return [self._value(one, values) for one in nodes]
            case ast.BoolOp(op=ast.And()):
                return all(self._value(one, values) for one in node.values)
            case ast.BoolOp():
                return any(self._value(one, values) for one in node.values)
            case ast.UnaryOp(op=ast.Not()):
                return not self._value(node.operand, values)
            case ast.UnaryOp(op=ast.USub()):
                return -self._value(node.operand, values)
            case ast.UnaryOp():
                return self._value(node.operand, values)
            case ast.BinOp():
                return _combined(type(node.op), self._value(node.left, values), self._value(node.right, values))
            case ast.Compare():
                sides = [self._value(one, values) for one in (node.left, *node.comparators)]
                pairs = zip(node.ops, sides, sides[1:], strict=False)
                return all(_COMPARISONS[type(op)](left, right) for op, left, right in pairs)
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name), "nothing else passes `_keys`"
        return _FUNCTIONS[node.func.id](*(self._value(one, values) for one in node.args))


def _dotted(node: ast.expr) -> str | None:
    """Return the dotted key that names and attributes spell; None if they spell none."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return None
    before = _dotted(node.value)
    return None if before is None else f"{before}.{node.attr}"


def _combined(kind: type[ast.operator], left: Any, right: Any) -> Any:
    """Compute with two numbers; texts and lists cannot grow here."""
    for side in (left, right):
        if not isinstance(side, int | float):
            raise TypeError(f"{side!r} is not a number")
    if kind is ast.Pow and abs(right) > _MOST_EXPONENT:
        raise OverflowError(f"an exponent is at most {_MOST_EXPONENT}")
    return _BINARY[kind](left, right)
