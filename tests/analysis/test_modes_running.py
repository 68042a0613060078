"""What a graph says about the mode of a node is what the node finds when it runs, cut or not."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.analysis.helpers import BRAIN, HALF, Script, observed
from tests.helpers.core import cut
from torch.fx import Node

from partita import Partition, Program, Region, outline
from partita._torch.toggles import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    IS_GRAD_ENABLED,
    SET_GRAD,
)
from partita.errors import ModeError


def test_an_inference_block_that_nobody_leaves_is_what_it_is_when_run() -> None:
    script = Script()
    script.toggle(ENTER_INFERENCE, True)
    try:
        after = cut(script.program(), {"probe": "part"})
    except ModeError:
        return
    assert observed(after)[0].inference is observed(script.program())[0].inference


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


def refused_for_crossing(program: Program) -> bool:
    """Autocast blocks left in the order of entering, inside an inference block, are refused."""
    try:
        return program.modes is None
    except ModeError as error:
        return "crosses the inference block" in str(error)


@given(st.integers(0, 2**32), st.integers(0, 14))
@settings(max_examples=120)
def test_every_node_of_a_cut_finds_the_modes_that_it_found_before(seed: int, length: int) -> None:
    source = Random(seed)
    script = random_script(source, length)
    program = script.program()
    if refused_for_crossing(program):
        return
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
