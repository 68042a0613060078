"""Checks of the inputs of an exported program, in a module that is kept as text and so can be pickled."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node, Proxy
from torch.utils import _pytree as pytree

from partita._torch.export_guards import guards_of

__all__ = ["InputGuards", "check_inputs"]

#: What must hold of the inputs `args`, and how a message says it.
Condition = tuple[str, str]


@final
class InputGuards(nn.Module):
    """Called with the inputs of a program, raises an AssertionError where they are not what it was exported for.

    torch's own module for it holds a generated function, which is lost to a pickle. This one generates it again.
    """

    #: `Graph.eliminate_dead_code` asks for this name: nobody reads what a check gives.
    _is_impure = True

    def __init__(self, conditions: Sequence[Condition]) -> None:
        super().__init__()
        self.conditions = tuple(conditions)
        self._check = _function_of(self.conditions)

    def forward(self, *args: Any) -> None:
        for value in args:
            if isinstance(value, Proxy):
                # Conditions that compare, as `max` does, cannot be traced, so what is traced calls this module too.
                tracer: Any = value.tracer
                tracer.create_proxy("call_module", tracer.path_of_module(self), args, {})
                return
        self._check(*args)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_check"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._check = _function_of(self.conditions)


def check_inputs(module: GraphModule, exported: ExportedProgram) -> None:
    """Lets the module of an exported program check its inputs first, by a node as `ExportedProgram.module` has it.

    The conditions are torch's, and those on ranks, types and forms of sizes that torch checks elsewhere if anywhere.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    if not inputs:
        return
    # The name tells the hook that torch puts on such modules to leave sizes and numbers to this.
    module.add_module("_guards_fn", InputGuards(_conditions(module, exported, inputs)))
    with module.graph.inserting_after(inputs[-1]):
        module.graph.call_module("_guards_fn", tuple(inputs))


def _conditions(module: GraphModule, exported: ExportedProgram, inputs: Sequence[Node]) -> list[Condition]:
    from torch.export import _unlift as torch_guards  # It imports all of torch.export and Dynamo.

    signature = inspect.signature(module.forward)
    given = exported.example_inputs or pytree.tree_unflatten(range(len(inputs)), exported.call_spec.in_spec)
    paths = torch_guards._get_input_paths(given, signature)
    values = [node.meta.get("val", _UNKNOWN) for node in inputs]
    sized = [place for place, value in enumerate(values) if isinstance(value, Tensor | torch.SymInt)]
    guards = torch_guards._get_input_guards_for_graph(
        [inputs[place] for place in sized], exported.range_constraints, [paths[place] for place in sized]
    )
    traced = torch_guards._force_ep_signature_match(list(guards_of(exported)), paths)
    guards += torch_guards._force_gm_signature_match(traced, signature)
    names = [path[0].key + pytree.keystr(path[1:]) for path in paths]
    kinds, forms = list[Condition](), list[Condition]()
    for place, value in enumerate(values):
        kinds += _of_kind(value, f"args[{place}]", names[place])
        forms += _of_form(value, f"args[{place}]", names[place])
    sources = {f"L{pytree.keystr(path)}": place for place, path in enumerate(paths)}
    longest_first = sorted(sources.items(), key=_length, reverse=True)  # One path may begin like another.
    return [*kinds, *(_translated(guard, longest_first, names) for guard in guards), *forms]


#: The value of an input that has no metadata.
_UNKNOWN = object()
#: The types that an input of a type may have; tracers hand in symbols for numbers.
_TYPES = {bool: "bool, torch.SymBool", int: "int, torch.SymInt", float: "float, torch.SymFloat", str: "str,"}


def _of_kind(value: Any, source: str, name: str) -> list[Condition]:
    """That a tensor has its rank and a constant its type and value, which torch writes wrongly for text with quotes."""
    if isinstance(value, Tensor):
        return [(f"{source}.dim() == {value.dim()}", f"{name}.dim() == {value.dim()}")]
    if value is None:
        return [(f"{source} is None", f"{name} is None")]
    if type(value) not in _TYPES:
        return []
    of_type = (f"type({source}) in ({_TYPES[type(value)]})", f"type({name}) is {type(value).__name__}")
    if isinstance(value, float) and math.isnan(value):
        return [of_type, (f"math.isnan({source})", f"math.isnan({name})")]
    return [of_type, (f"{source} == {value!r}", f"{name} == {value!r}")]


def _of_form(value: Any, source: str, name: str) -> list[Condition]:
    """That sizes have the form that they were exported in: 2 * n + 1, say, is odd."""
    found = []
    for dimension, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
        expression: Any = size.node.expr if isinstance(size, torch.SymInt) else None
        if expression is None or len(expression.free_symbols) != 1:
            continue
        (symbol,) = expression.free_symbols
        factor = expression.coeff(symbol)
        rest = expression - factor * symbol
        if factor.is_Integer and abs(factor) > 1 and rest.is_Integer:
            form = f".size()[{dimension}] % {factor} == {rest % factor}"
            found.append((source + form, name + form))
    return found


def _length(source: tuple[str, int]) -> int:
    return len(source[0])


def _translated(guard: str, sources: Sequence[tuple[str, int]], names: Sequence[str]) -> Condition:
    """A condition of torch's, which goes by the arguments of the model, on places, and in words."""
    told = guard
    for source, place in sources:
        guard, told = guard.replace(source, f"args[{place}]"), told.replace(source, names[place])
    return guard, ast.unparse(ast.parse(told, mode="eval"))


def _function_of(conditions: Sequence[Condition]) -> Callable[..., None]:
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    checks = [f"    torch._assert({condition}, {f'Guard failed: {told}'!r})" for condition, told in conditions]
    code = "\n".join(["def check(*args):", *checks, "    return"])
    namespace: dict[str, Any] = {**SYMPY_INTERP, "math": math, "inf": math.inf, "torch": torch, "__name__": __name__}
    exec(code, namespace)
    function: Callable[..., None] = namespace["check"]
    return function
