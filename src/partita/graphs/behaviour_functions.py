"""The behaviour of functions: a schema where there is one, torch's own signatures and naming rules elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from partita._torch.lasting import is_lasting
from partita._torch.schemas import HARMLESS, signatures_of
from partita.graphs.behaviour_methods import rule_of_method
from partita.graphs.behaviour_operators import rule_of_operator
from partita.graphs.behaviour_python import PYTHON_RULES
from partita.graphs.behaviour_terms import (
    ALIASES,
    EVERY,
    FENCES,
    IMPURE,
    QUIET,
    UNKNOWN,
    Behaviour,
    Rule,
    Slot,
    argument,
)

__all__ = ["rule_of_function"]


def rule_of_function(target: Callable[..., Any]) -> Rule:
    """The rule for every call of `target`; a function that nobody knows gets the rule for the unknown."""
    # A closure may hold a whole model, so nothing is kept that would keep one alive.
    return _kept_rule(target) if is_lasting(target) else _rule(target)


@lru_cache(maxsize=1 << 16)
def _kept_rule(target: Callable[..., Any]) -> Rule:
    return _rule(target)


def _rule(target: Callable[..., Any]) -> Rule:
    if target in _KNOWN:
        return _KNOWN[target]
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    by_place = _rule_by_place(module, name)
    if by_place is not None:
        return by_place
    signatures = signatures_of(target)
    if signatures:
        return rule_of_operator(signatures)
    if getattr(torch.Tensor, name, None) is target:
        return rule_of_method(name)
    if name == "__get__":
        return ALIASES
    if module in ("torch.nn.functional", "torch.functional", "torch._lowrank", "torch._lobpcg"):
        return _rule_by_parameters(target)
    return _rule_by_name(target, module, name)


def _rule_by_place(module: str, name: str) -> Rule | None:
    """Whole modules of torch that do one kind of thing."""
    if module in ("torch.random", "torch.cuda.random", "torch.mps.random", "torch.xpu.random"):
        return Rule(Behaviour(draws=True))
    if module == "torch.nn.init":
        tensor = (0, "tensor")
        return Rule(Behaviour(writes=(tensor,), aliases=(tensor,), draws=True))
    if module.startswith(("torch.masked.", "torch.signal.")):
        return ALIASES
    if module.startswith(("torch._functorch.", "torch._C._functorch")):
        return ALIASES if name in _INSIDE_FUNCTORCH else FENCES
    return None


def _rule_by_name(target: Any, module: str, name: str) -> Rule:
    if module == "torch" or module.startswith(_PLACES_OF_QUESTIONS):
        if name.startswith(("_sym_", "are_", "get_", "is_", "sym_", "typename")):
            return QUIET
        if name.startswith(("_assert", "_check")):
            return IMPURE
        if name.startswith(("_enter", "_exit", "_set_", "autocast_", "clear_autocast", "set_", "use_")):
            return FENCES
    if isinstance(target, type) and issubclass(target, tuple) and hasattr(target, "_fields"):
        return ALIASES
    return Rule(UNKNOWN)


def _rule_by_parameters(target: Callable[..., Any]) -> Rule:
    """Functions of torch.nn.functional: the names of their parameters tell what they write and when they draw."""
    name = target.__name__
    parameters = inspect.signature(target).parameters
    first = (0, next(iter(parameters), "input"))
    aliases: tuple[Slot, ...] = (first,) if name in _HANDS_BACK else ()
    usual = Behaviour(aliases=(EVERY,) if name.startswith("_") else aliases, draws=name in _RANDOM)
    if name.endswith("_"):
        return Rule(replace(usual, writes=(first,), aliases=(first,)))
    if not usual.draws and parameters.keys().isdisjoint(("inplace", "max_norm", "out", "running_mean")):
        return Rule(usual, is_quiet=True)
    places = {key: (i, key) for i, key in enumerate(parameters)}

    def by_call(node: Node) -> Behaviour:
        given = {key: argument(node, slot, parameters[key].default) for key, slot in places.items()}
        writes = tuple(places[key] for key in _written(given))
        shared = tuple(slot for slot in writes if slot[1] == "out")
        if given.get("inplace", False) is not False:
            writes, shared = (*writes, first), (*shared, first)
        draws = usual.draws and not _is_off(name, given)
        return replace(usual, writes=writes, aliases=usual.aliases + shared, draws=draws)

    return Rule(usual, by_call)


def _written(given: dict[str, Any]) -> list[str]:
    """The parameters, other than the input, that a call with these arguments writes."""
    names = [] if given.get("out") is None else ["out"]
    if given.get("max_norm") is not None:
        names.append("weight" if "weight" in given else "input")
    updates = given.get("training", given.get("use_input_stats", False))
    if "running_mean" in given and updates is not False:
        names += [key for key in ("running_mean", "running_var") if given[key] is not None]
    return names


def _is_off(name: str, given: dict[str, Any]) -> bool:
    """Whether a call with these arguments draws nothing."""
    chance = given.get("p" if "dropout" in name else "dropout_p")
    return given.get("training") is False or (isinstance(chance, int | float) and chance == 0)


_PLACES_OF_QUESTIONS = (
    "torch._C",
    "torch._jit_internal",
    "torch.amp",
    "torch.autograd",
    "torch.compiler",
    "torch.overrides",
)
_DROPOUTS = frozenset(
    ("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
)
#: Functions that may return their input itself.
_HANDS_BACK = _DROPOUTS | {"local_response_norm"}
_RANDOM = (
    _DROPOUTS
    | {"get_approximate_basis", "gumbel_softmax", "lobpcg", "multi_head_attention_forward", "pca_lowrank", "rrelu"}
    | {"svd_lowrank", "fractional_max_pool2d", "fractional_max_pool3d", "_fractional_max_pool2d"}
    | {"_fractional_max_pool3d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"}
)

#: Functions of functorch that wrap, unwrap or ask; all others there change the stack of transforms.
_INSIDE_FUNCTORCH = frozenset(
    (
        "_add_batch_dim",
        "_make_dual",
        "_remove_batch_dim",
        "_unpack_dual",
        "_unwrap_batched",
        "_unwrap_for_grad",
        "_wrap_for_grad",
        "get_unwrapped",
        "is_batchedtensor",
        "lazy_load_decompositions",
        "maybe_get_bdim",
        "maybe_get_level",
    )
)

_KNOWN: dict[Any, Rule] = {
    **PYTHON_RULES,
    **dict.fromkeys(HARMLESS, QUIET),
    **dict.fromkeys((torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo, torch.Generator), QUIET),
    **dict.fromkeys((torch.nn.Parameter, torch.asarray, torch.from_numpy, torch.frombuffer), ALIASES),
    torch.autograd.backward: FENCES,
    torch.autograd.grad: FENCES,
}
