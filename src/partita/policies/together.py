"""Together: groups of nodes that a policy moves as one, and an order in which what is grouped can run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from torch.fx import Node

from partita.errors import CycleError, OptionError
from partita.graphs.program import Program
from partita.policies.asking import asked_label
from partita.solvers.quotient import ALONE, NOWHERE, quotient

__all__ = ["Together", "checked_together", "group_nodes", "order_of_units"]

#: Nodes that stay together: a function that gives them the same label (None: no group), or groups of node names.
Together = Callable[[Node], Hashable | None] | Iterable[Iterable[str]]


def checked_together(given: object) -> Together | None:
    """What stays together, as a function or as groups of names that can be read again and again."""
    if given is None or callable(given):
        return given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise OptionError(f"`together` takes groups of names, or a function from a node to a label, not {given!r}")
    groups = tuple(names if isinstance(names, str) or not isinstance(names, Iterable) else (*names,) for names in given)
    for names in groups:
        if not isinstance(names, tuple):
            raise OptionError(f"`together` takes groups of names, not {names!r}: give together=[[{names!r}, ...]]")
        for name in names:
            if not isinstance(name, str):
                raise OptionError(f"`together` takes names of nodes, which are text, not {name!r}")
    return groups


def group_nodes(program: Program, unit_of: list[int], numbers: Sequence[int], together: Together) -> None:
    """Puts those of the nodes `numbers` that are in one group into the unit of the first of them."""
    label_of, nodes = _labels(program, numbers, together), program.index.nodes
    first: dict[Hashable, int] = {}
    for number in numbers:
        label = asked_label(label_of, nodes[number], role="`together`")
        if label is not None:
            unit_of[number] = first.setdefault(label, number)


def order_of_units(
    program: Program, unit_of: Sequence[int], numbers: Sequence[int], *, waits: Iterable[tuple[int, int]] = ()
) -> list[int]:
    """The units of the nodes `numbers` in an order that data, effects and `waits` allow."""
    units = list(dict.fromkeys(unit_of[number] for number in numbers if unit_of[number] != number))
    groups = {unit: place for place, unit in enumerate(units)}
    owner = [groups.get(unit, ALONE) if unit >= 0 else NOWHERE for unit in unit_of]
    edges = (*program.index.edges(), *program.effects.edges(), *waits)
    order = quotient(owner, len(groups), edges).stable_order()
    if order is None:
        names = ", ".join(repr(program.index.nodes[unit].name) for unit in units)
        raise CycleError(
            f"the groups that begin at {names} need each other, or something that runs between their nodes; take it "
            "into the group, or make the groups smaller"
        )
    ordered = (units[vertex] if vertex < len(units) else vertex - len(units) for vertex in order)
    return [unit for unit in ordered if unit_of[unit] == unit]


def _labels(program: Program, numbers: Sequence[int], together: Together) -> Callable[[Node], Hashable | None]:
    if callable(together):
        return together
    can_be_placed = {program.index.nodes[number] for number in numbers}
    groups: dict[Node, int] = {}
    for place, names in enumerate(together):
        for name in names:
            node = program.node(name)
            while program.index.number[node] in program.projecting:
                node = node.all_input_nodes[0]
            if node not in can_be_placed:
                raise OptionError(f"`together` names {name!r}, which no region can hold: {_what(node)}; leave it out")
            if groups.setdefault(node, place) != place:
                raise OptionError(f"`together` names {name!r} in two groups; merge them")
    return groups.get


def _what(node: Node) -> str:
    if node.op in _NO_OPERATORS:
        return _NO_OPERATORS[node.op]
    return "it only switches a mode, or checks the inputs of the program"


_NO_OPERATORS = {
    "placeholder": "it is an input of the program",
    "output": "it is the output of the program",
    "get_attr": "it reads an attribute, which is passed in",
}
