"""What Inductor compiled, behind the wrappers of AOTAutograd, for calls in which these have nothing to do.

The wrappers switch modes, replay mutations and views, and record autograd; that takes twenty Python calls a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

#: Takes its arguments in a list, which it clears.
Boxed = Callable[[list[Any]], Sequence[Any]]

#: The wrappers that are passed over; one that is not known is needed.
_WRAPPERS = frozenset(
    {
        "aot_module_simplified.<locals>.forward",
        "_create_runtime_wrapper.<locals>.runtime_wrapper",
        # Before torch 2.13 they are always there; they do something where random numbers are functionalized, and where
        # effects have tokens, which are outputs too.
        "FunctionalizedRngRuntimeWrapper.post_compile.<locals>.wrapper",
        "EffectTokensWrapper.post_compile.<locals>.inner_fn",
        # What can be stored in a cache, or comes from one.
        "SerializableCompiledFunction",
    }
)


def behind_wrappers(function: Callable[..., Any], *, output_count: int) -> Callable[[], Boxed] | None:
    """Finds the code of a piece without side effects that needs no gradient, and runs without grad mode and autocast.

    None where `function` does not come from Inductor, or has wrappers that do more than switch such modes. Otherwise a
    function that returns the code; ask it after the first call, at which torch checks operators of users. The code
    lives as long as `function`.
    """
    from functorch.compile import config as settings

    if settings.functionalize_rng_ops:
        return None
    compiled = compiled_graph(function)
    # The wrappers drop tokens, and bases of which they make views.
    strides = getattr(compiled, "output_strides", None)
    if strides is None or len(strides) != output_count:
        return None

    def code_of_piece() -> Boxed:
        found: Boxed = compiled.current_callable
        return found

    return code_of_piece


def compiled_graph(function: Any) -> Any:
    """The graph that Inductor compiled, inside of wrappers that can be passed over; None where there are others."""
    compiled = inside_wrappers(function, _WRAPPERS)
    return None if getattr(compiled, "current_callable", None) is None else compiled


def inside_wrappers(function: Any, known: Collection[str]) -> Any:
    """What is inside of wrappers with these names."""
    while _name(function) in known:
        function = getattr(function, "__wrapped__", None)
    return function


def _name(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return type(function).__qualname__ if code is None else str(code.co_qualname)
