"""Policies that cut the program in graph order: into regions of a size, or where a function says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import final

from torch import Tensor, nn
from torch.fx import Node

from partita._plain_help import PlainHelp
from partita._torch.operator_schemas import storage_key
from partita.analysis.nodes import find, value_of
from partita.errors import OptionError
from partita.policies.constraints import at_mode_changes, check_modes_apart
from partita.policies.legalize import Piece, assignable, call_user_function, legal_partition, unassigned
from partita.program.program import Program
from partita.regions import Partition


@final
@dataclass(frozen=True, slots=True)
class BySize(metaclass=PlainHelp):
    """Regions of at most so many operators or so many bytes of parameters, or so many regions of equal length.

    Set exactly one. A parameter counts where it is first used, a shared one there only. An operator that exceeds the
    limit by itself opens a region of its own. Items taken out of containers are not counted as operators. With
    `modes_apart`, regions are cut where the mode changes too; by default where the treatment takes one mode a region.
    """

    _: KW_ONLY
    parameter_bytes: int | None = None
    operators: int | None = None
    parts: int | None = None
    modes_apart: bool | None = None

    def __post_init__(self) -> None:
        check_modes_apart(self)
        limits = {name: getattr(self, name) for name in ("parameter_bytes", "operators", "parts")}
        limits = {name: value for name, value in limits.items() if value is not None}
        if len(limits) != 1:
            raise OptionError(
                f"BySize takes exactly one of parameter_bytes, operators and parts, not {len(limits)}: {limits}"
            )
        for name, value in limits.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{name} is a whole number above zero, not {value!r}")

    def __call__(self, program: Program) -> Partition:
        operators = list(assignable(program))
        if self.parameter_bytes is not None:
            sizes = first_use_bytes(program)
            cut = _cut_by_bytes([sizes[number] for number in operators], self.parameter_bytes)
        elif self.operators is not None:
            cut = [at // self.operators for at in range(len(operators))]
        else:
            parts = min(self.parts or 1, max(len(operators), 1))
            cut = [at * parts // len(operators) for at in range(len(operators))]
        assignment = unassigned(program)
        for number, part in zip(operators, cut, strict=True):
            assignment[number] = part
        if self.modes_apart:
            assignment = at_mode_changes(program, assignment)
        count = max(assignment, default=-1) + 1
        return legal_partition(program, assignment, [Piece(f"part_{at}", at) for at in range(count)])


@final
@dataclass(frozen=True, slots=True)
class SplitAt(metaclass=PlainHelp):
    """A new region begins at each node for which `opens(node)` is true, called once per operator in graph order.

    A mode toggle for which it is true cuts as well; itself it belongs to no region. With `modes_apart`, regions are cut
    where the mode changes too; by default where the treatment takes one mode a region.
    """

    opens: Callable[[Node], object]
    _: KW_ONLY
    modes_apart: bool | None = None

    def __post_init__(self) -> None:
        check_modes_apart(self)
        if not callable(self.opens):
            raise OptionError(f"SplitAt takes a function that says where a region begins, not {self.opens!r}")

    def __call__(self, program: Program) -> Partition:
        assignment, last = unassigned(program), 0
        can_be_assigned = frozenset(assignable(program))
        for node in program.operators():
            number = program.index.number[node]
            last += bool(call_user_function(self.opens, node, node=node, role="predicate"))
            if number in can_be_assigned:
                assignment[number] = last
        if self.modes_apart:
            assignment = at_mode_changes(program, assignment)
        used = {part: at for at, part in enumerate(dict.fromkeys(part for part in assignment if part >= 0))}
        pieces = [Piece(f"part_{at}", at) for at in used.values()]
        return legal_partition(program, [used.get(part, part) for part in assignment], pieces)


def _cut_by_bytes(sizes: list[int], limit: int) -> list[int]:
    cut, last, held = [], 0, 0
    for at, size in enumerate(sizes):
        if size and at and held + size > limit:
            last, held = last + 1, 0
        held += size
        cut.append(last)
    return cut


def first_use_bytes(program: Program) -> list[int]:
    """For each node by number the bytes of the parameters that no node before it uses; tied ones count once.

    Parameters are read by `get_attr`, or from an input that was traced as a parameter, as Dynamo does, or belong to
    the called module.
    """
    root, seen, sizes = program.graph_module, set(), []
    for node in program.index.nodes:
        total = 0
        if node.op.startswith("call_"):
            for parameter in _parameters(node, root):
                key = storage_key(parameter)
                if key not in seen:
                    seen.add(key)
                    total += parameter.nbytes
        sizes.append(total)
    return sizes


def _parameters(node: Node, root: nn.Module) -> Iterator[Tensor]:
    if node.op == "call_module":
        module = find(root, str(node.target))
        if isinstance(module, nn.Module):
            yield from module.parameters()
    for read in node.all_input_nodes:
        if read.op == "get_attr":
            value = find(root, str(read.target))
        else:
            value = value_of(read) if read.op == "placeholder" else None
        if isinstance(value, nn.Parameter):
            yield value
