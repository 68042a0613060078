"""Mode runs: the outermost runs of nodes under one mode setting, each of which becomes a call of a mode operator.

Autocast and inference blocks are kept whole, as the graph enters and exits them. The grad mode has no blocks, only
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
from partita.analysis.modes import AMBIENT, EVERY_SETTING, Block, Grad, Inference, Mode, Setting
from partita.errors import ModeError
from partita.program.program import Program


@final
@dataclass(frozen=True, slots=True)
class ModeRun:
    """Nodes, by number, under the setting `sets`, in a program whose mode there is `around`."""

    sets: Setting
    around: Mode
    inside: Mode
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Child:
    """Neighbouring nodes in one block or in none, and the grad mode of the first."""

    grad: bool | None
    block: Block | None
    numbers: list[int]


def mode_runs(program: Program, kinds: Collection[type] = EVERY_SETTING) -> list[ModeRun]:
    """The outermost runs for settings of these kinds, in graph order, found in one pass."""
    modes = program.modes
    if modes.by_number is None:
        return []
    return list(_Finder(program, modes.by_number, kinds).runs(_numbers(program), 0, AMBIENT))


def nested_mode_runs(program: Program, kinds: Collection[type], *, deeper_than: int) -> list[ModeRun]:
    """Runs of whole blocks about half-way down a nest of more than `deeper_than` blocks; empty if there is none.

    Replacing each by a call does not change how the rest of the program is wrapped, and both halves are shallow.
    """
    by_number = program.modes.by_number
    depth = 0 if by_number is None else max((len(mode.blocks) for mode in by_number), default=0)
    if by_number is None or depth <= deeper_than:
        return []
    numbers = _numbers(program)
    for place in range(depth // 2, depth // 2 + _TRIES):
        found = list(_runs_at_depth(program, by_number, numbers, place))
        if None not in found:
            return [run for run in found if run is not None and type(run.sets) in kinds]
    return []


#: How many depths are tried to find one at which a nest can be split.
_TRIES = 3


def _numbers(program: Program) -> list[int]:
    # A projection runs in the mode of the node that made the container.
    apart = program.modes.toggles.union(program.projections)
    return [
        number
        for number, node in enumerate(program.index.nodes)
        if node.op not in ("placeholder", "get_attr", "output") and number not in apart
    ]


def _runs_at_depth(
    program: Program, modes: tuple[Mode, ...], numbers: Iterable[int], depth: int
) -> Iterator[ModeRun | None]:
    """The runs of nodes in one block at this depth; None for a run that must not be outlined on its own."""
    number_of = program.index.number
    for block, members in _by_block(modes, numbers, depth):
        if block is None:
            continue
        inner = tuple(members)
        entered = number_of.get(block.key) if isinstance(block.key, Node) else None
        if entered is None:
            yield None  # Blocks that overlap without nesting have no entry of their own.
            continue
        around = _mode_before(program, modes, entered)
        # A node that takes the grad mode of the caller must stay visible to the analysis of the surrounding program,
        # and a grad mode around an inference block that sets the same value is no run.
        hides_grad = around.grad is not None and any(modes[number].grad is None for number in inner)
        is_set_inside = isinstance(block.sets, Inference) and around.grad is (not block.sets.enabled)
        yield None if hides_grad or is_set_inside else ModeRun(block.sets, around, modes[entered], inner)


def _by_block(
    modes: tuple[Mode, ...], numbers: Iterable[int], depth: int
) -> Iterator[tuple[Block | None, Iterator[int]]]:
    """Neighbouring nodes in one block at this depth, or in none."""
    return groupby(numbers, lambda number: next(iter(modes[number].blocks[depth : depth + 1]), None))


def _mode_before(program: Program, modes: tuple[Mode, ...], number: int) -> Mode:
    """The mode right before a node; projections, which have the mode of their container, are skipped."""
    apart = frozenset(program.projections)
    number -= 1
    while number in apart:
        number -= 1
    return modes[number] if number >= 0 else AMBIENT


def openers_of(program: Program, runs: Iterable[ModeRun]) -> list[Node | None]:
    """The toggle that opened each run, if the graph has one."""
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
    """Finds runs; `modes` has the mode of every node."""

    def __init__(self, program: Program, modes: tuple[Mode, ...], kinds: Collection[type]) -> None:
        self.program, self.modes, self.kinds = program, modes, kinds
        self.caller = program.caller

    def runs(self, numbers: list[int], depth: int, around: Mode) -> Iterator[ModeRun]:
        """The outermost runs among nodes that are all inside the same `depth` blocks, in mode `around`."""
        for grad, children in groupby(self._children(numbers, depth), lambda child: child.grad):
            same = list(children)
            # Around nothing but an inference block that sets the same value, the grad mode makes no difference.
            inside = around if _is_set_inside(same, grad=grad) else replace(around, grad=grad)
            if inside.grad is not None and inside.grad != around.grad and Grad in self.kinds:
                members = tuple(number for child in same for number in child.numbers)
                yield ModeRun(Grad(inside.grad), around, inside, members)
                continue
            for child in same:
                if child.block is not None:
                    yield from self._runs_of_block(child.block, child.numbers, depth, inside)

    def _children(self, numbers: list[int], depth: int) -> Iterator[_Child]:
        modes = self.modes
        for block, members in _by_block(modes, numbers, depth):
            if block is None:
                for grad, some in groupby(members, lambda number: modes[number].grad):
                    yield _Child(grad, None, list(some))
            else:
                inner = list(members)
                # Inside a run that sets the grad mode, the grad mode of the caller is no longer available.
                needs_caller = self.caller.grad is None and any(modes[number].grad is None for number in inner)
                yield _Child(None if needs_caller else block.grad, block, inner)

    def _runs_of_block(self, block: Block, numbers: list[int], depth: int, around: Mode) -> Iterator[ModeRun]:
        inside = around.inside(block).beside(self.caller)
        if type(block.sets) not in self.kinds:
            yield from self.runs(numbers, depth + 1, inside)
            return
        if isinstance(block.sets, Inference) and self.caller.grad is None:
            self._check_grad_known(numbers)
        yield ModeRun(block.sets, around, inside, tuple(numbers))

    def _check_grad_known(self, numbers: list[int]) -> None:
        odd = next((number for number in numbers if self.modes[number].grad is None), None)
        if odd is not None:
            raise ModeError(
                f"node {self.program.index.nodes[odd].name!r} takes the grad mode of the caller inside an inference "
                "block, where no operator can restore it; set the mode to a constant there"
            )


def _is_set_inside(children: list[_Child], *, grad: bool | None) -> bool:
    """Whether these nodes are all in one inference block, which sets this grad mode itself."""
    sets = children[0].block.sets if len(children) == 1 and children[0].block is not None else None
    return isinstance(sets, Inference) and grad is (not sets.enabled)
