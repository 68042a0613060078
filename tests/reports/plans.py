"""Plans that the tests of reports share."""

from __future__ import annotations

from functools import cache

import torch
from tests.helpers.core import program_of
from tests.memory.models import RATES, Model
from torch import Tensor, nn
from torch.fx import Node

import partita
from partita import Comparison, Partition, Plan, Program, Region
from partita.equivalence.differences import Difference
from partita.memory import MemoryPlan, step_memory
from partita.plans.compilations import Failure
from partita.policies import ByCapability, ByModule, BySize
from partita.treatments import Call, Recompute

X, Y = torch.randn(64, 32), torch.randint(16, (64,))
HOSTILE = "</script><img src=x onerror=window.hacked=1>"


@cache
def captured() -> Program:
    """A small model of four equal blocks with dropout, exported."""
    torch.manual_seed(0)
    return partita.capture(Model(), (X, Y))


@cache
def recomputed() -> Plan:
    return partita.plan(captured(), ByModule("blocks.*"), Recompute())


@cache
def memory_plan() -> MemoryPlan:
    torch.manual_seed(0)
    step = step_memory(Model(), (X, Y), rates=RATES)
    return step.plan((step.smallest_peak_bytes + step.plain_peak_bytes) // 2)


def chain(nodes: int, parts: int) -> Plan:
    """A plan for a graph of so many nodes, without traced values, in as many regions."""
    graph = torch.fx.Graph()
    first = value = graph.placeholder("x")
    for at in range(nodes - 2):
        value = (
            graph.call_function(torch.add, (value, first)) if at % 5 == 4 else graph.call_function(torch.relu, (value,))
        )
    graph.output(value)
    return partita.plan(program_of(graph), BySize(parts=parts), Call())


class Toggled(nn.Module):
    """Mutation, random numbers and a mode block; its two linear layers are around what is not wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        self.count.add_(1)
        with torch.no_grad():
            x = torch.dropout(x, 0.5, train=True) * 2
        return self.two(x)


@cache
def around_dropout() -> Plan:
    program = partita.capture(Toggled(), (torch.randn(2, 4),))
    return partita.plan(program, ByCapability(no_dropout), Call())


def no_dropout(node: Node) -> str | None:
    return "no random numbers here" if "dropout" in node.name else None


def hostile() -> tuple[Plan, Comparison]:
    """Names and labels as a file of an attacker may have them, wherever a report shows a text."""
    program = program_of(nn.Sequential(nn.ReLU(), nn.Tanh()))
    one, two = program.operators()
    one.name, two.name = f"{HOSTILE} 1", "a\"b'c\\d \N{SNOWMAN} \u2028 `${x}` --> <!--"
    for node in (one, two):
        node.meta["nn_module_stack"] = {"a": ("", HOSTILE), "b": (HOSTILE, f"x.{HOSTILE}")}
    region = Region("<b onclick=window.hacked=1>", (one,), HOSTILE)
    plan = Plan(Partition(Program.of(program.graph_module), [region], {two: HOSTILE}), (Call(),))
    plan.failures.add(Failure(region.name, HOSTILE, HOSTILE, one.name))
    return plan, Comparison((Difference(HOSTILE, HOSTILE, HOSTILE, HOSTILE),), (HOSTILE,), 1)
