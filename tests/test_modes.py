"""Modes: what the graph says about each node is what the node finds when it runs, however the blocks are nested."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Node

from partita import Partition, Program, Region, outline
from partita._torch.ambient import Ambient, read_ambient
from partita._torch.toggles import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    IS_GRAD_ENABLED,
    SET_GRAD,
)
from partita.errors import ModeError
from partita.graphs.modes import AMBIENT, Autocast, Mode
from tests.core_helpers import cut, program_of

SEEN: dict[int, Ambient] = {}
HALF, BRAIN = torch.float16, torch.bfloat16


def probe(x: Tensor, number: int) -> Tensor:
    """Takes down the modes that it runs under."""
    SEEN[number] = read_ambient()
    return x.clone()


class Script:
    """A graph of toggles with a probe after each; `modes` are what the graph says at the probes."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x = self.graph.placeholder("x")
        self.probes: list[Node] = []

    def toggle(self, target: Callable[..., Any], *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        self.probe()
        return node

    def probe(self) -> None:
        self.probes.append(self.graph.call_function(probe, (self.x, len(self.probes))))

    def program(self) -> Program:
        if self.graph.find_nodes(op="output") == []:
            self.graph.output(tuple(self.probes))
        return Program.of(program_of(self.graph), pure=[probe])

    def modes(self) -> list[Mode]:
        program = self.program()
        return [program.modes.at(program.index.number[node]) for node in program.graph.find_nodes(
            op="call_function", target=probe
        )]  # fmt: skip


def observed(program: Program) -> dict[int, Ambient]:
    SEEN.clear()
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.enable_grad():
        found = read_ambient()
        program.module()(torch.ones(2))
        assert found.autocast == read_ambient().autocast or program.modes.final.autocast
    return dict(SEEN)


def test_a_graph_without_toggles_has_the_mode_of_its_caller() -> None:
    script = Script()
    script.probe()
    assert script.modes() == [AMBIENT]
    assert script.program().modes.by_number is None


def test_nested_blocks_keep_what_they_do_not_set() -> None:
    script = Script()
    block = script.toggle(ENTER_AUTOCAST, "cpu", BRAIN, True, None)
    script.toggle(SET_GRAD, False)
    script.toggle(EXIT_AUTOCAST, block)
    script.toggle(SET_GRAD, True)
    cast = (Autocast("cpu", BRAIN),)
    assert script.modes() == [Mode(autocast=cast), Mode(False, None, cast), Mode(False), Mode(True)]
    assert script.program().modes.final == Mode(True)


def test_an_inner_autocast_takes_from_the_outer_what_it_leaves_open() -> None:
    script = Script()
    outer = script.toggle(ENTER_AUTOCAST, "cpu", HALF, True, False)
    inner = script.toggle(ENTER_AUTOCAST, "cpu", None, False, None)
    script.toggle(EXIT_AUTOCAST, inner)
    script.toggle(EXIT_AUTOCAST, outer)
    first = Autocast("cpu", HALF, True, False)
    assert [mode.autocast for mode in script.modes()] == [(first,), (Autocast("cpu", HALF, False, False),), (first,), ()]


def test_devices_are_apart() -> None:
    script = Script()
    one = script.toggle(ENTER_AUTOCAST, "cpu", BRAIN, True, None)
    two = script.toggle(ENTER_AUTOCAST, "cuda", HALF, True, None)
    script.toggle(EXIT_AUTOCAST, one)
    script.toggle(EXIT_AUTOCAST, two)
    devices = [[block.device for block in mode.autocast] for mode in script.modes()]
    assert devices == [["cpu"], ["cpu", "cuda"], ["cuda"], []]


def test_autocast_left_in_the_order_of_entering_puts_back_what_each_found() -> None:
    script = Script()
    one = script.toggle(ENTER_AUTOCAST, "cpu", BRAIN, True, None)
    two = script.toggle(ENTER_AUTOCAST, "cpu", HALF, True, None)
    script.toggle(EXIT_AUTOCAST, one)
    script.toggle(EXIT_AUTOCAST, two)
    dtypes = [[block.dtype for block in mode.autocast] for mode in script.modes()]
    assert dtypes == [[BRAIN], [HALF], [], [BRAIN]]


def test_inference_sets_grad_and_leaving_puts_back_both() -> None:
    script = Script()
    script.toggle(SET_GRAD, True)
    block = script.toggle(ENTER_INFERENCE, True)
    script.toggle(SET_GRAD, True)
    inner = script.toggle(ENTER_INFERENCE, False)
    script.toggle(EXIT_INFERENCE, inner)
    script.toggle(EXIT_INFERENCE, block)
    told = [(mode.grad, mode.inference) for mode in script.modes()]
    assert told == [(True, None), (False, True), (True, True), (True, False), (True, True), (True, None)]


def test_the_callers_grad_mode_comes_back_by_value() -> None:
    script = Script()
    script.toggle(SET_GRAD, False)
    asked = script.graph.call_function(IS_GRAD_ENABLED)
    script.toggle(SET_GRAD, True)
    script.toggle(SET_GRAD, asked)
    assert [mode.grad for mode in script.modes()] == [False, True, False]

    script = Script()
    asked = script.graph.call_function(IS_GRAD_ENABLED)
    script.toggle(SET_GRAD, False)
    script.toggle(SET_GRAD, asked)
    assert script.modes()[-1] == AMBIENT
    assert script.program().index.number[asked] in script.program().modes.toggles


def test_a_grad_mode_that_somebody_reads_is_no_toggle() -> None:
    script = Script()
    script.toggle(SET_GRAD, False)
    asked = script.graph.call_function(IS_GRAD_ENABLED)
    script.toggle(SET_GRAD, True)
    script.graph.output((asked, script.probes[0]))
    program = script.program()
    assert program.index.number[asked] not in program.modes.toggles
    assert program.modes.at(program.index.number[asked]).grad is False
    after = cut(program, {asked.name: "ask", script.probes[0].name: "probe"})
    assert after.module()(torch.ones(2))[0] is False


def test_the_result_of_a_toggle_is_none() -> None:
    script = Script()
    script.graph.output((script.toggle(SET_GRAD, False), script.probes[0], script.toggle(SET_GRAD, True)))
    after = cut(script.program(), {node.name: "part" for node in script.probes})
    returned = after.module()(torch.ones(2))
    assert (returned[0], returned[2]) == (None, None)


def test_an_inference_block_that_nobody_leaves_is_what_it_is_when_run() -> None:
    script = Script()
    script.toggle(ENTER_INFERENCE, True)
    try:
        after = cut(script.program(), {"probe": "part"})
    except ModeError:
        return
    assert observed(after)[0].inference is observed(script.program())[0].inference


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (SET_GRAD, ("x",)),
        (SET_GRAD, (1,)),
        (SET_GRAD, ()),
        (ENTER_INFERENCE, ("x",)),
        (ENTER_AUTOCAST, ("cpu", "x")),
        (ENTER_AUTOCAST, ("x", BRAIN, True, None)),
        (ENTER_AUTOCAST, ("cpu", BRAIN, "x", None)),
        (ENTER_AUTOCAST, ()),
    ],
)
def test_a_toggle_by_values_is_refused_and_named(target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    script = Script()
    script.toggle(target, *(script.x if argument == "x" else argument for argument in arguments))
    with pytest.raises(ModeError, match=f"'_?{target.__name__.lstrip('_')}' switches a mode by values"):
        script.modes()


@pytest.mark.parametrize(("enter", "leave"), [(ENTER_AUTOCAST, EXIT_AUTOCAST), (ENTER_INFERENCE, EXIT_INFERENCE)])
def test_a_block_left_twice_or_never_entered_is_refused(enter: Any, leave: Any) -> None:
    script = Script()
    block = script.toggle(enter, *(("cpu",) if enter is ENTER_AUTOCAST else (True,)))
    script.toggle(leave, block)
    script.toggle(leave, block)
    with pytest.raises(ModeError, match=f"'{leave.__name__}_1' leaves '{enter.__name__}', which is not an open block"):
        script.modes()
    script = Script()
    script.toggle(leave, script.x)
    with pytest.raises(ModeError, match="leaves 'x', which is not an open block"):
        script.modes()


def test_a_handle_that_somebody_reads_is_refused() -> None:
    script = Script()
    script.graph.output((script.toggle(ENTER_AUTOCAST, "cpu", BRAIN), *script.probes))
    with pytest.raises(ModeError, match="'output' reads '_enter_autocast', the handle of a block"):
        script.modes()


@pytest.mark.parametrize("autocast_first", [True, False])
def test_autocast_and_inference_blocks_that_cross_are_refused(autocast_first: bool) -> None:
    script = Script()
    kinds = [(ENTER_AUTOCAST, EXIT_AUTOCAST, ("cpu",)), (ENTER_INFERENCE, EXIT_INFERENCE, (True,))]
    (enter, leave, args), (other, leave_other, other_args) = kinds if autocast_first else kinds[::-1]
    block, crossing = script.toggle(enter, *args), script.toggle(other, *other_args)
    script.toggle(leave, block)
    script.toggle(leave_other, crossing)
    with pytest.raises(ModeError, match="'_enter_autocast' crosses the inference block"):
        script.modes()


def random_script(source: Random, length: int) -> Script:
    """Blocks of all kinds, opened and left in any order that is allowed."""
    script = Script()
    autocasts: list[Node] = []
    inferences: list[tuple[Node, list[Node]]] = []
    asked: list[Node] = []
    for _ in range(length):
        kind = source.randrange(6)
        if kind == 0:
            script.toggle(SET_GRAD, source.choice([True, False, *asked]))
        elif kind == 1:
            asked.append(script.graph.call_function(IS_GRAD_ENABLED))
        elif kind == 2:
            args = source.choice([BRAIN, HALF, None]), source.choice([True, False]), source.choice([True, False, None])
            autocasts.append(script.toggle(ENTER_AUTOCAST, "cpu", *args))
        elif kind == 3 and autocasts:
            script.toggle(EXIT_AUTOCAST, autocasts.pop(source.randrange(len(autocasts))))
        elif kind == 4:
            inferences.append((script.toggle(ENTER_INFERENCE, source.choice([True, False])), list(autocasts)))
        elif kind == 5 and inferences and inferences[-1][1] == autocasts:
            script.toggle(EXIT_INFERENCE, inferences.pop()[0])
    while inferences:
        block, around = inferences.pop()
        for inner in [node for node in autocasts if node not in around]:
            script.toggle(EXIT_AUTOCAST, inner)
        if [node for node in autocasts if node in around] != around:
            return random_script(source, length)
        autocasts = list(around)
        script.toggle(EXIT_INFERENCE, block)
    script.probe()
    return script


@given(st.integers(0, 2**32), st.integers(0, 14))
@settings(max_examples=120)
def test_every_node_of_a_cut_finds_the_modes_that_it_found_before(seed: int, length: int) -> None:
    source = Random(seed)
    script = random_script(source, length)
    program = script.program()
    before = observed(program)
    for number, mode in enumerate(script.modes()):
        assert mode.grad in (None, before[number].grad)
        assert mode.inference in (None, before[number].inference)
        for block in mode.autocast:
            device, enabled, dtype = before[number].autocast[0]
            assert (block.device, block.enabled, block.dtype or dtype) == (device, enabled, dtype)
    held: list[list[Node]] = [[], [], []]
    for node in script.probes:
        held[source.randrange(3)].append(node)
    regions = [Region(f"part_{place}", tuple(nodes)) for place, nodes in enumerate(held[:2]) if nodes]
    after = Program.of(outline(Partition(program, regions)).graph_module)
    found = observed(after)
    for number, ambient in before.items():
        assert (found[number].grad, found[number].inference) == (ambient.grad, ambient.inference)
        assert found[number].autocast[0][1] == ambient.autocast[0][1]
        assert not ambient.autocast[0][1] or found[number].autocast == ambient.autocast
        assert found[number].autocast_cache == ambient.autocast_cache
