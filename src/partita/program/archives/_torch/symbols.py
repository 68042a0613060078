"""Symbolic sizes and fake tensors of a saved program: parsed by a small grammar, at bounded cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, final

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions
from torch.utils._sympy.value_ranges import ValueRanges

from partita._torch.expressions import Expression, ExpressionError, Operation, Symbol, parsed
from partita._torch.symbolic_shapes import is_unbacked
from partita.program.archives.container import brief
from partita.program.archives.data import Data

#: The most letters and operations of a size, and the most terms after expansion.
_MOST_LETTERS = 4_000
_MOST_OPERATIONS = 120
_MOST_TERMS = 256
_LARGEST_EXPONENT = 8
#: The most operands of all Max, Min, And and Or in a size: sympy compares them in pairs at each level of a nest, and
#: again whenever the size is built anew with other symbols.
_MOST_CHOICES = 24
#: Of a fraction, so that no two in a file have the same hash: of pairs of larger numbers, any number have.
_LARGEST_OF_FRACTION = 1 << 31
#: An estimate of torch's work on all sizes of a program, in units of about 0.3 ms, fitted to measurements: every
#: operation and every new shape costs something, and products of sums grow like powers of their number of terms.
_MOST_WORK = 50_000
_WORK_OF_OPERATION, _WORK_OF_REMAINDER, _WORK_OF_SHAPE = 6, 30, 35
_USUAL_DIMENSIONS = 8
_MOST_RANGES = 100_000
#: How many values in lists, inputs and results a program may have, and one more for so many bytes of its text: a value
#: may take two bytes there, and takes a kilobyte while Python compiles the code that torch.fx generates of it.
_VALUES, _BYTES_OF_VALUE = 100_000, 32


class Symbols:
    """The symbols of one program, its shape environment and its fake tensor mode."""

    def __init__(self, ranges: Data | None, *, text_bytes: int = 0) -> None:
        self.env = ShapeEnv(assume_static_by_default=True)
        self._mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True, shape_env=self.env)
        self._symbols: dict[str, sympy.Symbol] = {}
        self._known: dict[str, sympy.Basic] = {}
        self._terms: dict[sympy.Basic, int] = {}
        self._shapes: set[str] = set()
        self._work = 0
        #: How many values of lists, inputs and results are still allowed; shared by all graphs of the program.
        self._values_left = _VALUES + text_bytes // _BYTES_OF_VALUE
        #: Numbers for the calls of `invoke_subgraph`.
        self.subgraph_calls = count()
        known = dict(ranges.entries()) if ranges is not None else {}
        if ranges is not None and len(known) > _MOST_RANGES:
            ranges.malformed(f"it has more than {_MOST_RANGES} ranges, which no graph needs")
        self._ranges = {key: _range(data) for key, data in known.items()}
        self._in_range: dict[str, sympy.Basic] = {}
        #: Ranges of expressions that have not occurred yet.
        self._awaited = {key for key in self._ranges if not _SYMBOL.fullmatch(key)}
        #: Unbacked symbols that no node binds yet.
        self.pending: set[sympy.Symbol] = set()
        # Unbacked symbols that are created later must have other names.
        for prefix, counter in (("zuf", "unbacked_symfloat_counter"), ("u", "unbacked_symint_counter")):
            found = [int(key.removeprefix(prefix)) for key in self._ranges if re.fullmatch(rf"{prefix}\d{{1,6}}", key)]
            setattr(self.env, counter, max(found, default=-1) + 1)

    def spend(self, values: int, data: Data) -> None:
        """Counts values that become parts of the graph."""
        self._values_left -= values
        if self._values_left < 0:
            data.malformed("the graph has more values in lists, inputs and results than a program of its size")

    def ranges(self) -> dict[Any, ValueRanges[Any]]:
        """The ranges of the symbols and expressions that occurred."""
        return {self._in_range[key]: allowed for key, allowed in self._ranges.items() if key in self._in_range}

    def integer(self, data: Data) -> Any:
        (kind, content), make = data.choice(), self.env.create_symintnode
        return content.integer() if kind == "as_int" else make(**self._expression(data, "as_int"))

    def floating(self, data: Data) -> Any:
        (kind, content), make = data.choice(), self.env.create_symfloatnode
        return content.number() if kind == "as_float" else make(**self._expression(data, "as_float"))

    def truth(self, data: Data) -> Any:
        (kind, content), make = data.choice(), self.env.create_symboolnode
        return content.boolean() if kind == "as_bool" else make(self._expression(data, "as_bool")["sym"])

    def tensor(self, data: Data) -> Tensor:
        """A fake tensor with these sizes, strides, device and dtype."""
        sizes, strides = ([self.integer(number) for number in data[key]] for key in ("sizes", "strides"))
        if len(sizes) != len(strides) or len(sizes) > 64:
            data.malformed(f"it has {len(sizes)} sizes and {len(strides)} strides")
        self._charge_shape(sizes, strides, data)
        device, dtype = read_device(data["device"]), read_dtype(data["dtype"])
        return self._fake(sizes, strides, device, dtype).requires_grad_(data["requires_grad"].boolean())

    def _fake(self, sizes: list[Any], strides: list[Any], device: torch.device, dtype: torch.dtype) -> Tensor:
        if device.type != "cpu" or not all(type(number) is int for number in (*sizes, *strides)):
            with self._mode:
                return torch.empty_strided(sizes, strides, device=device, dtype=dtype)
        # The usual case, in a fifth of the time: nothing has to be dispatched for known sizes.
        meta = torch.empty_strided(sizes, strides, device="meta", dtype=dtype)
        return self._mode.fake_tensor_converter.from_meta_and_device(self._mode, meta, device)

    def _expression(self, data: Data, hint_kind: str) -> dict[str, Any]:
        written, hinted = data["as_expr"]["expr_str"], data["as_expr"].get("hint")
        expression = self._sympy(written)
        if isinstance(expression, _TRUTHS) != (hint_kind == "as_bool") and not isinstance(expression, sympy.Symbol):
            written.refuse(f"{written.value[:100]!r} is no {'truth value' if hint_kind == 'as_bool' else 'number'}")
        if hinted is None:
            return {"sym": expression, "hint": None}
        hint = hinted[hint_kind].integer() if hint_kind == "as_int" else hinted[hint_kind].number()
        values = self.env.backed_var_to_val if hasattr(self.env, "backed_var_to_val") else self.env.var_to_val
        if isinstance(hint, int) and expression not in values:
            values[expression] = sympy.Integer(hint)
        return {"sym": expression, "hint": hint}

    def _sympy(self, data: Data) -> sympy.Basic:
        written = data.text()
        if written in self._known:
            return self._known[written]
        try:
            read = parsed(written, letters=_MOST_LETTERS, operations=_MOST_OPERATIONS)
            if _choices(read) > _MOST_CHOICES:
                raise ExpressionError(f"it has more than {_MOST_CHOICES} operands of Max, Min, And and Or")
            made, terms = self._made(read)
        except ExpressionError as error:
            data.refuse(f"{written[:100]!r} is no size: {error}")
        self._terms[made] = max(terms, self._terms.get(made, 1))
        self._restrict(made)
        self._known[written] = made
        return made

    def _charge_shape(self, sizes: list[Any], strides: list[Any], data: Data) -> None:
        """Charges the cost of a shape: torch multiplies its sizes with each other and with its strides."""
        shape = f"{data['sizes'].value} {data['strides'].value}"
        terms = list(zip(map(self._terms_of, sizes), map(self._terms_of, strides), strict=True))
        pairs = [size * stride for size, stride in terms if size * stride > 1]
        # A known shape costs little, unless it has more dimensions than tensors of models have.
        work = 2 * max(0, len(pairs) - _USUAL_DIMENSIONS)
        if pairs and shape not in self._shapes:
            self._shapes.add(shape)
            work += _WORK_OF_SHAPE + sum(math.ceil(pair**0.825 / 2) for pair in pairs)
        try:
            self._charge(work)
        except ExpressionError as error:
            data.refuse(str(error))

    def _terms_of(self, number: Any) -> int:
        return self._terms.get(number.node.expr, 2) if isinstance(number, torch.SymInt) else 1

    def _charge(self, work: int) -> None:
        self._work += work
        if self._work > _MOST_WORK:
            raise ExpressionError("the sizes of the program are too many or too complex to look at all of them")

    def _restrict(self, expression: sympy.Basic) -> None:
        """Passes the ranges of an expression and its parts, keyed by sympy's text, to the shape environment."""
        parts = {expression, *expression.free_symbols}
        if self._awaited:
            parts.update(sympy.preorder_traversal(expression))
        for key, part in sorted((str(part), part) for part in parts if str(part) in self._ranges):
            if key not in self._in_range:
                self._in_range[key], allowed = part, self._ranges[key]
                self._awaited.discard(key)
                self.env.constrain_symbol_range(part, compiler_min=allowed.lower, compiler_max=allowed.upper)

    # Expressions -------------------------------------------------------------------------------------------------

    def _made(self, expression: Expression) -> tuple[Any, int]:
        """The expression in sympy, and its number of terms after expansion."""
        match expression:
            case bool():
                return sympy.true if expression else sympy.false, 1
            case int(value) | Operation("Integer", (int(value),), ()):
                return sympy.Integer(value), 1
            case float():
                return _float(repr(expression)), 1
            case Symbol("true" | "false" as truth):
                return sympy.true if truth == "true" else sympy.false, 1
            case Symbol(name):
                return self._symbol(name, {})
            case Operation("Symbol", (str(name),), options) if all(isinstance(value, bool) for _, value in options):
                return self._symbol(name, {key: bool(value) for key, value in options})
            case Operation("Rational", (int(above), int(below)), ()) if (
                below > 0 and max(abs(above), below) < _LARGEST_OF_FRACTION
            ):
                return sympy.Rational(above, below), 1
            case Operation("Float", (str(written),), () | (("precision", 53),)):
                return _float(written), 1
            case Operation(name, operands, ()) if name in _FUNCTIONS:
                least, most, make = _FUNCTIONS[name]
                if not least <= len(operands) <= most:
                    raise ExpressionError(f"{name!r} has {len(operands)} operands")
                parts = [self._made(operand) for operand in operands]
                if any(isinstance(part, _TRUTHS) for part, _ in parts) and name not in _OF_TRUTHS:
                    raise ExpressionError(f"{name!r} computes with truth values")
                counts, last = [count for _, count in parts], parts[-1][0]
                terms = _terms(expression, counts, last)
                is_dear = name in _REMAINDERS or (name in _DIVISIONS and not last.is_number)
                work = _WORK_OF_REMAINDER if is_dear else _WORK_OF_OPERATION
                self._charge(work + math.ceil(max(terms, *counts) ** 1.5))
                return make(*(part for part, _ in parts)), terms
        raise ExpressionError(f"{getattr(expression, 'name', 'a text')!r} has no place in it")

    def _symbol(self, name: str, assumptions: Mapping[str, bool]) -> tuple[sympy.Symbol, int]:
        known = self._symbols.get(name)
        if known is None:
            if not _SYMBOL.fullmatch(name) or not assumptions.keys() <= _ASSUMPTIONS:
                raise ExpressionError(f"{name[:40]!r} with {sorted(assumptions)} is no symbol")
            known = self._symbols[name] = sympy.Symbol(name, **dict(assumptions))
            self.env.var_to_stack[known] = _NoStack()  # type: ignore[assignment]
            if name not in self._ranges:  # torch needs one for every symbol.
                every = ValueRanges.unknown() if name.startswith("z") else ValueRanges.unknown_int()
                least = 0 if known.is_nonnegative else every.lower
                self.env.constrain_symbol_range(known, compiler_min=least, compiler_max=every.upper)
            if is_unbacked(known):
                self.pending.add(known)
        elif any(known.assumptions0.get(key) != value for key, value in assumptions.items()):
            raise ExpressionError(f"the symbol {name!r} has other properties elsewhere")
        # torch adds an offset to each symbol before expansion, and may replace an unbacked one by an equality.
        return known, 3 if is_unbacked(known) else 2


@final
class _NoStack(tuple[()]):
    """Where torch prints the frames in which a symbol was made: one of a file has none."""

    def format(self) -> list[str]:
        return []

    def cleanup(self) -> None:
        """There are no frames to let go."""


def stays_small(condition: sympy.Basic) -> bool:
    """Whether the substitutions that torch derives from a condition keep sizes within their charged cost.

    It replaces one side of an equality by the other: that must be a number, or linear in one symbol.
    """
    sides = [side for equality in condition.atoms(sympy.Eq) for side in equality.args]
    return all(_is_short(sympy.Mul.make_args(term) for term in sympy.Add.make_args(side)) for side in sides)


def _is_short(terms: Iterable[Sequence[sympy.Basic]]) -> bool:
    factors = [factor for term in terms for factor in term]
    return all(one.is_Symbol or one.is_Number for one in factors) and sum(one.is_Symbol for one in factors) <= 1


def _float(written: str) -> sympy.Float:
    found = float(written) if _DECIMAL.fullmatch(written) else math.inf
    if found != 0 and not 1e-40 < abs(found) < 1e40:
        raise ExpressionError(f"{written[:40]!r} is no number that sizes are computed from")
    return sympy.Float(written, precision=53)


def _terms(expression: Operation, counts: list[int], last: sympy.Basic) -> int:
    """A bound on the terms, by those of the operands: sympy and torch expand products, so they grow like powers.

    A function counts as its operands, since torch may simplify it to one, as in FloorDiv(a + b, 1), and a quotient as a
    product, since torch multiplies nested denominators.
    """
    terms = max(counts)
    if expression.name in _SUMS:
        terms = sum(counts)
    elif expression.name == "CeilDiv":  # torch adds the divisor to the dividend, and rounds down.
        terms = sum(counts) * counts[-1]
    elif expression.name in ("Mul", "*", *_QUOTIENTS):
        terms = math.prod(counts)
    elif expression.name == "FloatPow" and not (last.is_Float and abs(last) <= _LARGEST_EXPONENT):
        raise ExpressionError(f"it has an exponent that is no number up to {_LARGEST_EXPONENT}")
    elif expression.name in _POWERS:
        if not (last.is_Integer and 0 <= last <= _LARGEST_EXPONENT) or _has_power(expression.operands[0]):
            raise ExpressionError(f"it has a power of numbers or powers, or an exponent beyond {_LARGEST_EXPONENT}")
        terms = counts[0] ** int(last)
    if terms > _MOST_TERMS:
        raise ExpressionError(f"it has more than {_MOST_TERMS} terms")
    return terms


def _choices(expression: Expression) -> int:
    """The operands of all Max, Min, And and Or in an expression, however nested."""
    if not isinstance(expression, Operation):
        return 0
    own = len(expression.operands) if expression.name.lower() in ("max", "min", "and", "or") else 0
    return own + sum(map(_choices, expression.operands))


def _has_power(base: Expression) -> bool:
    """Whether a base is a number or has a power in it: sympy evaluates both, so torch never writes them."""
    if not isinstance(base, Operation):
        return isinstance(base, int | float)
    return base.name in ("Integer", "Float", "Rational", *_POWERS) or any(
        isinstance(part, Operation) and part.name not in ("Integer", "Float", "Rational") and _has_power(part)
        for part in base.operands
    )


# Tables ----------------------------------------------------------------------------------------------------------

_SYMBOL = re.compile(r"(s|u|zf|zuf)\d{1,6}", re.ASCII)
_SUMS = ("Add", "+", "-")
_OF_TRUTHS = frozenset(("And", "Or", "Not", "and", "or", "not", "Equality", "Unequality", "==", "!="))
_POWERS = ("Pow", "**", "PowByNatural")
_REMAINDERS = frozenset(("Mod", "PythonMod", "%"))
_DIVISIONS = frozenset(("FloorDiv", "CeilDiv", "CleanDiv", "//"))
_QUOTIENTS = (*_DIVISIONS, "IntTrueDiv", "FloatTrueDiv", "/")
_TRUTHS = (sympy.core.relational.Relational, sympy.logic.boolalg.BooleanFunction, sympy.logic.boolalg.BooleanAtom)
_DECIMAL = re.compile(r"-?\d{1,30}(\.\d{0,40})?([eE][+-]?\d{1,2})?", re.ASCII)
_ASSUMPTIONS = frozenset(("integer", "positive", "nonnegative", "real", "finite", "negative", "nonpositive", "zero"))


def _entries(least: int, most: int, **named: Callable[..., Any]) -> dict[str, tuple[int, int, Callable[..., Any]]]:
    return {name: (least, most, make) for name, make in named.items()}


def _of_torch(count: int, names: str) -> dict[str, tuple[int, int, Callable[..., Any]]]:
    return {name: (count, count, getattr(functions, name)) for name in names.split() if hasattr(functions, name)}


#: The functions in sizes: the least and the most operands, and the sympy function.
_FUNCTIONS = {
    **_entries(2, _MOST_TERMS, Add=sympy.Add, Mul=sympy.Mul),
    **_entries(2, 12, Max=functions.Max, Min=functions.Min, max=functions.Max, min=functions.Min),
    **_entries(2, 12, And=sympy.And, Or=sympy.Or, **{"and": sympy.And, "or": sympy.Or}),
    **_entries(1, 1, Not=sympy.Not, neg=lambda a: -a, **{"not": sympy.Not}),
    **_entries(2, 2, Pow=sympy.Pow, **{"**": sympy.Pow, "//": functions.FloorDiv, "%": functions.PythonMod}),
    **_entries(2, 2, **{"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}),
    **_entries(2, 2, Equality=sympy.Eq, Unequality=sympy.Ne, StrictLessThan=sympy.Lt, LessThan=sympy.Le),
    **_entries(2, 2, StrictGreaterThan=sympy.Gt, GreaterThan=sympy.Ge, **{"/": functions.IntTrueDiv}),
    **_entries(2, 2, **{"==": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge}),
    **_of_torch(1, "ToFloat TruncToInt TruncToFloat CeilToInt FloorToInt RoundToInt Identity OpaqueUnaryFn_sqrt"),
    **_of_torch(2, "FloorDiv CleanDiv CeilDiv Mod PythonMod IntTrueDiv FloatTrueDiv PowByNatural RoundDecimal"),
    **_of_torch(2, "FloatPow BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor"),
}
#: torch's numbers of dtypes in archives; the gaps are quantized dtypes, which it does not save.
_DTYPES = dict(enumerate(["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"], 1))
_DTYPES |= dict(enumerate(["complex32", "complex64", "complex128", "bool", "bfloat16"], 9))
_DTYPES |= dict(enumerate(["uint16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"], 28))
_DTYPES |= dict(enumerate(["float8_e8m0fnu", "uint32", "uint64"], 33))


def read_dtype(data: Data) -> torch.dtype:
    found = getattr(torch, _DTYPES.get(data.integer(), ""), None)
    if not isinstance(found, torch.dtype):
        data.malformed(f"torch {torch.__version__} has no dtype of the number {data.value}")
    return found


def read_device(data: Data) -> torch.device:
    kind, index = data["type"].text(), data.get("index")
    number = 0 if index is None else index.integer()
    if not re.fullmatch(r"[a-z0-9_]{1,20}", kind) or not 0 <= number < (1 if kind == "cpu" else 128):
        data.malformed(f"{brief(data.value)} is no device")
    try:
        return torch.device(kind) if index is None else torch.device(kind, number)
    except RuntimeError:
        data.malformed(f"torch {torch.__version__} knows no device {kind!r}")


def _range(data: Data) -> ValueRanges[Any]:
    least, most = data.get("min_val"), data.get("max_val")
    every: ValueRanges[Any] = ValueRanges.unknown_int()
    lower = every.lower if least is None else sympy.Integer(least.integer())
    upper = every.upper if most is None else sympy.Integer(most.integer())
    if lower > upper:
        data.malformed(f"nothing is from {lower} to {upper}")
    return ValueRanges(lower, upper)
