"""However blocks are nested, crossed, repeated or left open, a wrapped node finds the modes that it found before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core_helpers import text
from tests.modes_helpers import BRAIN, HALF, Script, observed
from tests.test_modes_running import random_script, refused_for_crossing
from tests.wrapping_helpers import has_toggles_anywhere, tree, wrapped
from torch.fx import Node

from partita import Program, compare, fingerprint, inline
from partita._torch.ambient import Ambient, read_ambient
from partita._torch.toggles import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    IS_GRAD_ENABLED,
    SET_GRAD,
)
from partita.errors import ModeError, PartitaError
from partita.graphs.mode import AMBIENT, Mode
from partita.rewrite.wrap_modes import wrap_modes


def told(found: Mapping[int, Ambient]) -> dict[int, tuple[Any, ...]]:
    """What matters of the modes that the probes found: a dtype does only where autocast is on."""
    return {
        number: (ambient.grad, ambient.inference, ambient.autocast_cache, *(use for use in ambient.autocast if use[1]))
        for number, ambient in found.items()
    }


def or_refused(wrap: Callable[[Program], Program], program: Program) -> Program | None:
    """None where a node wants what no operator can give it: the caller's grad mode inside an inference block."""
    try:
        return wrap(program)
    except PartitaError as error:
        if "takes the grad mode of the caller inside an inference block" not in str(error):
            raise
        return None


@given(st.integers(0, 2**32), st.integers(0, 14))
@settings(max_examples=100)
def test_every_node_of_a_wrapped_program_finds_the_modes_that_it_found_before(seed: int, length: int) -> None:
    program = random_script(Random(seed), length).program()
    if refused_for_crossing(program):
        return
    before = told(observed(program))
    for caller in (AMBIENT, Mode(grad=True)):
        flat = program.under(caller)
        after = or_refused(wrap_modes, flat)
        if after is None:
            continue
        assert not has_toggles_anywhere(after.graph_module)
        assert told(observed(after)) == before
        assert wrap_modes(after) is after
        inlined = inline(after)
        assert told(observed(inlined)) == before
        assert fingerprint(wrap_modes(inlined)) == fingerprint(after)
        assert flat.modes.final != AMBIENT or fingerprint(inlined) == fingerprint(flat)


@given(st.integers(0, 2**32), st.integers(0, 14))
@settings(max_examples=40)
def test_policy_and_treatment_find_the_same(seed: int, length: int) -> None:
    program = random_script(Random(seed), length).program()
    if refused_for_crossing(program):
        return
    before = told(observed(program))
    after = or_refused(wrapped, program)
    if after is None:
        return
    assert not has_toggles_anywhere(after.graph_module)
    assert told(observed(after)) == before
    assert tree(after) == tree(wrap_modes(program.under(after.caller)))


def crossing_autocasts(script: Script) -> None:
    one = script.toggle(ENTER_AUTOCAST, "cpu", BRAIN, True, None)
    two = script.toggle(ENTER_AUTOCAST, "cpu", HALF, True, None)
    script.toggle(EXIT_AUTOCAST, one)
    script.toggle(EXIT_AUTOCAST, two)
    script.probe()


def three_crossing(script: Script) -> None:
    entered = [script.toggle(ENTER_AUTOCAST, "cpu", dtype, True, None) for dtype in (BRAIN, HALF, BRAIN)]
    script.toggle(EXIT_AUTOCAST, entered[1])
    script.toggle(SET_GRAD, False)
    script.toggle(EXIT_AUTOCAST, entered[0])
    script.toggle(EXIT_AUTOCAST, entered[2])
    script.toggle(SET_GRAD, True)


def open_at_the_end(script: Script) -> None:
    script.toggle(ENTER_AUTOCAST, "cpu", BRAIN, True, None)
    script.toggle(SET_GRAD, False)
    script.toggle(ENTER_AUTOCAST, "cpu", None, False, None)


def inference_everywhere(script: Script) -> None:
    cast = script.toggle(ENTER_AUTOCAST, "cpu", BRAIN, True, None)
    outer = script.toggle(ENTER_INFERENCE, True)
    inner_cast = script.toggle(ENTER_AUTOCAST, "cpu", HALF, True, None)
    inner = script.toggle(ENTER_INFERENCE, False)
    script.toggle(SET_GRAD, False)
    script.toggle(EXIT_INFERENCE, inner)
    script.toggle(EXIT_AUTOCAST, inner_cast)
    script.toggle(EXIT_INFERENCE, outer)
    script.toggle(EXIT_AUTOCAST, cast)
    first = script.toggle(ENTER_INFERENCE, True)
    script.toggle(EXIT_INFERENCE, first)


def inference_that_changes_nothing(script: Script) -> None:
    outer = script.toggle(ENTER_INFERENCE, True)
    inner = script.toggle(ENTER_INFERENCE, True)
    script.toggle(EXIT_INFERENCE, inner)
    script.toggle(EXIT_INFERENCE, outer)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (
            crossing_autocasts,
            """
            autocast on cpu bfloat16
                probe
                autocast on cpu float16
                    probe_1
            probe_2
            autocast on cpu bfloat16
                probe_3
                probe_4
            """,
        ),
        (
            open_at_the_end,
            """
            autocast on cpu bfloat16
                probe
                no_grad
                    probe_1
                    no autocast on cpu
                        probe_2
            """,
        ),
        (
            inference_everywhere,
            """
            autocast on cpu bfloat16
                probe
                inference_mode
                    probe_1
                    autocast on cpu float16
                        probe_2
                        no inference_mode
                            probe_3
                            no_grad
                                probe_4
                        probe_5
                    probe_6
                probe_7
            probe_8
            inference_mode
                probe_9
            probe_10
            """,
        ),
        (
            inference_that_changes_nothing,
            """
            inference_mode
                probe
                probe_1
                probe_2
            probe_3
            """,
        ),
        (three_crossing, None),
    ],
)
def test_blocks_in_any_order_become_operators(write: Callable[[Script], None], expected: str | None) -> None:
    script = Script()
    write(script)
    after = wrapped(script.program())
    assert told(observed(after)) == told(observed(script.program()))
    assert not has_toggles_anywhere(after.graph_module)
    assert expected is None or tree(after) == text(expected)


def program_with_block(target: Any, leave: Any, *args: Any, **kwargs: Any) -> Program:
    script = Script()
    block = script.graph.call_function(target, args, kwargs)
    script.probe()
    script.graph.call_function(leave, (True if leave is SET_GRAD else block,))
    script.probe()
    return script.program()


@pytest.mark.parametrize(
    ("target", "leave", "args", "kwargs", "plainly"),
    [
        (SET_GRAD, SET_GRAD, (False,), {}, (False,)),
        (SET_GRAD, SET_GRAD, (), {"enabled": False}, (False,)),
        (ENTER_INFERENCE, EXIT_INFERENCE, (), {"mode": True}, (True,)),
        (ENTER_INFERENCE, EXIT_INFERENCE, (False,), {}, (False,)),
        (ENTER_AUTOCAST, EXIT_AUTOCAST, ("cpu",), {}, ("cpu", None, True, None)),
        (ENTER_AUTOCAST, EXIT_AUTOCAST, ("cpu", None, False), {}, ("cpu", None, False, None)),
        (ENTER_AUTOCAST, EXIT_AUTOCAST, ("cpu", HALF), {"cache_enabled": False}, ("cpu", HALF, True, False)),
        (
            ENTER_AUTOCAST,
            EXIT_AUTOCAST,
            (),
            {"cache_enabled": False, "device_type": "cpu", "enabled": False},
            ("cpu", None, False, False),
        ),
    ],
)
def test_partial_defaulted_and_keyword_arguments_keep_their_meaning(
    target: Any, leave: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plainly: tuple[Any, ...]
) -> None:
    # Generated code could not call the toggles of torch 2.13 by keyword; a wrapped program can be run.
    expected = told(observed(program_with_block(target, leave, *plainly)))
    program = program_with_block(target, leave, *args, **kwargs)
    assert told(observed(wrapped(program))) == expected
    assert told(observed(inline(wrapped(program)))) == expected


def test_an_open_dtype_is_that_of_the_caller() -> None:
    script = Script()
    block = script.toggle(ENTER_AUTOCAST, "cpu", None, True, None)
    script.toggle(EXIT_AUTOCAST, block)
    program, after = script.program(), wrapped(script.program())
    assert after.node("autocast").args[1] is None
    with torch.autocast("cpu", dtype=HALF):
        assert told(observed(after)) == told(observed(program))


def test_the_callers_mode_inside_an_inference_block_is_refused_by_name() -> None:
    script = Script()
    found = script.graph.call_function(IS_GRAD_ENABLED)
    block: Node = script.toggle(ENTER_INFERENCE, True)
    script.toggle(SET_GRAD, found)
    script.toggle(EXIT_INFERENCE, block)
    with pytest.raises(ModeError, match="node 'probe_1' takes the grad mode of the caller inside an inference block"):
        wrap_modes(script.program())
    assert wrap_modes(script.program().under(Mode(grad=True))) is not None


def test_what_nobody_leaves_is_put_back_by_the_operators() -> None:
    script = Script()
    open_at_the_end(script)
    after = wrapped(script.program())
    for caller in (torch.enable_grad, torch.no_grad):
        with caller():
            found = read_ambient()
            after.module()(torch.ones(2))
            assert read_ambient() == found
    difference = compare(script.program(), after, (torch.ones(2),))
    assert {entry.kind for entry in difference.differences} == {"mode"}
