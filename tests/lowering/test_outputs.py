"""A backend is held to its promise: it makes functions that give a tuple or a list, and leaves nothing switched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from tests.lowering.helpers import lowered, plan_of
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from partita import Program
from partita.errors import BackendError, LoweringError, OptionError
from partita.treatments import Lower


@dataclass(frozen=True)
class Giving:
    """Gives what `given` makes of the right outputs."""

    given: Callable[[Sequence[Any]], Any]

    name: ClassVar[str] = "giving"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        return lambda *values: self.given(body(*values))


@dataclass(frozen=True)
class Making(Giving):
    """Makes no function at all, but `given`."""

    given: Any

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        return self.given


def one(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sin(x), torch.cos(x)


WRONG: list[tuple[Callable[..., Any], Callable[[Sequence[Any]], Any], str]] = [
    (one, lambda outputs: outputs[0], "returns a Tensor where a tuple or a list"),
    (two, lambda outputs: torch.stack(tuple(outputs)), "returns a Tensor where a tuple or a list"),
    (two, lambda outputs: dict(enumerate(outputs)), "returns a dict where a tuple or a list"),
    (two, lambda outputs: (value for value in outputs), "returns a generator where a tuple or a list"),
    (two, lambda outputs: outputs[:1], "returns a tuple of length 1 where one of length 2 belongs"),
    (two, lambda outputs: [*outputs, 1], "returns a list of length 3 where one of length 2 belongs"),
    (two, lambda outputs: [outputs[0], None], "returns None for output 1, which is a tensor"),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("function", "given", "words"), WRONG)
def test_a_function_that_gives_something_else_is_named_with_its_region_and_backend(
    function: Callable[..., Any], given: Callable[[Sequence[Any]], Any], words: str, strict: bool
) -> None:
    module = lowered(function, Lower(Giving(given), strict=strict))
    for x in (torch.ones(3), torch.ones(3), torch.ones(3, requires_grad=True)):
        with pytest.raises(BackendError, match=f"whole: the function that giving made {words}"):
            module(x)


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def test_outputs_of_a_body_that_no_fake_can_run_are_counted() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.sin, (x,)), graph.call_function(through_numpy, (x,))))
    module = lowered(Program.of(GraphModule({}, graph)), Lower(Giving(lambda outputs: outputs[:1])))
    with pytest.raises(BackendError, match="a tuple of length 1 where one of length 2 belongs"):
        module(torch.ones(3))


@pytest.mark.parametrize("made", [None, 3])
def test_a_compiler_that_makes_no_function_has_failed(made: Any) -> None:
    x, plan = torch.ones(3), plan_of(one, Lower(Making(made)))
    assert torch.equal(plan.apply().module()(x), one(x))
    assert str(plan.failures[0]) == f"whole: giving failed: its `compile` returned {made!r}, which is not callable"
    with pytest.raises(LoweringError, match="which is not callable; without strict=True"):
        lowered(one, Lower(Making(made), strict=True))(x)


@dataclass(frozen=True)
class Switching:
    """Runs the body; leaves something switched where it compiles."""

    switch: Callable[[], Any]
    fails: bool = False

    name: ClassVar[str] = "switching"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        self.switch()
        if self.fails:
            raise NotImplementedError
        return body.forward


def settings() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "switch",
    [
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_default_dtype(torch.float64),
    ],
    ids=["grad", "autocast", "dtype"],
)
def test_what_a_compiler_leaves_switched_is_put_back(switch: Callable[[], Any], fails: bool) -> None:
    before, module = settings(), lowered(one, Lower(Switching(switch, fails)))
    try:
        assert module(torch.ones(3, requires_grad=True)).requires_grad
        assert settings() == before
    finally:
        torch.set_default_dtype(before[2])


@pytest.mark.parametrize("options", [{"tag": 3}, {"strict": 1}, {"dynamic": 1}])
def test_options_of_the_wrong_type_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))} is .*, not {next(iter(options.values()))}"):
        Lower("eager", **options)
