"""Assembly: a module around a new graph that is called, hooked and trained like the one around the old graph."""

from __future__ import annotations

import copy

from torch.fx import Graph, GraphModule

from partita._torch.lazy_modules import LazyModule, lazy_module
from partita._torch.nodes import copy_meta
from partita.rewrite.state import adopt_hooks, share_plain_attributes

__all__ = ["module_like"]


def module_like(root: GraphModule, graph: Graph, *, restores_modes: bool = False) -> LazyModule:
    """A module without state that runs `graph` by the calling convention, hooks and flags of `root`."""
    # The code generator carries the calling convention; a copy, so that neither graph can change the other's.
    graph.set_codegen(copy.copy(root.graph._codegen))
    module = lazy_module(graph, training=root.training, restores_modes=restores_modes)
    copy_meta(root.meta, module.meta, {})
    module.shape_env = getattr(root, "shape_env", None)
    type(module).__name__ = type(root).__name__
    adopt_hooks(root, module)
    share_plain_attributes(root, module)
    return module
