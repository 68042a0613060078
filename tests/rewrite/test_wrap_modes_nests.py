"""However blocks are nested, crossed, repeated or left open, a wrapped node finds the modes that it found before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.analysis.helpers import BRAIN, HALF, Script, observed
from tests.analysis.test_modes_running import random_script, refused_for_crossing
from tests.helpers.core import text
from tests.helpers.selecting import slow_but
from tests.helpers.work import calls_during
from tests.rewrite.helpers import has_toggles_anywhere, tree, wrapped
from torch import nn
from torch.fx import Graph, GraphModule, Node

import partita.rewrite.wrap_modes as wrap_modes_module
from partita import Program, compare, fingerprint, inline, mode_tree, plan
from partita._torch.modes import Ambient, read_ambient
from partita._torch.toggles import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    IS_GRAD_ENABLED,
    SET_GRAD,
)
from partita.analysis.modes import AMBIENT, Mode
from partita.errors import ModeError, PartitaError
from partita.policies import ByMode
from partita.rewrite.wrap_modes import wrap_modes
from partita.treatments import Mode as ModeTreatment


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


@given(st.integers(0, 2**32), st.integers(0, 14))
@settings(max_examples=60)
def test_nests_that_are_cut_in_half_first_give_every_node_its_modes(seed: int, length: int) -> None:
    program = random_script(Random(seed), length).program()
    if refused_for_crossing(program):
        return
    with mock.patch.object(wrap_modes_module, "_DEEP", 1):
        cut = or_refused(wrap_modes, program)
    usual = or_refused(wrap_modes, program)
    assert (cut is None) == (usual is None)
    if cut is not None and usual is not None:
        assert told(observed(cut)) == told(observed(usual)) == told(observed(program))
        assert not has_toggles_anywhere(cut.graph_module)


def deep_nest(depth: int, kinds: str) -> Program:
    """Blocks of these kinds in turn, each inside the one before, with a layer before the next and a cosine after it."""
    graph = Graph()
    value, grads, handles = graph.placeholder("x"), [True], []
    for level in range(depth):
        turn, kind = divmod(level, len(kinds))
        toggle, arguments, grad = BLOCKS[kinds[kind]][turn % 2]
        handles.append(graph.call_function(toggle, arguments))
        grads.append(grads[-1] if grad is None else grad)
        value = graph.call_module(f"layers.{level % 4}", (value,))
    for handle in reversed(handles):
        value = graph.call_function(torch.cos, (value,))
        grads.pop()
        leave = {ENTER_AUTOCAST: EXIT_AUTOCAST, ENTER_INFERENCE: EXIT_INFERENCE}.get(handle.target)  # type: ignore[call-overload]
        graph.call_function(*((SET_GRAD, (grads[-1],)) if leave is None else (leave, (handle,))))
    graph.output(value)
    root = nn.Module()
    root.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    return Program.of(GraphModule(root, graph))


#: What enters a block of each kind, in turn, and the grad mode that it sets.
BLOCKS: dict[str, list[tuple[Callable[..., Any], tuple[Any, ...], bool | None]]] = {
    "a": [(ENTER_AUTOCAST, ("cpu", dtype, True, None), None) for dtype in (BRAIN, HALF)],
    "e": [(SET_GRAD, (True,), True)] * 2,
    "i": [(ENTER_INFERENCE, (enabled,), not enabled) for enabled in (True, False)],
    "n": [(SET_GRAD, (False,), False)] * 2,
}
KINDS = ["a", "i", "an", "ai", "ane"]


@pytest.mark.parametrize("kinds", KINDS)
def test_a_deep_nest_is_wrapped_and_inlined_again(kinds: str) -> None:
    program = deep_nest(40, kinds)
    cut = plan(program, ByMode(), ModeTreatment()).apply()
    assert compare(program, cut, (torch.randn(2, 3),)).equal
    assert cut.original_state().keys() == program.original_state().keys()
    assert program.modes.final != AMBIENT or fingerprint(inline(cut)) == fingerprint(program)
    assert mode_tree(cut) == mode_tree(program.under(cut.caller))


@pytest.mark.parametrize("kinds", slow_but(KINDS, "i", "ane"))
def test_work_on_a_nest_grows_hardly_faster_than_its_depth(kinds: str) -> None:
    def work(depth: int) -> list[float]:
        program = deep_nest(depth, kinds)
        decided = plan(program, ByMode(), ModeTreatment())
        nested = decided.apply()
        acts = (decided.apply, lambda: inline(nested), lambda: mode_tree(program), lambda: mode_tree(nested))
        return [calls_during(act) / depth for act in acts]

    # n log n: four times as deep is as much for each block, and a little more for being cut in half twice more.
    assert all(deep < 1.7 * flat for flat, deep in zip(work(40), work(160), strict=True))
