"""Input guards of exported programs, as picklable data that closures evaluate: no code is generated for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node, Proxy
from torch.utils import _pytree as pytree

from partita._torch.expressions import (
    FUNCTIONS,
    Expression,
    ExpressionError,
    InputPath,
    Operation,
    Read,
    Symbol,
    class_name,
    evaluator,
    member_name,
    parsed,
    printed,
    substituted,
)
from partita._torch.symbolic_shapes import symbolic_expression
from partita.errors import SignatureError

#: A condition on the inputs, and its text in the error message.
Condition = tuple[Expression, str]


@final
class InputGuards(nn.Module):
    """Called with the inputs of a program, raises an AssertionError if they violate the guards of its export.

    torch's own module holds a generated function, which cannot be pickled. This one holds conditions.
    """

    #: `Graph.eliminate_dead_code` reads this name, and keeps the call although its result is unused.
    _is_impure = True

    #: Read by the analysis of effects: calls have no effect but to raise.
    only_checks_inputs = True

    def __init__(self, conditions: Sequence[Condition]) -> None:
        super().__init__()
        self.conditions = tuple(conditions)
        self._checks = _checks_of(self.conditions)

    def forward(self, *args: Any) -> None:
        for value in args:
            if isinstance(value, Proxy):
                # Conditions that compare, as `max` does, cannot be traced, so the trace calls this module.
                tracer: Any = value.tracer
                tracer.create_proxy("call_module", tracer.path_of_module(self), args, {})
                return
        for check, message in self._checks:
            try:
                holds = check(args)
            except (ArithmeticError, IndexError) as error:  # A file may say anything.
                raise AssertionError(f"{message}: {type(error).__name__}: {error}") from error
            if not holds:
                raise AssertionError(message)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_checks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._checks = _checks_of(self.conditions)


def check_inputs(module: GraphModule, exported: ExportedProgram) -> None:
    """Adds a node to the module of an exported program that checks its inputs first, as `ExportedProgram.module` does.

    The conditions are torch's guards, and ranks, types and forms of sizes, which torch checks elsewhere or not at all.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    if not inputs:
        return
    # By this name, the input hook of torch skips its own checks of sizes and numbers.
    module.add_module("_guards_fn", InputGuards(_conditions(exported, inputs)))
    with module.graph.inserting_after(inputs[-1]):
        module.graph.call_module("_guards_fn", tuple(inputs))


def callers_take_guards() -> bool:
    """Whether the caller supports a module with a guard call; torch lists some libraries that do not."""
    from torch.export._unlift import _ok_to_generate_guards_fn

    return bool(_ok_to_generate_guards_fn())


def functions_of_conditions() -> Mapping[str, Callable[..., Any]]:
    """The functions that may occur in torch's guards, by name."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    return {**FUNCTIONS, **{name: value for name, value in SYMPY_INTERP.items() if callable(value)}}


def _checks_of(conditions: Sequence[Condition]) -> list[tuple[Callable[[Sequence[Any]], Any], str]]:
    functions = functions_of_conditions()
    return [(evaluator(condition, functions), f"Guard failed: {message}") for condition, message in conditions]


def _conditions(exported: ExportedProgram, inputs: Sequence[Node]) -> list[Condition]:
    paths = _input_paths(exported, len(inputs))
    names = [_argument_name(path) for path in paths]
    values = [node.meta.get("val", _UNKNOWN) for node in inputs]
    found = [condition for place, value in enumerate(values) for condition in _on_type(place, value)]
    found += _on_sizes(values, exported.range_constraints)
    found += _traced(guards_of(exported), paths)
    found += [condition for place, value in enumerate(values) for condition in _on_form(place, value)]
    # By their texts: a file can have any number of conditions with the same hash.
    return [(one, _message(one, names)) for one in {printed(condition): condition for condition in found}.values()]


def _message(condition: Expression, names: Sequence[str]) -> str:
    text = printed(condition, names.__getitem__)
    match condition:
        case Operation("is_none", (operand,)):
            return f"{printed(operand, names.__getitem__)} is None"
        case Operation("has_sign", (operand, sign)):
            return f"{printed(operand, names.__getitem__)} is {sign}0.0"
        case Operation("has_class" | "has_derived_class", (operand, kind)):
            return f"type({printed(operand, names.__getitem__)}) is {kind}"
        case Operation("has_member_name", (operand, member)):
            return f"{printed(operand, names.__getitem__)}.name == {member!r}"
        case Operation(str(name), (operand,)) if name.startswith("is_"):
            return f"type({printed(operand, names.__getitem__)}) is {name.removeprefix('is_')}"
    return text


# Input paths ---------------------------------------------------------------------------------------------------


def _input_paths(exported: ExportedProgram, count: int) -> list[InputPath]:
    """The path of each input in conditions: its argument, and the pytree keys inside of it."""
    in_spec = exported.call_spec.in_spec
    if in_spec is None or in_spec.num_leaves != count or in_spec.type is not tuple or in_spec.num_children != 2:
        return [InputPath((f"args_{place}",), (True,)) for place in range(count)]
    positional, by_name = in_spec.children()
    signature = exported.module_call_graph[0].signature
    named = list(signature.forward_arg_names or ()) if signature is not None else []
    unnamed = (f"arg_{place}" for place in range(len(named), positional.num_children))
    names = [*named[: positional.num_children], *unnamed, *by_name.context]
    return [
        InputPath((name, *(key for key, _ in path)), (True, *(is_item for _, is_item in path)))
        for name, argument in zip(names, (*positional.children(), *by_name.children()), strict=True)
        for path in _leaf_paths(argument)
    ]


#: The keys from an argument to a leaf, and whether each is that of an item or the name of an attribute.
_Path = tuple[tuple[str | int, bool], ...]


def _leaf_paths(spec: pytree.TreeSpec) -> list[_Path]:
    """The path of each leaf of an argument, by the keys that its classes give their items."""
    count = spec.num_leaves
    try:
        found = pytree.tree_flatten_with_path(spec.unflatten(range(count)))[0]
    except Exception:  # A registered class may accept nothing but tensors, or give its items no keys.
        found = []
    if len(found) != count:
        return list(_paths_in_spec(spec))
    return [tuple((_key(entry), not hasattr(entry, "name")) for entry in path) for path, _ in found]


def _paths_in_spec(spec: pytree.TreeSpec) -> Iterator[_Path]:
    """The paths of the leaves as far as the specification has them: by the names of fields, or by number."""
    if spec.is_leaf():
        yield ()
        return
    fields = spec.context[0] if is_dataclass(spec.type) and isinstance(spec.context, list) else ()
    is_item = len(fields) != spec.num_children
    for place, child in enumerate(spec.children()):
        key = place if is_item else str(fields[place])
        yield from (((key, is_item), *path) for path in _paths_in_spec(child))


def _key(entry: Any) -> str | int:
    for field in ("key", "idx", "name"):
        if hasattr(entry, field):
            found = getattr(entry, field)
            return found if isinstance(found, str | int) else str(found)
    return str(entry)


def _argument_name(path: InputPath) -> str:
    """The name of an input in messages; of a long one, each of many inputs that share its keys would have a copy."""
    first, *keys = (key if isinstance(key, int) else _shortened(key, _LONGEST_KEY) for key in path.keys)
    inside = printed(Read(InputPath(tuple(keys), path.is_item[1:]))).removeprefix("L")
    return _shortened(f"{first}{inside}", _LONGEST_NAME)


#: How much of a key, and of the name of an input, a message says.
_LONGEST_KEY, _LONGEST_NAME = 60, 300


def _shortened(text: str, letters: int) -> str:
    """The beginning of a text that is longer than so many letters."""
    return text if len(text) <= letters else f"{text[:letters]}..."


# Conditions -----------------------------------------------------------------------------------------------------

#: The value of an input that has no metadata.
_UNKNOWN = object()
_TYPES = {bool: "is_bool", int: "is_int", float: "is_float", str: "is_str"}


def _on_type(place: int, value: Any) -> Iterator[Expression]:
    """The rank of a tensor; the type and value of a constant, which torch quotes wrongly for strings with quotes."""
    if isinstance(value, Tensor):
        yield Operation("==", (Read(place, "dim"), value.dim()))
    elif value is None:
        yield Operation("is_none", (Read(place),))
    elif type(value) in _TYPES:
        yield Operation(_TYPES[type(value)], (Read(place),))
        yield from _on_number(place, value)
    elif isinstance(value, int | float | str):
        yield Operation("has_derived_class", (Read(place), class_name(type(value))))
        if isinstance(value, Enum):
            yield Operation("has_member_name", (Read(place), member_name(value)))
        yield from _on_number(place, _plain(value))
    elif isinstance(value, Enum):
        yield Operation("has_class", (Read(place), class_name(type(value))))
        yield Operation("has_member_name", (Read(place), member_name(value)))


def _plain(value: int | float | str) -> int | float | str:
    """The number or text itself, without the class that was derived for it."""
    if isinstance(value, str):
        return str.__str__(value)
    return float.__float__(value) if isinstance(value, float) else int.__int__(value)


def _on_number(place: int, value: int | float | str) -> Iterator[Expression]:
    """The value of a constant; `==` neither finds NaN nor distinguishes the zeros."""
    if isinstance(value, float) and math.isnan(value):
        yield Operation("math.isnan", (Read(place),))
        return
    yield Operation("==", (Read(place), value))
    if isinstance(value, float) and value == 0:
        yield Operation("has_sign", (Read(place), "-" if math.copysign(1.0, value) < 0 else "+"))


def _on_sizes(values: Sequence[Any], ranges: Mapping[Any, Any]) -> Iterator[Expression]:
    """That static sizes are equal, dynamic sizes in range, and sizes that share a symbol equal to each other."""
    first: dict[Any, Read] = {}
    for place, value in enumerate(values):
        for read, size in _numbers(place, value):
            if isinstance(size, int):
                yield Operation("==", (read, size))
                continue
            expression = size.node.expr
            if expression in first:
                yield Operation("==", (read, first[expression]))
            else:
                first[expression] = read
                yield from _in_range(read, ranges.get(expression))
    yield from _on_derived_sizes(first)


def _numbers(place: int, value: Any) -> Iterator[tuple[Read, Any]]:
    if isinstance(value, Tensor):
        yield from ((Read(place, "size", axis), size) for axis, size in enumerate(value.shape))
    elif isinstance(value, torch.SymInt):
        yield Read(place), value


def _in_range(read: Read, allowed: Any) -> Iterator[Expression]:
    if allowed is None:
        return
    # torch traces with sizes of at least 2, and accepts 0 and 1.
    if allowed.lower.is_Integer and allowed.lower > 2:
        yield Operation(">=", (read, int(allowed.lower)))
    if allowed.upper.is_Integer:
        yield Operation("<=", (read, int(allowed.upper)))


def _on_derived_sizes(first: Mapping[Any, Read]) -> Iterator[Expression]:
    """That a derived size such as 2 * n + 1 agrees with the other sizes that depend on n.

    If no input has the size n itself, the first such size determines it.
    """
    known: dict[Any, Expression] = {key: read for key, read in first.items() if key.is_symbol}
    for expression, read in first.items():
        if expression.is_symbol:
            continue
        unknown = [symbol for symbol in expression.free_symbols if symbol not in known]
        if not unknown:
            by_name = {symbol.name: known[symbol] for symbol in expression.free_symbols}
            yield Operation("==", (read, symbolic_expression(expression, by_name)))
        elif len(expression.free_symbols) == 1 and (form := _linear_form(expression)) is not None:
            symbol, factor, rest = form
            left: Expression = Operation("-", (read, rest)) if rest else read
            known[symbol] = Operation("//", (left, factor)) if factor != 1 else left


def _on_form(place: int, value: Any) -> Iterator[Expression]:
    """That sizes have the form of their export: 2 * n + 1, for example, is odd."""
    for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
        expression: Any = size.node.expr if isinstance(size, torch.SymInt) else None
        form = None if expression is None else _linear_form(expression)
        if form is not None and abs(form[1]) > 1:
            _, factor, rest = form
            yield Operation("==", (Operation("%", (Read(place, "size", axis), factor)), rest % factor))


def _linear_form(expression: Any) -> tuple[Any, int, int] | None:
    """The symbol, the factor and the constant of an expression such as 2 * n + 1."""
    if len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    factor = expression.coeff(symbol)
    rest = expression - factor * symbol
    return (symbol, int(factor), int(rest)) if factor.is_Integer and factor != 0 and rest.is_Integer else None


def _traced(guards: Sequence[str], paths: Sequence[InputPath]) -> Iterator[Expression]:
    """The guards that torch found during tracing, on the inputs of the program."""
    places = {path.keys: place for place, path in enumerate(paths)}
    arguments = {path.keys[0] for path in paths}
    functions = functions_of_conditions()
    for guard in guards:
        try:
            condition = substituted(parsed(guard), lambda part: _placed(part, places, arguments))
            evaluator(condition, functions)
        except ExpressionError as error:
            raise SignatureError(
                f"the condition {guard!r} of the exported program cannot be checked: {error}; export the model again, "
                "or take the module of the exported program itself, which checks it as torch does"
            ) from error
        yield condition


def _placed(
    part: Symbol | Read, places: Mapping[tuple[str | int, ...], int], arguments: Collection[str | int]
) -> Expression:
    """A read by the number of the input; torch also numbers inputs, and names those of `*xs` in two ways."""
    if isinstance(part, Symbol):
        raise ExpressionError(f"the symbol {part.name!r} belongs to no input")
    assert isinstance(part.input, InputPath)
    keys = part.input.keys
    if keys[0] == "flat_args" and len(keys) == 2 and isinstance(keys[1], int) and keys[1] < len(places):
        return Read(keys[1], part.query, part.axis)
    spellings = [keys, (f"{keys[0]}_{keys[1]}", *keys[2:])] if len(keys) > 1 else [keys]
    if keys[0] not in arguments:  # `**kwargs` is no argument of the program, but its entries are.
        spellings.append(keys[1:])
    for spelled in spellings:
        if spelled in places:
            return Read(places[spelled], part.query, part.axis)
    raise ExpressionError(f"{printed(part)} is no input of the program")


def guards_of(exported: Any) -> tuple[str, ...]:
    """The conditions that torch.export checks on a call beside symbol ranges, as source text; older torch has none."""
    return tuple(getattr(exported, "_guards_code", ()))


def set_guards(exported: Any, guards: Collection[str]) -> None:
    """Sets the conditions that a program checks: torch derives them when it traces, but not when it loads."""
    if guards:
        exported._guards_code = list(guards)
