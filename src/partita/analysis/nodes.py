"""What a node refers to: its traced value, attribute or module, module stack and neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.symbolic_shapes import SYMBOLIC, hint_of
from partita.errors import MissingTargetError

# Module stacks: where in the model a traced node belongs, as torch.export records it.


#: The calls of modules around a node, the outermost first, by a key of the call: path and type of the module.
ModuleStack: TypeAlias = dict[str, Any]

_KEY = "nn_module_stack"


def common_stack(nodes: Iterable[Node]) -> ModuleStack:
    """The calls of modules that all of these nodes are in; inputs belong where they come from."""
    common: list[tuple[str, Any]] | None = None
    for node in nodes:
        stack = node.meta.get(_KEY) if node.op not in ("placeholder", "output") else None
        if not stack:
            continue
        if common is None:
            common = list(stack.items())
        shared = 0
        for ours, theirs in zip(common, stack.items(), strict=False):
            if ours != theirs:
                break
            shared += 1
        common = common[:shared]
    return dict(common or ())


def outermost_stack(graph: Graph) -> ModuleStack:
    """The call of the whole model, for nodes that belong to no module in it."""
    found: ModuleStack = next((stack for node in graph.nodes if (stack := node.meta.get(_KEY))), {})
    return dict(list(found.items())[:1])


# Traced values: the example result of a node, under either of the two keys that tracers use.


#: torch.export and make_fx write "val", Dynamo writes "example_value".
VALUE_KEYS = ("val", "example_value")


def is_module_state(node: Node) -> bool:
    """Whether Dynamo made an input of a parameter, a buffer or another tensor that a module holds."""
    held = node.meta.get("tensor_dict") or {}
    return "_dynamo_static_input_type" in held or isinstance(node.meta.get("example_value"), nn.Parameter)


def value_of(node: Node) -> Any:
    """The traced value of `node`, or None."""
    meta = node.meta
    for key in VALUE_KEYS:
        if key in meta:
            return meta[key]
    return None


def value_text(value: Any) -> str:
    """A traced value in a few characters: dtype and sizes of a tensor, items of a container."""
    if isinstance(value, torch.Tensor):
        device = "" if value.device.type in ("cpu", "meta") else f" {value.device}"
        return f"{_dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]{device}"
    if isinstance(value, tuple | list):
        shown = [value_text(item) for item in value[:_SHOWN_ITEMS]]
        more = [f"{len(value) - _SHOWN_ITEMS} more"] if len(value) > _SHOWN_ITEMS else []
        return f"({', '.join([*shown, *more])})"
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)[:_LONGEST]
    return str(value)[:_LONGEST] if isinstance(value, SYMBOLIC) else type(value).__name__


_SHOWN_ITEMS, _LONGEST = 4, 60
_DTYPES = (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"))


def _dtype_text(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return next((short + name.removeprefix(long) for long, short in _DTYPES if name.startswith(long)), name)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a traced value, in order; tracers write containers as tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def has_nested_tensors(graph: Graph) -> bool:
    """Whether a traced value is, or holds, a nested tensor."""
    return any(one.layout is torch.jagged for node in graph.nodes for one in tensors_in(value_of(node)))


def returned_by(graph: Graph) -> Sequence[Any]:
    """What a graph returns, item by item; one value that is no container is the only item."""
    (output,) = graph.find_nodes(op="output")
    returned: Any = output.args[0] if output.args else ()
    return returned if isinstance(returned, tuple | list) else (returned,)


def container_items(node: Node) -> tuple[Any, ...] | None:
    """The traced items of a plain tuple, list or torch.Size; None where the result is something else or unknown."""
    value = value_of(node)
    return tuple(value) if type(value) in (tuple, list, torch.Size) else None


def crossing_places(items: Sequence[Any]) -> tuple[int, ...]:
    """The places of a container whose items must be passed on; the others are known constants.

    In a size with symbols, the tracer has specialized the plain numbers. A size of plain numbers only may be that of an
    example, so its items are passed on.
    """
    fixed = any(isinstance(item, torch.SymInt) for item in items)
    return tuple(place for place, item in enumerate(items) if not fixed or type(item) is not int)


def bytes_of(node: Node, root: GraphModule | None = None) -> int | None:
    """The bytes of the tensors that `node` returns; None where that is unknown or symbolic."""
    value = value_of(node)
    if value is None and node.op == "get_attr" and root is not None:
        value = find(root, str(node.target))
    return None if value is None else bytes_of_value(value)


def bytes_of_value(value: Any) -> int | None:
    """The bytes of a traced tensor, or of all in a container; None where a size is symbolic."""
    total = 0
    for item in value if isinstance(value, tuple | list) else (value,):
        if isinstance(item, torch.Tensor):
            count = item.numel()
            if not isinstance(count, int):
                return None
            total += count * item.element_size()
    return total


class TracedBytes(NamedTuple):
    """Bytes at the sizes of the trace; with `is_dynamic`, other calls have others.

    None where a size is only known when the program runs. It prints as a table has it: 1,024 or ~1,024, else `?`.
    """

    size: int | None
    is_dynamic: bool = False

    def __str__(self) -> str:
        return "?" if self.size is None else f"{'~' if self.is_dynamic else ''}{self.size:,}"


def traced_bytes(value: Any) -> TracedBytes:
    """The bytes of a traced tensor, or of all in a container."""
    total, is_dynamic = 0, False
    for item in value if isinstance(value, tuple | list) else (value,):
        if not isinstance(item, torch.Tensor):
            continue
        count: Any = 1
        for size in item.shape:
            if not isinstance(size, int):
                is_dynamic = True
                size = hint_of(size, _UNKNOWN)
                if size == _UNKNOWN:
                    return TracedBytes(None, is_dynamic=True)
            count *= size
        total += count * item.element_size()
    return TracedBytes(int(total), is_dynamic)


_UNKNOWN = -1


def sum_of_bytes(sizes: Iterable[TracedBytes]) -> TracedBytes:
    """All of them together."""
    total, is_dynamic = 0, False
    for count, is_one_dynamic in sizes:
        if count is None:
            return TracedBytes(None, is_dynamic=True)
        total, is_dynamic = total + count, is_dynamic or is_one_dynamic
    return TracedBytes(total, is_dynamic)


def bytes_at_hints(value: Any) -> int:
    """The bytes of the tensors in a traced value, for the sizes that symbols were traced with."""
    return sum(math.prod(map(hint_of, one.shape)) * one.element_size() for one in tensors_in(value))


def known_sum(sizes: Iterable[int | None]) -> int | None:
    """The sum; None if one of the numbers is not known."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


# Attributes: what the dotted target of a node refers to on a module.


def attribute_of(root: nn.Module, node: Node) -> Any:
    """What the dotted target of `node` refers to."""
    value = find(root, str(node.target))
    if value is None and not _exists(root, str(node.target)):
        raise MissingTargetError(
            f"Node target {node.target} not found! Node {node.name!r} ({node.op}) names it, but the module has nothing "
            "there; register it on the module, or erase the node"
        )
    return value


def find(root: nn.Module, path: str) -> Any:
    """The object at a dotted path, or None."""
    value: Any = root
    for part in path.split("."):
        # Most of a path is modules, and `getattr` finds a submodule only after a miss and three tables.
        inner = value._modules.get(part) if isinstance(value, nn.Module) else None
        value = getattr(value, part, None) if inner is None else inner
    return value


def body_read(root: nn.Module, node: Node) -> GraphModule | None:
    """The body that `node` reads from `root` for an operator; None for any other node."""
    value = find(root, str(node.target)) if node.op == "get_attr" else None
    return value if isinstance(value, GraphModule) else None


def bodies_read(root: nn.Module, nodes: Iterable[Node]) -> Iterator[tuple[Node, GraphModule]]:
    """Those of these nodes that read a body, each with the body: the inputs of a call, say."""
    return ((node, body) for node in nodes if (body := body_read(root, node)) is not None)


def bodies_of(module: GraphModule) -> Iterator[GraphModule]:
    """The bodies that operators of a graph run."""
    return (body for _, body in bodies_read(module, module.graph.find_nodes(op="get_attr", sort=False)))


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
    """`root` and all modules inside it, each once, as `root.modules()` has them, in linear time in deep nests too."""
    seen: set[nn.Module] = set()
    found = [root]
    while found:
        module = found.pop()
        if module not in seen:
            seen.add(module)
            yield module
            found += [child for child in reversed(module._modules.values()) if child is not None]


def _exists(root: nn.Module, path: str) -> bool:
    """Whether a path exists, even if None is there."""
    folder, _, name = path.rpartition(".")
    return hasattr(find(root, folder) if folder else root, name)


# Neighbours: for each node, by number, those right before it and right after it along some edges.


@final
@dataclass(frozen=True, slots=True)
class Neighbours:
    """The nodes before and after each node; a node that has none is missing."""

    before: Mapping[int, Sequence[int]]
    after: Mapping[int, Sequence[int]]


def neighbours_of(edges: Iterable[tuple[int, int]]) -> Neighbours:
    """The neighbours along edges from a node to one after it, in the order of the edges."""
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for source, target in edges:
        before.setdefault(target, []).append(source)
        after.setdefault(source, []).append(target)
    return Neighbours(before, after)
