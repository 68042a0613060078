"""Expressions in a saved program, which torch evaluates as Python: the few forms that sizes and guards need."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache

from partita.graphs.archives import expression_names as names

__all__ = ["expression_fault", "guard_fault"]

#: Longer than the size of any tensor is written down, and deeper than any power in it.
_MOST_LETTERS = 20_000
_MOST_DIGITS = 40
_LARGEST_EXPONENT = 64
_DEEPEST_POWER = 2


@lru_cache(maxsize=1 << 14)
def expression_fault(text: str) -> str | None:
    """What is wrong with the text of a symbolic size, which reaches `sympy.sympify`; None if nothing is."""
    return _fault(text, _Grammar())


@lru_cache(maxsize=1 << 12)
def guard_fault(text: str) -> str | None:
    """What is wrong with the text of a check on inputs, which becomes a part of a Python function."""
    return _fault(text, _GuardGrammar())


def _fault(text: str, grammar: _Grammar) -> str | None:
    if len(text) > _MOST_LETTERS:
        return f"it has {len(text)} letters"
    if not text.isprintable() or "#" in text:
        return "it has lines or comments"
    try:
        grammar.check(ast.parse(text, mode="eval").body)
    except _FormError as error:
        return str(error)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it is no expression: {type(error).__name__}"
    return None


class _FormError(Exception):
    """A form that no expression needs."""


class _Grammar:
    """Numbers, symbols, arithmetic, comparisons, and calls of known functions on them."""

    def __init__(self) -> None:
        self.power_depth = 0

    def check(self, node: ast.expr) -> None:
        match node:
            case ast.BinOp(left=left, op=ast.Pow() | ast.LShift(), right=right):
                self._check_power(left, right)
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _ARITHMETIC):
                self.check_all((left, right))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
                self.check(operand)
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts):
                self.check_all(parts)
            case ast.Compare(left=left, ops=ops, comparators=others) if all(isinstance(op, _COMPARISONS) for op in ops):
                self.check_all((left, *others))
            case ast.IfExp(test=test, body=body, orelse=other):
                self.check_all((test, body, other))
            case ast.Constant(value=bool() | int() | float() as value) if len(repr(value)) <= _MOST_DIGITS:
                pass
            case ast.Name(id=name) if names.SYMBOL.fullmatch(name) or name in names.CONSTANTS:
                pass
            case ast.Call(func=ast.Name(id=name)) if name in names.ATOMS:
                _check_atom(name, node)
            case ast.Call(func=ast.Name(id=name), args=[base, exponent], keywords=[]) if name in names.POWERS:
                self._check_power(base, exponent)
            case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if _is_function(name):
                self.check_all(parts)
            case _:
                raise _FormError(f"{ast.unparse(node)[:80]!r} has no place in it")

    def check_all(self, nodes: Iterable[ast.expr]) -> None:
        for node in nodes:
            self.check(node)

    def _check_power(self, base: ast.expr, exponent: ast.expr) -> None:
        """A power is computed at once where both are numbers, so it must stay small."""
        self.power_depth += 1
        if self.power_depth > _DEEPEST_POWER:
            raise _FormError("it raises powers to powers")
        self.check_all((base, exponent))
        number = _number(exponent)
        if number is None and not _is_symbol(exponent):
            raise _FormError(f"the exponent {ast.unparse(exponent)[:80]!r} is neither a number nor a symbol")
        if number is not None and abs(number) > _LARGEST_EXPONENT:
            raise _FormError(f"the exponent {ast.unparse(exponent)[:80]!r} is too large")
        self.power_depth -= 1


class _GuardGrammar(_Grammar):
    """The same on the inputs of the program: `L['x'].size()[0]`."""

    def check(self, node: ast.expr) -> None:
        match node:
            case ast.Subscript(value=value, slice=ast.Constant(value=int() | str() as place)) if _is_plain(place):
                self._check_input(value)
            case ast.Attribute(value=ast.Name(id="math"), attr="inf" | "nan"):
                pass
            case ast.Attribute(value=value, attr=name) if not name.startswith("_"):
                self._check_input(value)
            case ast.Constant(value=str() as text) if _is_plain(text):
                pass
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]) if name in names.QUESTIONS:
                self._check_input(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name), args=parts, keywords=[]) if (
                name in names.OF_MODULES.get(module, ())
            ):
                self.check_all(parts)
            case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in names.PYTHON_FUNCTIONS:
                self.check_all(parts)
            case _:
                super().check(node)

    def _check_input(self, node: ast.expr) -> None:
        """An input, or an item, attribute or size of one."""
        match node:
            case ast.Name(id="L"):
                pass
            case ast.Subscript() | ast.Attribute(value=ast.Subscript() | ast.Attribute()):
                self.check(node)
            case ast.Call(func=ast.Attribute(attr=name)) if name in names.QUESTIONS:
                self.check(node)
            case _:
                raise _FormError(f"{ast.unparse(node)[:80]!r} is no input")


def _check_atom(name: str, node: ast.Call) -> None:
    """`Integer(2)`, `Float('1.5', precision=53)`, `Rational(1, 2)` and `Symbol('s0', integer=True)`."""
    for part in node.args:
        match name, part.operand if isinstance(part, ast.UnaryOp) else part:
            case "Symbol", ast.Constant(value=str() as text) if names.SYMBOL.fullmatch(text):
                pass
            case "Float", ast.Constant(value=str() as text) if names.NUMBER.fullmatch(text):
                pass
            case "Integer" | "Float" | "Rational", ast.Constant(value=int() | float() as value) if (
                len(repr(value)) <= _MOST_DIGITS
            ):
                pass
            case _:
                raise _FormError(f"{ast.unparse(node)[:80]!r} is no {name.lower()}")
    for option in node.keywords:
        match name, option.value:
            case "Symbol", ast.Constant(value=bool()) if option.arg:
                pass
            case "Float", ast.Constant(value=int() as digits) if option.arg in ("precision", "dps") and digits < 1000:
                pass
            case _:
                raise _FormError(f"{name} has the option {option.arg}")


def _number(node: ast.expr) -> float | None:
    """The size of the number that an expression is, or None."""
    match node:
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _number(operand)
        case ast.Call(func=ast.Name(id="Integer" | "Float" | "Rational"), args=[first, *rest]):
            parts = [_number(part) for part in (first, *rest)]
            return None if None in parts else max(part for part in parts if part is not None)
        case ast.Constant(value=int() | float() | str() as value) if names.NUMBER.fullmatch(str(value)):
            return abs(float(value))
    return None


def _is_symbol(node: ast.expr) -> bool:
    match node:
        case ast.Name() | ast.Call(func=ast.Name(id="Symbol")):
            return True
    return False


def _is_function(name: str) -> bool:
    return name in names.FUNCTIONS or names.FUNCTION_FAMILIES.fullmatch(name) is not None


def _is_plain(value: object) -> bool:
    return not isinstance(value, str) or names.PLAIN_TEXT.fullmatch(value) is not None


# Not BitXor: sympy takes `^` for a power.
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.RShift, ast.BitAnd, ast.BitOr)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
