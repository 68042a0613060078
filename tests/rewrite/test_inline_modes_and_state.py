"""Inlining composes the modes of body and call, and leaves state where and what it was."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.core import program_of
from tests.rewrite.helpers import call_sub, calling
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx._symbolic_trace import PH

from partita import inline, verify
from partita._torch.toggles import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD
from partita.errors import ModeError, OptionError


def in_mode(enter: tuple[Any, ...], leave: Any, inside: Callable[[Graph, Any], Any]) -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    block = graph.call_function(enter[0], enter[1:])
    value = inside(graph, x)
    graph.call_function(leave, (block,) if leave is EXIT_AUTOCAST else (True,))
    graph.output(value)
    return graph


def product(graph: Graph, x: Any) -> Any:
    return graph.call_function(torch.mm, (x, x))


@pytest.mark.parametrize("inner", [torch.bfloat16, None])
def test_an_open_autocast_dtype_is_that_of_the_surroundings(inner: torch.dtype | None) -> None:
    root = nn.Module()
    root.sub = GraphModule(nn.Module(), in_mode((ENTER_AUTOCAST, "cpu", inner, True, None), EXIT_AUTOCAST, product))
    program = program_of(in_mode((ENTER_AUTOCAST, "cpu", torch.float16, True, None), EXIT_AUTOCAST, call_sub), root)
    assert program.module()(torch.ones(2, 2)).dtype == (inner or torch.float16)
    verify(program, inline(program), (torch.ones(2, 2),))


def test_modes_of_body_and_call_are_composed() -> None:
    root = nn.Module()
    root.sub = GraphModule(nn.Module(), in_mode((SET_GRAD, False), SET_GRAD, product))
    program = program_of(in_mode((ENTER_AUTOCAST, "cpu", torch.bfloat16, True, None), EXIT_AUTOCAST, call_sub), root)
    with pytest.raises(ModeError, match="'sub' calls leaves"):
        inline(program, "sub")
    assert inline(program).graph.find_nodes(op="call_module"), "whoever asks for all gets all that can be inlined"
    root.sub = GraphModule(
        nn.Module(), in_mode((ENTER_AUTOCAST, "cpu", torch.bfloat16, True, None), EXIT_AUTOCAST, product)
    )
    program = program_of(in_mode((SET_GRAD, False), SET_GRAD, call_sub), root)
    inlined = inline(program)
    mode = inlined.modes.at(inlined.index.number[inlined.node("mm")])
    assert (mode.grad, mode.autocast[0].dtype) == (False, torch.bfloat16)
    verify(program, inlined, (torch.ones(2, 2, requires_grad=True),))


def test_inlining_keeps_buffers_out_of_the_state_dict() -> None:
    body = symbolic_trace(lambda x: x + 1)
    body.register_buffer("seen", torch.ones(2), persistent=False)
    body.graph.find_nodes(op="call_function", target=operator.add)
    with body.graph.inserting_before(body.graph.output_node()):
        read = body.graph.create_node("get_attr", "seen")
    body.graph.output_node().args = (read,)
    body.recompile()
    program = calling(body, call_sub)
    assert list(program.module().state_dict()) == list(inline(program).module().state_dict()) == []


def test_a_body_with_pytree_arguments_is_refused_in_words() -> None:
    body = symbolic_trace(lambda d: {"sum": d["a"] + d["b"]}, concrete_args={"d": {"a": PH, "b": PH}})
    program = calling(body, lambda graph, x: graph.call_module("sub", ({"a": x, "b": x},)))
    verify(program, inline(program), (torch.ones(2),))
    with pytest.raises(OptionError, match="cannot be inlined"):
        inline(program, ["sub"])
