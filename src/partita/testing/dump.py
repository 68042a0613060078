"""Everything about a graph module that a pass could change, as text."""

from __future__ import annotations

from torch.fx import GraphModule

__all__ = ["dump"]


def dump(module: GraphModule) -> str:
    """Nodes, arguments, metadata, extra attributes and state names; equal before and after a pass that only reads."""
    lines = [f"{type(module).__name__} training={module.training} meta={sorted(map(str, module.meta))}"]
    for node in module.graph.nodes:
        extras = sorted(key for key in node.__dict__ if not key.startswith("__"))
        users = [user.name for user in node.users]
        lines.append(f"{node.format_node()} {node.name} {users} {_text(node.meta)} {extras}")
    lines += [f"{name} {id(tensor)}" for name, tensor in module.named_parameters(remove_duplicate=False)]
    lines += [f"{name} {id(tensor)}" for name, tensor in module.named_buffers(remove_duplicate=False)]
    return "\n".join(lines)


def _text(meta: object) -> str:
    if isinstance(meta, dict):
        return "{" + ", ".join(f"{key}: {_text(value)}" for key, value in meta.items()) + "}"
    if isinstance(meta, list | tuple):
        return "[" + ", ".join(map(_text, meta)) + "]"
    return repr(meta) if isinstance(meta, str | int | float | bool | None) else f"{type(meta).__name__} {id(meta)}"
