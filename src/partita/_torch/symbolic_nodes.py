"""Symbolic numbers as nodes: the arithmetic of an expression, written behind the nodes of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

__all__ = ["write_number"]


def write_number(number: torch.SymInt, by_symbol: Mapping[Any, Node]) -> Node | int | None:
    """A new node that computes `number` from these nodes, or a constant; None if the node for a symbol is missing."""
    expression = number.node.expr
    if expression.is_number:
        return int(expression)
    if not by_symbol.keys() >= expression.free_symbols:
        return None
    # This brings sympy, which takes longer to import than all of Partita.
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    tracers = {node.graph: GraphAppendingTracer(node.graph) for node in by_symbol.values()}
    proxies = {symbol: Proxy(node, tracers[node.graph]) for symbol, node in by_symbol.items()}
    made = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    return made.node if isinstance(made, Proxy) else int(made)
