"""Marks on the nodes of Dynamo's graph, for compilers that read them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from partita.plans import Plan

__all__ = ["digest_of_marks", "marks_written"]


@contextmanager
def marks_written(decided: Plan, example_inputs: Sequence[Any]) -> Iterator[None]:
    """Writes the marks of a plan on its graph, which the backend owns; the graph or its parts are compiled inside."""
    marks = decided.marks() if _is_trained(example_inputs) else _for_inference(decided.marks())
    for node, own in marks.items():
        node.meta.update(own)
    # torch's cache of compiled graphs sees no metadata: without the tag, another plan would get the old code.
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag=_tag(marks)):
        yield


def _is_trained(example_inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)


def _for_inference(marks: Mapping[Node, Mapping[str, object]]) -> dict[Node, dict[str, object]]:
    """Without what is about a backward that will never be: torch 2.13 refuses to recompute random numbers there."""
    return {node: {key: own[key] for key in own if key not in _OF_A_BACKWARD} for node, own in marks.items()}


_OF_A_BACKWARD = ("recompute", "ac_graph_id")


def digest_of_marks(marks: Mapping[Node, Mapping[str, object]]) -> str:
    """A text that differs for plans that mark otherwise, and is the same for equal ones in every process.

    The numbers of regions only count by their order, since they go on from plan to plan.
    """
    order: dict[object, int] = {}
    told = []
    for node, own in marks.items():
        for key, value in own.items():
            shown = order.setdefault(value, len(order)) if isinstance(value, int) and key == "ac_graph_id" else value
            told.append(f"{node.name} {key} {shown}")
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _tag(marks: Mapping[Node, Mapping[str, object]]) -> str:
    given = torch.compiler.config.cache_key_tag
    return f"{given}partita:{digest_of_marks(marks)}"
