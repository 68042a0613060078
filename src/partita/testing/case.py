"""A case: one generated program and how to call it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import final

from torch.fx import GraphModule

__all__ = ["Case"]


@final
@dataclass(frozen=True, slots=True)
class Case:
    """A program that runs on its arguments, what it contains, and the text that makes it again."""

    graph_module: GraphModule
    args: tuple[object, ...]
    kwargs: dict[str, object]
    traits: tuple[str, ...] = ()
    origin: str = ""

    def copy(self) -> Case:
        """The same case with its own state and arguments, for a run that may write to them; sharing is kept."""
        graph_module, args, kwargs = deepcopy((self.graph_module, self.args, self.kwargs))
        _forget_alike(graph_module, self.graph_module)
        return replace(self, graph_module=graph_module, args=args, kwargs=kwargs)

    def run(self) -> object:
        """What the program returns; its arguments and state may be written."""
        return self.graph_module(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"<Case {self.origin}\n{self.graph_module.graph}>"


def _forget_alike(copied: GraphModule, original: GraphModule) -> None:
    """Makes the same buffers non-persistent as in the original, which torch 2.13 forgets in copies of graph modules."""
    kept = original.state_dict()
    for name, buffer in copied.named_buffers(remove_duplicate=False):
        if name not in kept:
            owner, _, leaf = name.rpartition(".")
            copied.get_submodule(owner).register_buffer(leaf, buffer, persistent=False)
