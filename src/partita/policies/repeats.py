"""Repeats: what a model repeats, one block after another say, becomes regions with equal bodies.

The graph in its order is a sequence of operators; `solvers/repeats.py` finds the runs of it that are equal up to names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import takewhile
from operator import eq
from typing import final

from torch import nn
from torch.fx import GraphModule, Node

from partita._plain_help import PlainHelp
from partita.analysis.nodes import bodies_read, find
from partita.errors import OptionError
from partita.policies.constraints import at_mode_changes, check_flags, check_modes_apart
from partita.policies.legalize import Piece, assignable, legal_partition, unassigned
from partita.program.program import Program
from partita.program.structure import Structure, structure_of
from partita.regions import Partition, Region
from partita.regions.equal_bodies import body_numbers, passing_differing_numbers
from partita.solvers.equal_runs import Items
from partita.solvers.quotient import ALONE
from partita.solvers.repeats import Run, cover, work_of


@final
@dataclass(frozen=True, slots=True)
class Repeats(metaclass=PlainHelp):
    """Regions with equal bodies, found by structure alone, so that each distinct body is compiled once.

    Two bodies are equal if they have the same operators and constants in the same order, with the same dtypes, shapes,
    strides and modes, wired in the same way; names and values of weights do not count, and symbols only up to renaming.
    The repeats are chosen that save most work, if every distinct body is compiled once; they have at least `min_size`
    operators, and those that save less than `min_saved`, a part of all operators, are excluded, since each region costs
    a call and the fusion across its borders. Regions with equal bodies have the same label, "repeat_0" say. What lies
    between repeats forms regions too, which have labels of their own, unless `between` is false. With `modes_apart`,
    regions are cut where the mode changes too; by default where the treatment takes one mode a region. Regions of a
    joint graph are in its forward or in its backward.

    Numbers in which regions differ are inputs of the one body, as tensors without dimensions, where these compute the
    same: factors, say, and the epsilon of an addition. Without `passes_numbers` they make bodies different.
    """

    _: KW_ONLY
    min_size: int = 2
    min_saved: float = 0.0
    between: bool = True
    modes_apart: bool | None = None
    passes_numbers: bool = True

    def __post_init__(self) -> None:
        check_flags(self, "between", "passes_numbers")
        check_modes_apart(self)
        if type(self.min_size) is not int or self.min_size < 1:
            raise OptionError(f"min_size is a number of operators from 1 on, not {self.min_size!r}")
        if type(self.min_saved) not in (int, float) or not 0 <= self.min_saved <= 1:
            raise OptionError(f"min_saved is a part of all operators, from 0 to 1, not {self.min_saved!r}")

    def __call__(self, program: Program) -> Partition:
        numbers = list(assignable(program))
        assignment, reasons, count = unassigned(program), dict[Node, str](), 0
        backward = frozenset[Node]() if program.joint is None else frozenset(program.joint.backward)
        runs, passes_numbers = self._cover(program, numbers)
        for run in runs:
            if run.group < 0 and not self.between:
                nodes = (program.index.nodes[number] for number in numbers[run.start : run.stop])
                reasons.update(dict.fromkeys(nodes, "it is in no repeat"))
                continue
            count = _assign(program, assignment, numbers[run.start : run.stop], count, backward)
        if self.modes_apart:
            assignment = at_mode_changes(program, assignment)
        count = max(assignment, default=ALONE) + 1
        # Blocks return the same values, whichever of them is read first: the last block is not read by another one.
        partition = legal_partition(program, assignment, [Piece("part")] * count, reasons).returning_in_graph_order()
        return _labelled(passing_differing_numbers(partition) if passes_numbers else partition)

    def _cover(self, program: Program, numbers: Sequence[int]) -> tuple[Sequence[Run], bool]:
        """The runs of the nodes with these numbers, and whether some differ in numbers that are passed to them.

        That is so where it saves more: a compiler computes with a constant what it cannot with an input.
        """
        items, structure = _items(program, numbers), program.once(structure_of)
        least = self.min_saved * (sum(items.work) or len(numbers))
        exact = cover(items, min_size=self.min_size, min_saved=least)
        differing = _differing_in_numbers(structure) if self.passes_numbers else frozenset()
        if not _may_save_more(exact, items, [number in differing for number in numbers]):
            return exact, False
        # What takes a number makes no container, and so it has the letter of its node.
        letters = [structure.loose.get(number, letter) for number, letter in zip(numbers, items.letters, strict=True)]
        items = replace(items, letters=letters)
        loose = cover(items, min_size=self.min_size, min_saved=least)
        return (loose, True) if work_of(loose, items) < work_of(exact, items) else (exact, False)


def _differing_in_numbers(structure: Structure) -> frozenset[int]:
    """The nodes from which others differ in a number alone that can be passed."""
    found: dict[int, set[int]] = {}
    for number, letter in structure.loose.items():
        found.setdefault(letter, set()).add(structure.letters[number])
    return frozenset(number for number, letter in structure.loose.items() if len(found[letter]) > 1)


def _may_save_more(runs: Sequence[Run], items: Items, differs: Sequence[bool]) -> bool:
    """Whether other runs can save more where the items that differ in numbers are equal.

    Not if all of them are in one body with more calls than it has work: to save a part of it, each call becomes two.
    """
    calls, pieces = Counter(run.group for run in runs), dict[int, Run]()
    for at, run in enumerate(runs):
        place = run.group if run.group >= 0 else -1 - at
        if place not in pieces and any(differs[run.start : run.stop]):
            pieces[place] = run
            if len(pieces) > 1 or place < 0:
                return True
    return any(calls[run.group] < _work_between(items, run.start, run.stop) for run in pieces.values())


def _work_between(items: Items, start: int, stop: int) -> int:
    return sum(items.work[start:stop]) if items.work else stop - start


def _assign(
    program: Program, assignment: list[int], numbers: Sequence[int], count: int, backward: frozenset[Node]
) -> int:
    """Assigns a run to the part `count`, and from where the backward begins or ends to the next; returns the next."""
    nodes, last = program.index.nodes, None
    for number in numbers:
        side = nodes[number] in backward
        count += last is not None and side != last
        assignment[number], last = count, side
    return count + 1


def _items(program: Program, numbers: Sequence[int]) -> Items:
    """The operators of a program as the items of a sequence; what they take out of containers belongs to them."""
    structure, index = program.once(structure_of), program.index
    count = len(numbers)
    # Values that operators make are numbered like the operators, all others after them.
    value = [count + number for number in range(len(index))]
    for place, number in enumerate(numbers):
        value[number] = place
    letters = [structure.letters[number] for number in numbers]
    makes: dict[int, list[int]] = {}
    taken: dict[int, list[tuple[int, int]]] = {}
    maker: dict[int, tuple[int, int]] = {}
    for number in program.projections:
        (source,) = index.inputs(number)
        # The operator that makes the container, and which of the items taken so far the container is.
        place, inner = maker.get(source, (value[source], -1))
        if place < count:
            made = makes.setdefault(place, [])
            maker[number] = (place, len(made))
            taken.setdefault(place, []).append((structure.letters[number], inner))
            made.append(value[number])
    known: dict[object, int] = {}
    for place, items in taken.items():
        letters[place] = -1 - known.setdefault((letters[place], tuple(items)), len(known))
    size, others = len(index), count
    reads = [
        [value[mentioned] if mentioned < size else others + mentioned for mentioned in structure.mentions[number]]
        for number in numbers
    ]
    inside = frozenset(numbers).union(program.projections)
    outside = (number for number in range(size) if number not in inside)
    returned = {value[read] for number in outside for read in index.inputs(number)}
    return Items(letters, reads, makes, returned, list(_depths(program, numbers)), _work(program, numbers))


def _work(program: Program, numbers: Sequence[int]) -> Sequence[int]:
    """How many operators each one stands for: those of the bodies that it runs; nothing if none runs any."""
    root, index = program.graph_module, program.index
    sizes: dict[nn.Module, int] = {}
    bodies = {index.number[node]: body for node, body in bodies_read(root, program.graph.find_nodes(op="get_attr"))}
    called = {
        index.number[node]: found
        for node in program.graph.find_nodes(op="call_module")
        if isinstance(found := find(root, str(node.target)), GraphModule)
    }
    if not bodies and not called:
        return ()
    work = []
    for number in numbers:
        run = [bodies[read] for read in index.inputs(number) if read in bodies] if bodies else []
        run += [called[number]] if number in called else []
        work.append(sum(_operators_in(body, sizes) for body in run) or 1)
    return work


def _operators_in(body: GraphModule, known: dict[nn.Module, int]) -> int:
    """How many operators a body has, and the bodies that its operators run."""
    if body not in known:
        calls = sum(node.op.startswith("call_") for node in body.graph.nodes)
        inner = (child for child in body.children() if isinstance(child, GraphModule))
        known[body] = calls + sum(_operators_in(child, known) for child in inner)
    return known[body]


def _depths(program: Program, numbers: Sequence[int]) -> Iterator[int]:
    """How many calls of modules go on across the border before each operator."""
    before: tuple[str, ...] = ()
    for number in numbers:
        around = _calls(program.index.nodes[number])
        yield sum(takewhile(bool, map(eq, around, before)))
        before = around


def _calls(node: Node) -> tuple[str, ...]:
    """The calls of modules that a node runs in, the outermost first, by keys."""
    stack = node.meta.get("nn_module_stack")
    if isinstance(stack, Mapping):
        return tuple(stack)
    return tuple(str(node.target).split(".")[:-1]) if node.op == "call_module" else ()


def _labelled(partition: Partition) -> Partition:
    """The same partition, with regions that are named by their bodies."""
    bodies = body_numbers(partition)
    calls = [0] * (max(bodies, default=-1) + 1)
    for body in bodies:
        calls[body] += 1
    labels: dict[int, str] = {}
    kinds = {"repeat": 0, "part": 0}
    for body in bodies:
        if body not in labels:
            kind = "repeat" if calls[body] > 1 else "part"
            labels[body] = f"{kind}_{kinds[kind]}"
            kinds[kind] += 1
    regions, seen = [], dict[int, int]()
    for region, body in zip(partition.regions, bodies, strict=True):
        call = seen[body] = seen.get(body, -1) + 1
        name = labels[body] if calls[body] == 1 else f"{labels[body]}_{call}"
        regions.append(Region(name, region.nodes, labels[body]))
    return partition.renamed(regions)
