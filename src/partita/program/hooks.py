"""Hooks on tensors: each gets the sum of all gradients of its tensor, so a region must not have only some of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from torch.fx import Node

from partita._torch.operators.schemas import registers_hook
from partita.analysis.effects.calls import CallEffects


@final
@dataclass(frozen=True, slots=True)
class HookedTensor:
    """A tensor that has a hook, or may get one from an unknown function, with all its aliases."""

    hook: Node
    #: Whether `hook` is known to register a hook.
    is_certain: bool
    #: The calls of unknown functions among its nodes.
    unknown: frozenset[Node]
    #: The nodes that return it or an alias of it.
    makers: frozenset[Node]
    #: The nodes that read it.
    readers: frozenset[Node]
    #: Whether it is an input or an output of the graph.
    is_visible: bool

    def is_divided_by(self, part: Collection[Node]) -> bool:
        """Whether some gradients of the tensor are summed inside `part`, and others outside."""
        if not self.is_certain and self.unknown.issubset(part):
            return False  # A user who puts an unknown function into a part vouches for it.
        made = self.makers.intersection(part)
        # Reads of a tensor made elsewhere go through the tensor that has the hook; views and mutations do not.
        if not any(node in self.readers or _has_user_in(node, part) for node in made):
            return False
        return self.is_visible or len(made) < len(self.makers) or not self.readers.issubset(part)


def hooked_tensors(calls: CallEffects) -> tuple[HookedTensor, ...]:
    """The tensors of a graph that have or may have hooks, in graph order."""
    index = calls.index
    unknown = {node for node, effects in calls.effectful.items() if effects.unknown}
    hooks = [node for node in index.nodes if registers_hook(node.target) or node in unknown]
    if not hooks:
        return ()
    storages = calls.storages
    members: dict[int, list[Node]] = {storages.find(index.number[hook]): [] for hook in hooks}
    for i, node in enumerate(index.nodes):
        if storages.find(i) in members:
            members[storages.find(i)].append(node)
    found = []
    for own in members.values():
        makers = frozenset(node for node in own if node.op.startswith("call_"))
        readers = frozenset(user for node in own for user in node.users)
        is_visible = len(makers) < len(own) or index.nodes[-1] in readers
        certain = next((node for node in own if registers_hook(node.target)), None)
        hook = certain or next(node for node in own if node in unknown)
        found.append(
            HookedTensor(hook, certain is not None, frozenset(unknown.intersection(own)), makers, readers, is_visible)
        )
    return tuple(found)


def _has_user_in(node: Node, part: Collection[Node]) -> bool:
    return any(user in part for user in node.users)
