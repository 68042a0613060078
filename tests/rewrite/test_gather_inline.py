"""Gathering moves nodes together and changes nothing; inlining puts bodies in the place of calls and loses nothing."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from tests.helpers.core import cut, listing, program_of, text
from tests.rewrite.helpers import call_sub, calling
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

from partita import Partition, Region, fingerprint, gather, inline, verify
from partita._torch.toggles import ENTER_AUTOCAST, EXIT_AUTOCAST
from partita.errors import OptionError
from partita.testing.generator.build import dump


def test_gathering_puts_a_region_side_by_side() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    values = [graph.call_function(getattr(torch, name), (x,)) for name in ("sin", "cos", "tan", "exp")]
    graph.output(tuple(values))
    program = program_of(graph)
    partition = Partition(program, [Region("pair", (program.node("sin"), program.node("tan")))])
    gathered = gather(partition)
    assert [node.name for node in gathered.graph.nodes] == ["x", "sin", "tan", "cos", "exp", "output"]
    assert [node.name for node in program.graph.nodes] == ["x", "sin", "cos", "tan", "exp", "output"]
    assert fingerprint(gathered) == fingerprint(program)


def test_gathering_what_is_together_changes_no_line() -> None:
    program = program_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    gathered = gather(Partition(program, [Region("all", tuple(program.operators()))]))
    assert listing(gathered) == listing(program)
    assert gathered.graph_module.get_submodule("0") is program.graph_module.get_submodule("0")


def test_inlining_undoes_outlining() -> None:
    program = program_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    cut_up = cut(program, {"_0": "a", "_1": "a", "_2": "b"})
    inlined = inline(cut_up)
    assert listing(inlined) == listing(program)
    assert list(inlined.module().state_dict()) == list(program.module().state_dict())


def test_a_body_that_returns_its_own_input() -> None:
    body = symbolic_trace(lambda x: x)
    program = calling(body, lambda graph, x: graph.call_function(torch.sin, (call_sub(graph, x),)))
    inlined = inline(program)
    assert listing(inlined) == "x: input\nsin = sin(x)\nreturn sin"
    assert list(inlined.node("x").users) == [inlined.node("sin")]
    inlined.graph.lint()


def test_a_module_inside_a_body_keeps_calling_its_own_module() -> None:
    inner = nn.Module()
    inner.linear = nn.Linear(2, 2)
    graph = Graph()
    graph.output(graph.call_module("linear", (graph.placeholder("x"),)))
    program = calling(
        GraphModule(inner, graph),
        lambda graph, x: graph.call_module("linear", (call_sub(graph, x),)),
        linear=nn.Linear(2, 2),
    )
    inlined = inline(program)
    assert [node.target for node in inlined.operators()] == ["sub.linear", "linear"]
    verify(program, inlined, (torch.randn(2, 2),))


def test_a_body_called_twice_is_inlined_twice() -> None:
    program = calling(symbolic_trace(torch.nn.Linear(2, 2)), lambda graph, x: call_sub(graph, call_sub(graph, x)))
    inlined = inline(program)
    assert not inlined.graph.find_nodes(op="call_module")
    assert len(inlined.operators()) == 2
    assert len(list(inlined.module().parameters())) == 2
    verify(program, inlined, (torch.randn(2, 2),))


def test_one_of_two_calls_can_be_inlined() -> None:
    program = calling(symbolic_trace(nn.ReLU()), lambda graph, x: call_sub(graph, call_sub(graph, x)))
    body = program.graph_module.sub
    inlined = inline(program, ["sub_1"])
    assert [node.name for node in inlined.graph.find_nodes(op="call_module")] == ["sub"]
    assert inlined.graph_module.sub is body
    verify(program, inlined, (torch.randn(2),))


def keyed(a: Tensor, b: Tensor, scale: float = 3.0, *rest: Tensor, last: float = 1.0) -> Tensor:
    return (a - b) * scale


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"b": 1, "a": 0}),
        ((0,), {"b": 1}),
        ((0, 1), {"scale": 2.0}),
        ((0, 1, 2.0), {"last": 5.0}),
        ((0,), {"b": 1, "scale": 0.5, "last": 2.0}),
    ],
)
def test_arguments_are_bound_as_python_binds_them(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    graph = Graph()
    given = [graph.placeholder("x"), graph.placeholder("y")]

    def swapped(value: Any) -> Any:
        return given[value] if isinstance(value, int) else value

    root = nn.Module()
    root.sub = symbolic_trace(keyed)
    call = graph.call_module("sub", tuple(map(swapped, args)), {key: swapped(value) for key, value in kwargs.items()})
    graph.output(call)
    program = program_of(graph, root)
    verify(program, inline(program), (torch.randn(2), torch.randn(2)))


def test_further_arguments_arrive_as_a_tuple() -> None:
    body = Graph()
    body.placeholder("first")
    rest, more = body.placeholder("*rest"), body.placeholder("**more")
    body.output((rest, more))
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("sub", (x, x, 2), {"k": x}))
    root = nn.Module()
    root.sub = GraphModule(nn.Module(), body)
    inlined = inline(program_of(graph, root))
    assert listing(inlined) == "x: input\nreturn ((x, 2), {'k': x})"


def test_missing_and_surplus_arguments_are_named() -> None:
    body = symbolic_trace(lambda a, b: a + b)
    with pytest.raises(OptionError, match="'sub' has no argument for 'b'"):
        inline(calling(body, call_sub))
    with pytest.raises(OptionError, match="'sub' has more"):
        inline(calling(body, lambda graph, x: graph.call_module("sub", (x, x, x))))
    with pytest.raises(OptionError, match="'sub' has more"):
        inline(calling(body, lambda graph, x: graph.call_module("sub", (x, x), {"a": x})))


def test_a_tuple_that_is_returned_whole_and_unpacked() -> None:
    body = symbolic_trace(lambda x: (x + 1, [x * 2]))

    def call(graph: Graph, x: Any) -> Any:
        pair = call_sub(graph, x)
        return (pair, graph.call_function(operator.getitem, (pair, 0)))

    program = calling(body, call)
    assert listing(inline(program)) == text("""
        x: input
        add = add(x, 1)
        mul = mul(x, 2)
        return ((add, [mul]), add)
    """)
    verify(program, inline(program), (torch.randn(2),))


def test_a_tuple_taken_apart_by_other_means() -> None:
    body = symbolic_trace(lambda x: (x + 1, x * 2, x - 3))
    program = calling(body, lambda graph, x: graph.call_function(operator.getitem, (call_sub(graph, x), slice(0, 2))))
    verify(program, inline(program), (torch.randn(2),))


def test_the_inlined_module_is_not_destroyed() -> None:
    body = symbolic_trace(nn.Linear(2, 2))
    program = calling(body, call_sub)
    before, whole = dump(program.graph_module.sub), dump(program.graph_module)
    inline(program)
    assert dump(program.graph_module.sub) == before
    assert dump(program.graph_module) == whole
    assert program.graph_module.sub(torch.ones(2)).shape == (2,)


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_a_module_with_hooks_stays_a_call(register: str) -> None:
    body = symbolic_trace(nn.ReLU())
    getattr(body, register)(lambda *_: None)
    program = calling(body, call_sub)
    assert inline(program).graph.find_nodes(op="call_module")
    with pytest.raises(OptionError, match="'sub' calls 'sub', which cannot be inlined: it has hooks"):
        inline(program, ["sub"])


def test_only_calls_of_graph_modules_can_be_named() -> None:
    program = calling(nn.ReLU(), call_sub)
    assert listing(inline(program)) == listing(program)
    with pytest.raises(OptionError, match="it is no graph module"):
        inline(program, ["sub"])
    with pytest.raises(OptionError, match="no call of a body is named 'nobody'"):
        inline(program, ["nobody"])


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cuda")])
def test_autocast_blocks_that_cross_and_are_closed_stay_closed(devices: tuple[str, ...]) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for device in devices:
        outer = graph.call_function(ENTER_AUTOCAST, (device, None, False, None))
        inner = graph.call_function(ENTER_AUTOCAST, (device, None, True, None))
        graph.call_function(EXIT_AUTOCAST, (outer,))
        graph.call_function(EXIT_AUTOCAST, (inner,))
    graph.output(graph.call_function(torch.sin, (x,)))
    program = program_of(graph)
    assert program.modes.final.autocast
    after = cut(program, {"sin": "a"})
    for written in (after, inline(after), gather(Partition(program, ()))):
        enters = written.graph.find_nodes(op="call_function", target=ENTER_AUTOCAST)
        exits = written.graph.find_nodes(op="call_function", target=EXIT_AUTOCAST)
        assert len(enters) == len(exits) >= 2 * len(devices)
        verify(program, written, (torch.randn(2),))  # The nesting depth of autocast is a mode that it compares.
        assert fingerprint(written) == fingerprint(program) or written is after
