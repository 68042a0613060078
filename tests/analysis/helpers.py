"""Graphs of mode toggles with a probe after each, and what the probes find when the graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.helpers.core import program_of
from torch import Tensor
from torch.fx import Graph, Node

from partita import Program
from partita._torch.modes import Ambient, read_ambient
from partita.analysis.modes import Mode

SEEN: dict[int, Ambient] = {}
HALF, BRAIN = torch.float16, torch.bfloat16


def probe(x: Tensor, number: int) -> Tensor:
    """Takes down the modes that it runs under."""
    SEEN[number] = read_ambient()
    return x.clone()


class Script:
    """A graph of toggles with a probe after each; `modes` are what the graph says at the probes."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x = self.graph.placeholder("x")
        self.probes: list[Node] = []

    def toggle(self, target: Callable[..., Any], *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        self.probe()
        return node

    def probe(self) -> None:
        self.probes.append(self.graph.call_function(probe, (self.x, len(self.probes))))

    def program(self) -> Program:
        if self.graph.find_nodes(op="output") == []:
            self.graph.output(tuple(self.probes))
        return Program.of(program_of(self.graph), pure=[probe])

    def modes(self) -> list[Mode]:
        program = self.program()
        return [program.modes.at(program.index.number[node]) for node in program.graph.find_nodes(
            op="call_function", target=probe
        )]  # fmt: skip


def observed(program: Program) -> dict[int, Ambient]:
    SEEN.clear()
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.enable_grad():
        found = read_ambient()
        program.module()(torch.ones(2))
        assert found.autocast == read_ambient().autocast or program.modes.final.autocast
    return dict(SEEN)
