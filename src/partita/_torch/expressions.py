"""Arithmetic and conditions as data: parsed from text by a small grammar, evaluated by closures, printed as text.

No code is generated: the grammar below and one table of functions define all that a text can express.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any, TypeAlias, final

import torch


class ExpressionError(ValueError):
    """A text that is not in the grammar, or a function that is not in the table."""


@final
@dataclass(frozen=True, slots=True)
class Symbol:
    """A named number, such as `s0`."""

    name: str


@final
@dataclass(frozen=True, slots=True)
class InputPath:
    """An argument of a model or an item inside, such as `L['x']['k'][0]`; `is_item` distinguishes `[k]` from `.k`."""

    keys: tuple[str | int, ...]
    is_item: tuple[bool, ...]


@final
@dataclass(frozen=True, slots=True)
class Read:
    """An input, by its number or path, or one of its numbers: its `size` along an axis, its `dim`, and so on."""

    input: int | InputPath
    query: str | None = None
    axis: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """An operator of Python or a function of the table, on its operands; `options` are keywords."""

    name: str
    operands: tuple[Expression, ...]
    options: tuple[tuple[str, Expression], ...] = ()


Expression: TypeAlias = int | float | str | Symbol | Read | Operation

#: The methods of a tensor that may be called.
_QUERIES = frozenset(("size", "stride", "storage_offset", "dim"))


# Parsing ---------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>\d+\.?\d*(?:[eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<text>'[^'\\\x00-\x1f\x7f]*'|"[^"\\\x00-\x1f\x7f]*")
      | (?P<sign>\*\*|//|<<|>>|[=!<>]=|[-+*/%<>()\[\],.=&|])
    )""",
    re.VERBOSE | re.ASCII,
)
#: How tightly the operators between two operands bind, as in Python.
_BINDING = {
    "or": 1,
    "and": 2,
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), 4),
    "|": 5,
    "&": 6,
    "<<": 7,
    ">>": 7,
    "+": 8,
    "-": 8,
    **dict.fromkeys(("*", "/", "//", "%"), 9),
    "**": 11,
}
_NOT, _UNARY = 3, 10
_COMPARISON = 4


def parsed(text: str, *, letters: int = 20_000, operations: int = 400) -> Expression:
    """Parses a text, which may have at most so many characters and operations."""
    if len(text) > letters or not text.isprintable():
        raise ExpressionError(f"it has {len(text)} letters, more than {letters}, or some that cannot be printed")
    parser = _Parser(_tokens(text), operations)
    found = parser.expression(0)
    if parser.kind:
        raise ExpressionError(f"{parser.token!r} has no place in it")
    return found


def _tokens(text: str) -> list[tuple[str, str]]:
    found, place, end = [], 0, len(text.rstrip())
    while place < end:
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            raise ExpressionError(f"{text[place : place + 20]!r} has no place in it")
        found.append((match.lastgroup, match[match.lastgroup]))
        place = match.end()
    return found


class _Parser:
    """A precedence-climbing parser: an operand, then operators that bind more tightly than the one before it."""

    def __init__(self, tokens: Sequence[tuple[str, str]], operations: int) -> None:
        self._tokens = iter(tokens)
        self._operations = operations
        self._depth = _MOST_DEPTH
        self.kind, self.token = "", ""
        self._advance()

    def _advance(self) -> str:
        token = self.token
        self.kind, self.token = next(self._tokens, ("", ""))
        return token

    def _take(self, sign: str) -> None:
        if self.kind == "text" or self.token != sign:
            raise ExpressionError(f"{sign!r} is missing before {self.token or 'the end'!r}")
        self._advance()

    def _is(self, sign: str) -> bool:
        return self.kind in ("sign", "name") and self.token == sign

    def _count(self) -> None:
        self._operations -= 1
        if self._operations < 0:
            raise ExpressionError("it has too many operations")

    def expression(self, binding: int) -> Expression:
        self._depth -= 1
        if self._depth < 0:
            raise ExpressionError("it is nested too deeply")
        found = self._operand()
        while self.kind in ("sign", "name") and _BINDING.get(self.token, -1) > binding:
            found = self._joined(found)
        self._depth += 1
        return found

    def _joined(self, left: Expression) -> Expression:
        """An operand with one more operator after it; chains of `and` and of `or` become one operation."""
        self._count()
        name = self._advance()
        if name == "**":
            return Operation(name, (left, self.expression(_UNARY - 1)))
        right = self.expression(_BINDING[name])
        if _BINDING[name] == _COMPARISON and self.kind == "sign" and _BINDING.get(self.token) == _COMPARISON:
            raise ExpressionError("it chains comparisons")
        if name in ("and", "or") and isinstance(left, Operation) and left.name == name:
            return Operation(name, (*left.operands, right))
        return Operation(name, (left, right))

    def _operand(self) -> Expression:
        if self._is("not"):
            self._advance()
            return Operation("not", (self.expression(_NOT),))
        if self._is("-") or self._is("+"):
            name = self._advance()
            operand = self.expression(_UNARY)
            if isinstance(operand, int | float):
                return -operand if name == "-" else operand
            return Operation("neg", (operand,)) if name == "-" else operand
        if self._is("("):
            self._advance()
            found = self.expression(0)
            self._take(")")
            return found
        if self.kind == "number":
            return _number(self._advance())
        if self.kind == "text":
            return self._advance()[1:-1]
        if self.kind == "name":
            return self._named()
        raise ExpressionError(f"an operand is missing before {self.token or 'the end'!r}")

    def _named(self) -> Expression:
        name = self._advance()
        if name in ("True", "False"):
            return name == "True"
        if name == "L":
            return self._read()
        while self._is("."):
            self._advance()
            name += f".{self._advance()}"  # A function is looked up in a table, by all of its name.
        if name in CONSTANTS:
            return CONSTANTS[name]
        if self._is("("):
            self._count()
            return Operation(name, *self._arguments())
        if "." in name or name in ("and", "or"):
            raise ExpressionError(f"{name!r} has no place in it")
        return Symbol(name)

    def _arguments(self) -> tuple[tuple[Expression, ...], tuple[tuple[str, Expression], ...]]:
        self._take("(")
        operands: list[Expression] = []
        options: list[tuple[str, Expression]] = []
        while not self._is(")"):
            operand = self.expression(0)
            if self._is("=") and isinstance(operand, Symbol):
                self._advance()
                options.append((operand.name, self.expression(0)))
            elif options:
                raise ExpressionError("an operand stands behind a keyword")
            else:
                operands.append(operand)
            if not self._is(")"):
                self._take(",")
        self._take(")")
        return tuple(operands), tuple(options)

    def _read(self) -> Read:
        """`L['x'][0].k.size()[1]`: a path, and perhaps a query."""
        keys: list[str | int] = []
        is_item: list[bool] = []
        while self._is("[") or self._is("."):
            if self._advance() == "[":
                keys.append(self._key())
                is_item.append(True)
            else:
                name = self._name()
                if self._is("("):
                    return self._query(InputPath(tuple(keys), tuple(is_item)), name)
                keys.append(name)
                is_item.append(False)
        if not keys or not is_item[0]:
            raise ExpressionError("'L' alone is no input")
        return Read(InputPath(tuple(keys), tuple(is_item)))

    def _query(self, path: InputPath, name: str) -> Read:
        if name not in _QUERIES or not path.keys:
            raise ExpressionError(f"{name!r} is no method of an input that may be called")
        self._take("(")
        self._take(")")
        if not self._is("["):
            return Read(path, name)
        self._advance()
        axis = self._key()
        if not isinstance(axis, int):
            raise ExpressionError(f"{axis!r} is no axis")
        return Read(path, name, axis)

    def _key(self) -> str | int:
        kind, token = self.kind, self._advance()
        self._take("]")
        if kind == "text":
            return token[1:-1]
        if kind != "number" or not token.isdigit():
            raise ExpressionError("a key is neither a number nor a text")
        return _integer(token)

    def _name(self) -> str:
        if self.kind != "name" or self.token.startswith("_"):
            raise ExpressionError(f"{self.token!r} is no attribute that may be read")
        return self._advance()


def _number(text: str) -> int | float:
    if text.isdigit():
        return _integer(text)
    found = float(text)
    if not math.isfinite(found):
        raise ExpressionError(f"{text[:40]} is too large")
    return found


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ExpressionError(f"a number has {len(text)} digits")
    return int(text)


#: A size fits into 64 bits, and real conditions are not nested as deeply.
_MOST_DIGITS = 19
_MOST_DEPTH = 60
CONSTANTS: Mapping[str, float] = {"math.inf": math.inf, "inf": math.inf, "math.nan": math.nan}


# Evaluating ------------------------------------------------------------------------------------------------------

Evaluator: TypeAlias = Callable[[Sequence[Any]], Any]


def _fits(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _has_class(value: Any, name: str) -> bool:
    # While torch exports, the member of an enum comes in a wrapper.
    value = getattr(value, "real_obj", value) if torch.compiler.is_exporting() else value
    return class_name(type(value)) == name


def _has_member_name(value: Any, name: str) -> bool:
    value = getattr(value, "real_obj", value) if torch.compiler.is_exporting() else value
    return member_name(value) == name or _is_plain_in_export(value)


def _has_derived_class(value: Any, name: str) -> bool:
    return class_name(type(value)) == name or _is_plain_in_export(value)


def _is_plain_in_export(value: Any) -> bool:
    """Whether torch exports and passes the plain number or text for one of a derived class, as decompositions do."""
    return type(value) in (int, float, str) and torch.compiler.is_exporting()


def class_name(kind: type) -> str:
    """The full name of a class, by which conditions name it: they hold data, and a class may not be picklable."""
    return f"{kind.__module__}.{kind.__qualname__}"


def member_name(value: Any) -> str:
    """The name of a member of an enum; combined flags may have none."""
    return str(value.name or repr(value.value)) if isinstance(value, Enum) else ""


def _has_sign(value: Any, sign: str) -> bool:
    """Whether a float has this sign, which `==` does not see in a zero; tracers pass symbols, which have none."""
    return not isinstance(value, float) or (math.copysign(1.0, value) < 0) == (sign == "-")


def _of_numbers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Arithmetic that rejects strings, which it would repeat or format: an input may be one."""

    def compute(left: Any, right: Any) -> Any:
        if isinstance(left, str) or isinstance(right, str):
            raise TypeError("conditions compute with numbers")
        return function(left, right)

    return compute


def _tables() -> dict[str, Callable[..., Any]]:
    of_math = "floor ceil trunc sqrt log log2 exp sin cos tan asin acos atan sinh cosh tanh isnan isinf"
    of_torch = "sym_max sym_min sym_float sym_int sym_not sym_ite sym_sqrt _sym_sqrt _sym_log2"
    return {
        **{f"math.{name}": getattr(math, name) for name in of_math.split()},
        **{f"torch.{name}": getattr(torch, name) for name in of_torch.split() if hasattr(torch, name)},
    }


#: What can be computed; the last nine check the type and form of a constant input, for which tracers pass symbols.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "+": _of_numbers(operator.add),
    "-": operator.sub,
    "*": _of_numbers(operator.mul),
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": _of_numbers(operator.mod),
    "**": operator.pow,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "neg": operator.neg,
    "not": operator.not_,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "max": lambda *values: reduce(torch.sym_max, values),
    "min": lambda *values: reduce(torch.sym_min, values),
    "abs": abs,
    "round": round,
    "int": int,
    "float": float,
    "bool": bool,
    **_tables(),
    "is_bool": _fits(bool, torch.SymBool),
    "is_int": _fits(int, torch.SymInt),
    "is_float": _fits(float, torch.SymFloat),
    "is_str": _fits(str),
    "is_none": _fits(type(None)),
    "has_class": _has_class,
    "has_derived_class": _has_derived_class,
    "has_member_name": _has_member_name,
    "has_sign": _has_sign,
}


def evaluator(expression: Expression, functions: Mapping[str, Callable[..., Any]] = FUNCTIONS) -> Evaluator:
    """A function that computes the expression from a sequence of inputs; raises here for functions not in the table."""
    if isinstance(expression, int | float | str):
        return lambda inputs: expression
    if isinstance(expression, Read):
        return _reader(expression)
    if isinstance(expression, Symbol):
        raise ExpressionError(f"the symbol {expression.name!r} stands for no input")
    parts = [evaluator(operand, functions) for operand in expression.operands]
    if expression.name in ("and", "or"):
        return _chained(parts, until=expression.name == "or")
    function = functions.get(expression.name)
    if function is None or expression.options:
        raise ExpressionError(f"{expression.name!r} is no function that conditions use")
    if len(parts) == 1:
        (operand,) = parts
        return lambda inputs: function(operand(inputs))
    if len(parts) == 2:
        left, right = parts
        return lambda inputs: function(left(inputs), right(inputs))
    return lambda inputs: function(*[part(inputs) for part in parts])


def _reader(read: Read) -> Evaluator:
    place, query, axis = read.input, read.query, read.axis
    if not isinstance(place, int):
        raise ExpressionError(f"{printed(read)} is no input of the program")
    if query is None:
        return lambda inputs: inputs[place]
    if axis is None:
        return lambda inputs: getattr(inputs[place], query)()
    return lambda inputs: getattr(inputs[place], query)(axis)


def _chained(parts: Sequence[Evaluator], *, until: bool) -> Evaluator:
    """Evaluates operands until one is true, as `or` does, or until one is false, as `and` does; the last value."""

    def check(inputs: Sequence[Any]) -> Any:
        found: Any = not until
        for part in parts:
            found = part(inputs)
            if bool(found) is until:
                break
        return found

    return check


def substituted(expression: Expression, known: Callable[[Symbol | Read], Expression]) -> Expression:
    """The expression with its symbols and reads replaced by `known`."""
    if isinstance(expression, Symbol | Read):
        return known(expression)
    if isinstance(expression, Operation):
        operands = tuple(substituted(operand, known) for operand in expression.operands)
        return Operation(expression.name, operands, expression.options)
    return expression


# Printing --------------------------------------------------------------------------------------------------------


def printed(expression: Expression, name: Callable[[int], str] = "args[{}]".format) -> str:
    """The expression in Python syntax; `name` returns the name of an input by number."""
    return _printed(expression, 0, name)


def _printed(expression: Expression, binding: int, name: Callable[[int], str]) -> str:
    if isinstance(expression, Symbol):
        return expression.name
    if isinstance(expression, Read):
        return _printed_read(expression, name)
    if not isinstance(expression, Operation):
        text = str(expression) if isinstance(expression, float) else repr(expression)
        return f"({text})" if text.startswith("-") and binding > _UNARY else text
    own = {**_BINDING, "not": _NOT, "neg": _UNARY}.get(expression.name)
    operands = expression.operands
    if own is None or (len(operands) == 1 and expression.name not in ("not", "neg")):
        arguments = [_printed(operand, 0, name) for operand in operands]
        arguments += [f"{option}={_printed(value, 0, name)}" for option, value in expression.options]
        return f"{expression.name}({', '.join(arguments)})"
    if len(operands) == 1:
        sign = "not " if expression.name == "not" else "-"
        text = sign + _printed(operands[0], own, name)
    else:
        first, *others = operands
        # What stands on the right of `a - b` or below a comparison needs parentheses even if it binds as tightly.
        tight = own + 1 if own not in (_BINDING["or"], _BINDING["and"]) else own
        left = _printed(first, tight if own == _COMPARISON or expression.name == "**" else own, name)
        text = f" {expression.name} ".join([left, *(_printed(operand, tight, name) for operand in others)])
    return f"({text})" if own < binding else text


def _printed_read(read: Read, name: Callable[[int], str]) -> str:
    if isinstance(read.input, int):
        text = name(read.input)
    else:
        keys = zip(read.input.keys, read.input.is_item, strict=True)
        text = "L" + "".join(f"[{key!r}]" if is_item else f".{key}" for key, is_item in keys)
    if read.query is not None:
        text += f".{read.query}()"
    return text if read.axis is None else f"{text}[{read.axis}]"
