"""What the tests of lowering share: a backend that counts what it compiles, and programs lowered as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.core import program_of
from torch import nn
from torch.fx import GraphModule, Node

from partita import Plan, Program, plan
from partita.backends import AotEager
from partita.lowering.lowered import Lowered
from partita.policies import ByLabel
from partita.treatments import Lower


@dataclass(frozen=True)
class Counting:
    """AOTAutograd without a compiler; keeps the inputs of each compilation. Two are equal if they have one label."""

    label: object = field(default_factory=object)
    trains: bool = True
    takes_symbols: bool = True
    made: list[list[Any]] = field(default_factory=list, compare=False)

    name = "counting"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        self.made.append(list(inputs))
        return AotEager().compile(body, inputs)


@dataclass(frozen=True)
class Failing:
    """Takes everything and fails on it."""

    message: str = "no such luck\nand more of it"
    tries: list[int] = field(default_factory=list, compare=False)

    name = "failing"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        self.tries.append(len(inputs))
        raise ZeroDivisionError(self.message)


def whole(node: Node) -> str | None:
    """All that computes something in one region."""
    return "whole" if node.op.startswith("call_") else None


def plan_of(source: Program | nn.Module | Callable[..., Any], treatment: Lower) -> Plan:
    """The plan that lowers all of a program, traced if it is none yet, in one region."""
    program = source if isinstance(source, Program) else program_of(source)
    return plan(program, ByLabel(whole), treatment)


def lowered(source: Program | nn.Module | Callable[..., Any], treatment: Lower) -> GraphModule:
    """A program that is lowered in one region, as a module."""
    return plan_of(source, treatment).apply().module()


def region_of(module: GraphModule) -> Lowered:
    """The one lowered region of a module."""
    (found,) = (child for child in module.modules() if isinstance(child, Lowered))
    return found
