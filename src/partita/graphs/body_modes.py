"""Bodies that a graph calls, the modes that they leave behind, and the grad mode that it was all traced under."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule, Node

from partita._torch import toggles
from partita._torch.schemas import is_higher_order
from partita.errors import ModeError
from partita.graphs.attributes import find
from partita.graphs.index import Index
from partita.graphs.modes import AMBIENT, Mode, Modes, modes_of

__all__ = ["bodies_of", "check_bodies", "traced_grad"]


def traced_grad(module: GraphModule) -> bool | None:
    """The grad mode that a graph was traced under, as its constants tell; None if it sets none, or puts back by value.

    A traced block ends by setting what was on when it was entered, so the last constant of a graph is that mode. After
    an odd number of them one block was never closed; then it is taken to be True. Leaving an inference block puts back
    the grad mode, so constants in one tell nothing. Where bodies tell otherwise than the graph around them, it is True:
    a body that ends by switching gradients on would leave them on for a caller without.
    """
    every = list(_grad_constants(module))
    if not any(found.values for found in every) or not all(found.are_constant for found in every):
        return None
    telling = [found.outside_inference for found in every if found.in_callers_mode and found.outside_inference]
    return not telling or any(values[-1] is not False or len(values) % 2 == 1 for values in telling)


def bodies_of(module: GraphModule) -> Iterator[GraphModule]:
    """The bodies that operators of a graph run."""
    for read in module.graph.find_nodes(op="get_attr", sort=False):
        found = find(module, str(read.target))
        if isinstance(found, GraphModule):
            yield found


def check_bodies(index: Index, root: nn.Module, modes: Modes, *, grad: bool | None = None) -> None:
    """Raises where a call leaves a mode switched for the nodes after it: modes are told by the toggles in the graph.

    `grad` is the grad mode of the caller, if it is known. Where it is not, a body that ends by switching gradients on
    has closed a block without, as far as anyone can tell.
    """
    _Checking().check(index, root, modes, grad=grad)


class _Checking:
    """The bodies that were looked at, and under which grad mode: one that is called often is walked once."""

    def __init__(self) -> None:
        self.known: dict[GraphModule, tuple[Index, Modes]] = {}
        self.checked: set[tuple[GraphModule, bool | None]] = set()

    def check(self, index: Index, root: nn.Module, modes: Modes, *, grad: bool | None) -> None:
        waiting: list[tuple[Index, nn.Module, Modes, bool | None]] = [(index, root, modes, grad)]
        while waiting:  # No recursion, since nests may be deep.
            waiting += self._check_one(*waiting.pop())

    def _check_one(
        self,
        index: Index,
        root: nn.Module,
        modes: Modes,
        grad: bool | None,  # noqa: FBT001
    ) -> Iterator[tuple[Index, GraphModule, Modes, bool | None]]:
        """Checks the calls of one graph, and gives the bodies that are still to be looked into."""
        graph = index.graph
        for node in (*graph.find_nodes(op="call_module", sort=False), *graph.find_nodes(op="get_attr", sort=False)):
            body = find(root, str(node.target))
            if not isinstance(body, GraphModule):
                continue
            inner, inside = self._analysed(body)
            calls = (node,) if node.op == "call_module" else tuple(node.users)
            around = [grad if at is None else at for at in (modes.at(index.number[call]).grad for call in calls)]
            if inside.final != AMBIENT and not _puts_back(body, inside.final, zip(calls, around, strict=True)):
                raise ModeError(
                    f"the body {node.target!r} of node {node.name!r} leaves {inside.final} behind for everything after "
                    "it; close its blocks"
                )
            found = {_grad_inside(call, at) for call, at in zip(calls, around, strict=True)}
            known = found.pop() if len(found) == 1 else None
            if (body, known) not in self.checked:
                self.checked.add((body, known))
                yield inner, body, inside, known

    def _analysed(self, body: GraphModule) -> tuple[Index, Modes]:
        if body not in self.known:
            index = Index(body.graph)
            self.known[body] = (index, modes_of(index))
        return self.known[body]


def _puts_back(body: GraphModule, left: Mode, calls: Iterable[tuple[Node, bool | None]]) -> bool:
    """Whether a body that leaves this mode switched leaves what these calls found, or what they put back themselves."""
    if left != Mode(grad=left.grad):
        return False
    found_if_unknown = traced_grad(body) is not False
    return all(
        _sets_grad(call) is not None or left.grad == (found_if_unknown if at is None else at) for call, at in calls
    )


def _grad_inside(call: Node, around: bool | None) -> bool | None:  # noqa: FBT001
    """The grad mode that a body starts in."""
    sets = _sets_grad(call)
    return around if sets is None else sets


def _sets_grad(call: Node) -> bool | None:
    """The grad mode that an operator sets for its body and takes back afterwards, if it is one that does."""
    name = getattr(call.target, "__name__", None) if is_higher_order(call.target) else None
    given = call.args[0] if call.args and name in _GRAD_OPERATORS else None
    if not isinstance(given, bool):
        return None
    return not given if name == "partita_inference_mode" else given


_GRAD_OPERATORS = ("wrap_with_set_grad_enabled", "partita_set_grad_enabled", "partita_inference_mode")


@dataclass(frozen=True, slots=True)
class _GradConstants:
    """What one graph sets the grad mode to, in order."""

    values: tuple[object, ...]
    outside_inference: tuple[object, ...]
    #: Whether the graph starts in the grad mode of whoever calls the outermost one.
    in_callers_mode: bool

    @property
    def are_constant(self) -> bool:
        return all(isinstance(value, bool) for value in self.values)


def _grad_constants(module: GraphModule) -> Iterator[_GradConstants]:
    """What the grad mode is set to, by graph: in the module's and in all bodies that its operators run."""
    waiting, seen = [(module, True)], {(module, True)}
    while waiting:  # No recursion, since nests may be deep.
        owner, in_callers_mode = waiting.pop()
        index = Index(owner.graph)
        modes = modes_of(index)
        switches = owner.graph.find_nodes(op="call_function", target=toggles.SET_GRAD)
        outside = [switch for switch in switches if modes.at(index.number[switch]).inference is None]
        yield _GradConstants(_values_set(switches), _values_set(outside), in_callers_mode)
        for read in owner.graph.find_nodes(op="get_attr"):
            body = find(owner, str(read.target))
            if not isinstance(body, GraphModule):
                continue
            is_kept = any(_grad_inside(call, modes.at(index.number[call]).grad) is None for call in read.users)
            found = (body, in_callers_mode and is_kept)
            if found not in seen:
                seen.add(found)
                waiting.append(found)


def _values_set(switches: Iterable[Node]) -> tuple[object, ...]:
    return tuple(value for switch in switches for value in (*switch.args, *switch.kwargs.values()))
