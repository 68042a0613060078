"""A body as a short text: equal for two with the same graphs, in every process, whatever their nodes are called."""

from __future__ import annotations

from hashlib import blake2b
from operator import itemgetter
from typing import Any

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule

from partita._torch.lasting import is_lasting
from partita._torch.nodes import map_nodes

__all__ = ["digest_of_body"]


def digest_of_body(body: GraphModule) -> str:
    """The text for a body and the modules inside of it; in time linear in their nodes.

    Values of tensors do not count. A function that no module holds, a closure say, equals itself alone.
    """
    lines: list[str] = []
    for path, module in sorted(body.named_modules(remove_duplicate=False), key=itemgetter(0)):
        if isinstance(module, GraphModule):
            lines.append(path)
            lines += _lines_of(module)
        else:
            lines.append(f"{path} {type(module).__module__}.{type(module).__qualname__}")
    return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _lines_of(module: GraphModule) -> list[str]:
    places = {node: f"%{place}" for place, node in enumerate(module.graph.nodes)}
    texts: dict[Any, str] = {}
    lines = []
    for node in places:
        target = "" if node.op == "placeholder" else node.target
        if target not in texts:
            texts[target] = _text_of(target)
        arguments = map_nodes((node._args, node._kwargs), places.__getitem__)
        lines.append(f"{node.op} {texts[target]} {arguments!r}")
    return lines


def _text_of(target: Any) -> str:
    if isinstance(target, str | OpOverload | OpOverloadPacket | HigherOrderOperator):
        return str(target)
    name = f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', target)}"
    return name if is_lasting(target) else f"{name} {id(target)}"
