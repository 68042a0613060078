"""Gradients: one backward pass from everything that a call made, leaving every `.grad` field as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

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
    raised = None
    with kept_gradient_fields(reached):
        if differentiable:
            try:
                torch.autograd.backward(
                    differentiable, [_weights(n, result) for n, result in enumerate(differentiable)]
                )
            except Exception as error:
                raised = Raised(type(error), str(error))
        return raised, tuple((name, _record(leaf)) for name, leaf in everything)


def _weights(number: int, result: Tensor) -> Tensor:
    """Weights between 0.5 and 1.5, the same in every run, none of which hides another's mistake."""
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


def _record(leaf: Tensor) -> TensorRecord | None:
    grad = leaf.grad if leaf.is_leaf else None
    record = None if grad is None else record_of(grad)
    return record if isinstance(record, TensorRecord) else None
