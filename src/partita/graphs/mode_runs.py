"""Runs of nodes that one setting holds for, the outermost of them: what becomes a call of a mode operator.

Autocast and inference blocks are kept whole, as the graph opens and leaves them. The grad mode has no blocks, only
values: neighbours with the same value form a run, and a block belongs to the run that it was entered in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import final

from torch.fx import Node

from partita._torch import toggles
from partita.errors import ModeError
from partita.graphs.mode import AMBIENT, EVERY_SETTING, Block, Grad, Inference, Mode, Setting
from partita.graphs.program import Program

__all__ = ["ModeRun", "mode_runs", "openers_of"]


@final
@dataclass(frozen=True, slots=True)
class ModeRun:
    """Nodes, by number, for which `sets` holds, in a program that is in mode `around` there."""

    sets: Setting
    around: Mode
    inside: Mode
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Child:
    """Neighbouring nodes, in one block or in none, and the grad mode that they are in at first."""

    grad: bool | None
    block: Block | None
    numbers: list[int]


def mode_runs(program: Program, kinds: Collection[type] = EVERY_SETTING) -> list[ModeRun]:
    """The outermost runs for settings of these kinds, in graph order, found in one walk."""
    modes = program.modes
    if modes.by_number is None:
        return []
    # What takes an item out of a container runs beside whatever made the container.
    apart = modes.toggles.union(program.projections)
    numbers = [
        number
        for number, node in enumerate(program.index.nodes)
        if node.op not in ("placeholder", "get_attr", "output") and number not in apart
    ]
    return list(_Finder(program, modes.by_number, kinds).runs(numbers, 0, AMBIENT))


def openers_of(program: Program, runs: Iterable[ModeRun]) -> list[Node | None]:
    """For each run the toggle that opened it, where the graph has one."""
    nodes = program.index.nodes
    switches = [number for number in sorted(program.modes.toggles) if nodes[number].target is toggles.SET_GRAD]
    openers: list[Node | None] = []
    for run in runs:
        if isinstance(run.sets, Grad):
            before = bisect_left(switches, run.numbers[0])
            openers.append(nodes[switches[before - 1]] if before else None)
        else:
            key = run.inside.blocks[-1].key
            openers.append(key if isinstance(key, Node) else None)
    return openers


class _Finder:
    """Finds runs; `modes` are those of all nodes."""

    def __init__(self, program: Program, modes: tuple[Mode, ...], kinds: Collection[type]) -> None:
        self.program, self.modes, self.kinds = program, modes, kinds
        self.caller = program.caller

    def runs(self, numbers: list[int], depth: int, around: Mode) -> Iterator[ModeRun]:
        """The outermost runs among nodes that are all inside the same `depth` blocks, in mode `around`."""
        for grad, children in groupby(self._children(numbers, depth), lambda child: child.grad):
            held = list(children)
            # Around nothing but an inference block that sets the same, the grad mode makes no difference.
            inside = around if _is_set_inside(held, grad=grad) else replace(around, grad=grad)
            if inside.grad is not None and inside.grad != around.grad and Grad in self.kinds:
                members = tuple(number for child in held for number in child.numbers)
                yield ModeRun(Grad(inside.grad), around, inside, members)
                continue
            for child in held:
                if child.block is not None:
                    yield from self._runs_of_block(child.block, child.numbers, depth, inside)

    def _children(self, numbers: list[int], depth: int) -> Iterator[_Child]:
        modes = self.modes

        def block_of(number: int) -> Block | None:
            blocks = modes[number].blocks
            return blocks[depth] if depth < len(blocks) else None

        for block, members in groupby(numbers, block_of):
            if block is None:
                for grad, some in groupby(members, lambda number: modes[number].grad):
                    yield _Child(grad, None, list(some))
            else:
                held = list(members)
                # Inside a run that sets the grad mode nobody can get at the mode of the caller any more.
                asks_caller = self.caller.grad is None and any(modes[number].grad is None for number in held)
                yield _Child(None if asks_caller else block.grad, block, held)

    def _runs_of_block(self, block: Block, numbers: list[int], depth: int, around: Mode) -> Iterator[ModeRun]:
        inside = around.inside(block).beside(self.caller)
        if type(block.sets) not in self.kinds:
            yield from self.runs(numbers, depth + 1, inside)
            return
        if isinstance(block.sets, Inference) and self.caller.grad is None:
            self._check_reach(numbers)
        yield ModeRun(block.sets, around, inside, tuple(numbers))

    def _check_reach(self, numbers: list[int]) -> None:
        odd = next((number for number in numbers if self.modes[number].grad is None), None)
        if odd is not None:
            raise ModeError(
                f"node {self.program.index.nodes[odd].name!r} takes the grad mode of the caller inside an inference "
                "block, which no operator can give it; set the mode to a constant there"
            )


def _is_set_inside(children: list[_Child], *, grad: bool | None) -> bool:
    """Whether all of these nodes are in one inference block, which sets this grad mode itself."""
    sets = children[0].block.sets if len(children) == 1 and children[0].block is not None else None
    return isinstance(sets, Inference) and grad is (not sets.enabled)
