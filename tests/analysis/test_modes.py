"""Modes: what the graph says about each node, however the blocks are nested, and what it refuses to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.analysis.helpers import BRAIN, HALF, Script
from tests.helpers.core import cut

from partita._torch.toggles import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    IS_GRAD_ENABLED,
    SET_GRAD,
)
from partita.analysis.modes import AMBIENT, Autocast, Mode
from partita.errors import ModeError


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
    assert [mode.autocast for mode in script.modes()] == [
        (first,),
        (Autocast("cpu", HALF, False, False),),
        (first,),
        (),
    ]


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


def test_a_nested_block_in_an_inference_block_crosses_nothing() -> None:
    script = Script()
    cpu, cuda = (script.toggle(ENTER_AUTOCAST, device, BRAIN) for device in ("cpu", "cuda"))
    block = script.toggle(ENTER_INFERENCE, True)
    inner = script.toggle(ENTER_AUTOCAST, "cpu", HALF)
    script.toggle(EXIT_AUTOCAST, inner)
    script.toggle(EXIT_INFERENCE, block)
    script.toggle(EXIT_AUTOCAST, cuda)
    script.toggle(EXIT_AUTOCAST, cpu)
    told = [(mode.inference, {block.device: block.dtype for block in mode.autocast}) for mode in script.modes()]
    both = {"cpu": BRAIN, "cuda": BRAIN}
    assert told[2:6] == [(True, both), (True, {**both, "cpu": HALF}), (True, both), (None, both)]
