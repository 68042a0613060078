"""Gradients: one backward pass from everything that a call made, leaving every `.grad` field as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from partita._torch.wrapper_tensors import inner_tensors, plain_tensors
from partita.equivalence.observation import Raised, TensorRecord, record_of

__all__ = ["gradients_of", "kept_gradient_fields"]


@contextmanager
def kept_gradient_fields(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Runs the block with empty `.grad` fields and gives the leaves their old ones back."""
    kept = [(leaf, leaf.grad) for leaf in {id(leaf): leaf for leaf in leaves if leaf.is_leaf}.values()]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in kept:
            leaf.grad = grad


def gradients_of(
    results: Sequence[Tensor], leaves: Sequence[tuple[str, Tensor]]
) -> tuple[Raised | None, tuple[tuple[str, TensorRecord | None], ...]]:
    """The gradients that the leaves get from a weighted sum of `results`, and the exception that got in the way."""
    differentiable = [result for result in results if result.requires_grad]
    known = {id(leaf) for _, leaf in leaves}
    try:
        behind = _leaves_behind(differentiable)
    except RuntimeError as error:  # Some views that were written cannot even be asked for their graph.
        return Raised(type(error), str(error)), ()
    reached = [leaf for leaf in behind if id(leaf) not in known]
    # Both programs reach the very same tensors there, in any order, so identity is what pairs them.
    outside = ((f"a leaf of shape {tuple(leaf.shape)} outside the state, {id(leaf):#x}", leaf) for leaf in reached)
    everything = [*leaves, *outside]
    tensors = [leaf for _, leaf in everything]
    try:
        found = _gradients(differentiable, tensors)
    except Exception as error:
        return Raised(type(error), str(error)), tuple((name, None) for name, _ in everything)
    return None, tuple((name, _record(gradient)) for (name, _), gradient in zip(everything, found, strict=True))


def _gradients(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients, without a `.grad` field or a hook that waits for one being touched where that is possible."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    weights = [_weights(number, result) for number, result in enumerate(results)]
    if not results or not wanted:
        return [None] * len(leaves)
    try:
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            results, wanted, weights, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if "incompatible with .grad()" not in str(error):
            raise
        # Reentrant checkpoints work with nothing but `.backward()`.
        with kept_gradient_fields(leaves):
            torch.autograd.backward(list(results), weights)
            found = tuple(leaf.grad for leaf in wanted)
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(wanted, found, strict=True)}
    return [by_leaf.get(id(leaf)) for leaf in leaves]


def _weights(number: int, result: Tensor) -> Tensor:
    """Weights between 0.5 and 1.5, the same in every run, none of which hides another's mistake."""
    if inner_tensors(result):
        # Every process weighs its own part, so that nobody waits for another.
        wrapper = result.detach().clone()
        for inner in plain_tensors(wrapper):
            inner.copy_(_weights(number, inner))
        return wrapper
    generator = torch.Generator().manual_seed(number + 1)
    weights = torch.rand(result.shape, generator=generator, dtype=torch.float32) + 0.5
    return weights.to(device=result.device, dtype=result.dtype)


def _leaves_behind(results: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that the graphs of these results end in; a function's closure may hold some."""
    stack = [result.grad_fn for result in results if result.grad_fn is not None]
    seen = set(stack)
    leaves: dict[int, Tensor] = {}
    while stack:
        step = stack.pop()
        variable = getattr(step, "variable", None)
        if isinstance(variable, Tensor):
            leaves.setdefault(id(variable), variable)
        for behind, _ in step.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                stack.append(behind)
    return list(leaves.values())


def _record(gradient: Tensor | None) -> TensorRecord | None:
    record = None if gradient is None else record_of(gradient)
    return record if isinstance(record, TensorRecord) else None
