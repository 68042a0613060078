"""An exception inside a body puts back every mode that the body has set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.copies import COPIES, Copy
from tests.helpers.core import cut, program_of
from torch.fx import Graph, GraphModule

from partita._torch.modes import read_ambient
from partita._torch.toggles import ENTER_AUTOCAST, ENTER_INFERENCE, EXIT_AUTOCAST, EXIT_INFERENCE, SET_GRAD


def failing(*toggles: tuple[Any, ...]) -> GraphModule:
    """A part that raises inside all of these blocks."""
    graph = Graph()
    x = graph.placeholder("x")
    blocks = [(toggle[0], graph.call_function(toggle[0], toggle[1:])) for toggle in toggles]
    value = graph.call_function(torch.mm, (x, x))
    for target, block in reversed(blocks):
        leave = {ENTER_AUTOCAST: EXIT_AUTOCAST, ENTER_INFERENCE: EXIT_INFERENCE}.get(target)
        graph.call_function(leave or SET_GRAD, (block,) if leave else (True,))
    graph.output(value)
    return cut(program_of(graph), {"mm": "part"}).module()


@pytest.mark.parametrize(
    "toggles",
    [
        [(SET_GRAD, False)],
        [(ENTER_AUTOCAST, "cpu", torch.float16, True, False)],
        [(ENTER_INFERENCE, True)],
        [(ENTER_INFERENCE, True), (ENTER_AUTOCAST, "cpu", torch.float16, True, None)],
        [(ENTER_AUTOCAST, "cpu", torch.bfloat16, True, None), (SET_GRAD, False), (ENTER_INFERENCE, True)],
    ],
)
@pytest.mark.parametrize("copied", [lambda module: module, *COPIES])
def test_an_exception_puts_back_every_mode(copied: Copy, toggles: list[tuple[Any, ...]]) -> None:
    module = copied(failing(*toggles))
    for around in (torch.enable_grad(), torch.no_grad(), torch.autocast("cpu", torch.float16), torch.inference_mode()):
        with around:
            before = read_ambient()
            with pytest.raises(RuntimeError, match=r"mat1|size|must be"):
                module(torch.ones(2, 3))
            assert read_ambient() == before
    assert module(torch.ones(2, 2)).shape == (2, 2)
