"""Any nest of mode blocks is captured with the meaning that it has in eager mode."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from tests.capture.helpers import CALLERS, Model, captured, outcome
from torch import Tensor

from partita import fingerprint
from partita.capture.capture import capture

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))

BLOCKS = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "grad off": lambda: torch.set_grad_enabled(False),
    "grad on": lambda: torch.set_grad_enabled(True),
    "as it is": lambda: torch.set_grad_enabled(torch.is_grad_enabled()),
    "inference": torch.inference_mode,
    "no inference": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu"),
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "cuda": lambda: torch.autocast("cuda", enabled=False),
}
STEPS = st.recursive(
    st.sampled_from(["first", "second", "write", "leave", "switch off", "switch on"]),
    lambda inner: st.tuples(st.sampled_from(sorted(BLOCKS)), st.lists(inner, min_size=1, max_size=4)),
    max_leaves=12,
)


class _LeavingError(Exception):
    """Leaves all blocks at once."""


def _run(model: Model, values: list[Tensor], steps: Any) -> None:
    for step in steps:
        if isinstance(step, tuple):
            with BLOCKS[step[0]]():
                _run(model, values, step[1])
        elif step == "write":
            with torch.no_grad():
                model.total.add_(values[-1].detach().float().sum(0))
        elif step == "leave":
            raise _LeavingError
        elif step.startswith("switch"):
            torch.set_grad_enabled(step == "switch on")
        else:
            values.append(getattr(model, step)(values[0] + len(values)))


def _model(steps: Any) -> Model:
    def does(model: Model, x: Tensor) -> list[Tensor]:
        values = [x]
        for step in steps:
            try:
                _run(model, values, [step])
            except _LeavingError:
                values.append(model.first(x))
        return values[1:]

    return Model(does)


@given(st.lists(STEPS, min_size=1, max_size=3), st.sampled_from(sorted(CALLERS)))
def test_a_nest_of_blocks_means_what_it_means_in_eager_mode(steps: Any, caller: str) -> None:
    model = _model(steps)
    expected = outcome(copy.deepcopy(model), (X,), caller=CALLERS[caller])
    program = captured(model, (X,))
    found = outcome(program.module(), (X,), caller=CALLERS[caller])
    assert expected.equals(found), f"{expected}\n{found}\n{program.graph}"


@given(st.lists(STEPS, min_size=1, max_size=3), st.sampled_from(sorted(CALLERS)))
def test_a_nest_of_blocks_is_the_same_program_whoever_captures_it(steps: Any, caller: str) -> None:
    model = _model(steps)
    expected = fingerprint(capture(model, (X,)))
    with CALLERS[caller]():
        assert fingerprint(capture(model, (X,))) == expected
