"""The behaviour of Python functions: tables for the language's own, signatures for those of torch."""

from __future__ import annotations

import builtins
import inspect
import math
import operator
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from partita._torch.containers import returns_container
from partita._torch.schemas import HARMLESS, signatures_of
from partita.graphs.behaviour_methods import rule_of_method
from partita.graphs.behaviour_operators import rule_of_operator
from partita.graphs.behaviour_terms import ALIASING, EVERY, FENCE, FIRST, PURE, UNKNOWN, Behaviour, Rule, Slot, argument
from partita.graphs.values import value_of

__all__ = ["rule_of_function"]


@lru_cache(maxsize=1 << 16)
def rule_of_function(target: Callable[..., Any]) -> Rule:
    """The rule for every call of `target`; a function that nobody knows gets the rule for the unknown."""
    known = _KNOWN.get(target) if not isinstance(target, torch.Tensor) else None
    if known is not None:
        return known
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", "")
    by_place = _rule_by_place(module, name)
    if by_place is not None:
        return by_place
    signatures = signatures_of(target)
    if signatures:
        return rule_of_operator(signatures)
    if inspect.ismethoddescriptor(target) or getattr(target, "__qualname__", "").startswith("Tensor."):
        return rule_of_method(name)
    if module in ("torch.nn.functional", "torch.functional", "torch._lowrank", "torch._lobpcg"):
        return _rule_by_parameters(target)
    return _rule_by_name(target, module, name)


def _rule_by_place(module: str, name: str) -> Rule | None:
    """Whole modules of torch that do one kind of thing."""
    if module in ("torch.random", "torch.cuda.random", "torch.xpu.random", "torch.mps.random"):
        return _DRAWS
    if module == "torch.nn.init":
        return Rule(Behaviour(writes=((0, "tensor"),), aliases=((0, "tensor"),), draws=True))
    if module.startswith(("torch.masked.", "torch.signal.")):
        return _ALIASES
    if "_functorch" in module and module.startswith("torch."):
        return _ALIASES if name in _INSIDE_FUNCTORCH else _FENCES
    return None


def _rule_by_name(target: Any, module: str, name: str) -> Rule:
    if module == "torch" or module.startswith(("torch._C", "torch.amp", "torch.autograd")):
        if name.startswith(("sym_", "_sym_", "is_", "get_", "are_", "typename")):
            return _QUIET
        if name.startswith(("_assert", "_check")):
            return _ASSERTS
        if name.startswith(("set_", "use_", "autocast_", "clear_autocast", "_set_", "_enter", "_exit")):
            return _FENCES
    if module == "math":
        return _QUIET
    if isinstance(target, type) and issubclass(target, tuple) and hasattr(target, "_fields"):
        return _ALIASES
    return Rule(UNKNOWN)


def _rule_by_parameters(target: Callable[..., Any]) -> Rule:
    """Functions of torch.nn.functional: their parameters' names tell what they write and when they draw."""
    name = target.__name__
    places = {parameter: (i, parameter) for i, parameter in enumerate(inspect.signature(target).parameters)}
    defaults = {key: parameter.default for key, parameter in inspect.signature(target).parameters.items()}
    first = (0, next(iter(places), "input"))
    usual = Behaviour(aliases=(first,) if name in _HANDS_BACK else (), draws=name in _RANDOM)
    if name.endswith("_"):
        return Rule(Behaviour(writes=(first,), aliases=(first,), draws=usual.draws))
    if name.startswith("_"):
        usual = replace(usual, aliases=(EVERY,))
    if not usual.draws and places.keys().isdisjoint(_TELLING):
        return Rule(usual, is_quiet=True)

    def given(node: Node, parameter: str) -> Any:
        return argument(node, places[parameter], defaults[parameter])

    def by_call(node: Node) -> Behaviour:
        writes = _written(node, places, given)
        shared = tuple(slot for slot in writes if slot[1] == "out")
        if "inplace" in places and given(node, "inplace") is not False:
            writes, shared = (*writes, first), (*shared, first)
        off = any(key in places and _equals(given(node, key), value) for key, value in _off_values(name))
        return replace(usual, writes=writes, aliases=usual.aliases + shared, draws=usual.draws and not off)

    return Rule(usual, by_call)


def _written(node: Node, places: dict[str, Slot], given: Callable[[Node, str], Any]) -> tuple[Slot, ...]:
    """The parameters, other than the input, that this call writes."""
    names: list[str] = []
    if "max_norm" in places and given(node, "max_norm") is not None:
        names.append("weight")
    if "running_mean" in places and given(node, "training" if "training" in places else "use_input_stats") is not False:
        names += [name for name in ("running_mean", "running_var") if given(node, name) is not None]
    if "out" in places and given(node, "out") is not None:
        names.append("out")
    return tuple(places[name] for name in names)


def _off_values(name: str) -> tuple[tuple[str, object], ...]:
    always = (("training", False), ("dropout_p", 0.0))
    return (*always, ("p", 0.0)) if "dropout" in name else always


def _equals(given: Any, value: object) -> bool:
    return isinstance(given, bool | int | float) and given == value


def _of_concatenation(node: Node) -> Behaviour:
    """`+` and `*` copy tensors and numbers, but a list made from lists holds the items of both."""
    return ALIASING if any(map(_is_container, node.args)) else PURE


def _of_update(node: Node) -> Behaviour:
    every = any(map(_is_container, node.args))
    return Behaviour(writes=(FIRST,), aliases=(EVERY,) if every else (FIRST,))


def _of_setitem(node: Node) -> Behaviour:
    """A tensor copies what is put into it; a list or dict keeps it."""
    container, key = node.args[0], node.args[1]
    is_tensor = isinstance(key, slice | tuple | Node | type(...) | None) or (
        isinstance(container, Node) and isinstance(value_of(container), torch.Tensor)
    )
    return Behaviour(writes=(FIRST,), aliases=(FIRST,) if is_tensor else (EVERY,))


def _is_container(value: object) -> bool:
    if not isinstance(value, Node):
        return isinstance(value, tuple | list)
    traced = value_of(value)
    if traced is not None:
        return isinstance(traced, tuple | list)
    return value.target in (list, tuple) or (value.op.startswith("call_") and _may_give_container(value))


def _may_give_container(node: Node) -> bool:
    return node.op != "call_module" and returns_container(node.target)


_QUIET = Rule(PURE, is_quiet=True)
_ALIASES = Rule(ALIASING, is_quiet=True)
_DRAWS = Rule(Behaviour(draws=True))
_ASSERTS = Rule(Behaviour(impure=True))
_FENCES = Rule(FENCE)
_SETS = Rule(Behaviour(writes=(FIRST,), aliases=(EVERY,)))

_TELLING = frozenset(("inplace", "max_norm", "running_mean", "out"))
_HANDS_BACK = frozenset(
    ("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "local_response_norm")
)
_RANDOM = frozenset(
    ("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "gumbel_softmax")
) | {"multi_head_attention_forward", "rrelu", "svd_lowrank", "pca_lowrank", "get_approximate_basis", "lobpcg"}
_RANDOM |= {f"{stem}fractional_max_pool{n}d{tail}" for stem in ("", "_") for n in "23" for tail in ("", "_with_indices")}

#: Functions of functorch that only wrap and unwrap tensors; all others there change the interpreter stack.
_INSIDE_FUNCTORCH = frozenset(
    ("_add_batch_dim", "_remove_batch_dim", "_unwrap_for_grad", "_unwrap_batched", "_wrap_for_grad", "_make_dual")
) | {"_unpack_dual", "get_unwrapped", "lazy_load_decompositions", "is_batchedtensor", "maybe_get_bdim", "maybe_get_level"}


def _known() -> dict[Any, Rule]:
    quiet = "abs all any bool callable chr complex divmod float format hasattr hash hex id int isinstance issubclass"
    quiet += " len oct ord pow range repr round slice str sum type bytes"
    aliasing = "dict enumerate frozenset getattr iter list max min reversed set sorted tuple zip"
    table: dict[Any, Rule] = {getattr(operator, name): _QUIET for name in operator.__all__}
    table |= {getattr(math, name): _QUIET for name in dir(math) if not name.startswith("_")}
    table |= {getattr(builtins, name): _QUIET for name in quiet.split()}
    table |= {getattr(builtins, name): _ALIASES for name in aliasing.split()}
    table |= {getattr(operator, name): _ALIASES for name in ("getitem", "concat")}
    table |= {f: Rule(PURE, _of_concatenation, is_quiet=True) for f in (operator.add, operator.mul)}
    updates = [name for name in operator.__all__ if name.startswith("i") and name[1:].rstrip("_") in _UPDATED]
    table |= {getattr(operator, name): Rule(UNKNOWN, _of_update) for name in updates}
    table |= {operator.setitem: Rule(UNKNOWN, _of_setitem), operator.delitem: _SETS, setattr: _SETS, delattr: _SETS}
    table |= {next: _SETS, print: _ASSERTS, typing.cast: _ALIASES}
    unknown = ("attrgetter", "itemgetter", "methodcaller", "call")
    table |= {getattr(operator, name): Rule(UNKNOWN) for name in unknown if hasattr(operator, name)}
    table |= {t: _QUIET for t in (torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo, torch.Generator)}
    table |= {f: _QUIET for f in (torch.is_grad_enabled, torch.compiler.is_compiling, torch.jit.is_scripting)}
    table |= {f: _ALIASES for f in (torch.nn.Parameter, torch.asarray, torch.from_numpy, torch.frombuffer)}
    table |= {torch.autograd.grad: _FENCES, torch.autograd.backward: _FENCES}
    return table | dict.fromkeys(HARMLESS, _QUIET)


_UPDATED = frozenset("add and concat floordiv lshift matmul mod mul or pow rshift sub truediv xor".split())
_KNOWN = _known()
