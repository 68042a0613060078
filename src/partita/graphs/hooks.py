"""Hooks on tensors: each gets the sum of all gradients of its tensor, of which a part compiled alone has a share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from torch.fx import GraphModule, Node

from partita._torch.schemas import registers_hook
from partita.graphs.aliasing import storages_of
from partita.graphs.behaviours import Behaviours
from partita.graphs.index import Index

__all__ = ["HookedTensor", "hooked_tensors"]


@final
@dataclass(frozen=True, slots=True)
class HookedTensor:
    """A tensor with a hook, together with all that shares its memory."""

    hook: Node
    #: The nodes whose result it is, or is a view of it.
    makers: frozenset[Node]
    #: The nodes that take it.
    readers: frozenset[Node]
    #: Whether it is an input or an output of the graph.
    is_visible: bool

    def is_divided_by(self, part: Collection[Node]) -> bool:
        """Whether some gradients of the tensor are summed inside of `part`, and others outside."""
        made = self.makers.intersection(part)
        if not made or self.readers.isdisjoint(part):
            return False
        return self.is_visible or len(made) < len(self.makers) or not self.readers.issubset(part)


def hooked_tensors(index: Index, root: GraphModule) -> tuple[HookedTensor, ...]:
    """The tensors of a graph that have hooks, in graph order."""
    hooks = [node for node in index.nodes if registers_hook(node.target)]
    if not hooks:
        return ()
    behaviours = Behaviours(root)
    storages = storages_of(index, behaviours, behaviours.acting(index.graph))
    members: dict[int, list[Node]] = {storages.find(index.number[hook]): [] for hook in hooks}
    for i, node in enumerate(index.nodes):
        if storages.find(i) in members:
            members[storages.find(i)].append(node)
    found = []
    for own in members.values():
        makers = frozenset(node for node in own if node.op.startswith("call_"))
        readers = frozenset(user for node in own for user in node.users)
        is_visible = len(makers) < len(own) or index.nodes[-1] in readers
        hook = next(node for node in own if registers_hook(node.target))
        found.append(HookedTensor(hook, makers, readers, is_visible))
    return tuple(found)
