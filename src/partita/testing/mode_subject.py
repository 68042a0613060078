"""What the laws for modes are about: a program, its wrapped form, and one that puts its modes back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch

from partita.equivalence import compare
from partita.graphs.program import Program
from partita.plans import plan
from partita.policies import ByMode
from partita.testing.case import Case
from partita.testing.mode_oracle import leaves_modes
from partita.testing.nested_graphs import graphs_in, names_in
from partita.testing.put_back import putting_back
from partita.treatments import Mode

__all__ = ["ModeSubject", "equal", "means_the_same", "wrapped"]


@final
@dataclass(frozen=True)
class ModeSubject:
    """A case, its program, and the program with operators for all modes."""

    case: Case
    program: Program
    wrapped: Program

    @cached_property
    def calm(self) -> Program:
        """The program, putting back the modes that it would leave behind, as its wrapped form does."""
        return putting_back(self.case, self.wrapped.caller) if leaves_modes(self.case) else self.program

    @cached_property
    def names(self) -> frozenset[str]:
        """The nodes of the program, those in bodies too."""
        return frozenset(names_in(self.program.graph_module))

    @cached_property
    def has_inference(self) -> bool:
        """Whether inference mode is switched anywhere, on or off."""
        graphs = graphs_in(self.program.graph_module)
        return any("inference" in str(node.target) for graph in graphs for node in graph.nodes)


def wrapped(program: Program, *, under: AbstractContextManager[Any] | None = None) -> Program:
    """The program with operators for all modes, made in the modes of `under`."""
    with under or torch.enable_grad():
        return plan(program, ByMode(), Mode()).apply()


def means_the_same(subject: ModeSubject, after: Program, *, thoroughly: bool = False) -> None:
    """Raises where calls tell the two apart; one call will do unless `thoroughly`."""
    comparison = compare(
        subject.calm, after, subject.case.args, subject.case.kwargs,
        second_call=thoroughly, no_grad_call=thoroughly, other_shapes=thoroughly,
    )  # fmt: skip
    assert comparison.equal, str(comparison)


def equal(found: object, wanted: object) -> None:
    """Raises unless the two are equal."""
    assert found == wanted, f"{found} is not {wanted}"
