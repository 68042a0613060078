"""Structural keys and digests of bodies and modules, whatever their nodes and tensors are called.

A key holds the functions themselves, so it is valid in one process; a digest is a text that is equal in every process.
By the digest, an annotation of a body is valid until the body is edited.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import reduce
from hashlib import blake2b
from operator import is_, itemgetter
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node

from partita._torch.fx.graph_writer import map_nodes
from partita._torch.nn_modules import call_overrides
from partita._torch.operator_schemas import has_process_lifetime


def body_key(body: GraphModule) -> Hashable | None:
    """The key, equal for bodies with the same code; None for a body that holds something that cannot be compared.

    Unlike in a fingerprint, the order of nodes counts.
    """
    try:
        return _Keys(_refused).of_graph(body)
    except _UniqueError:
        return None


def modules_key(body: GraphModule) -> tuple[Hashable, ...]:
    """The keys of the modules that a body calls, in which something that cannot be compared equals only itself."""
    called = {str(node.target): None for node in body.graph.find_nodes(op="call_module")}
    return tuple(_Keys(_Itself).of_module(body.get_submodule(target)) for target in called)


@final
class NodeKeys:
    """Keys of single nodes: what is called, with which constants; an input is its place among the inputs of the node.

    Something that cannot be compared equals only itself. Tensors of a called module do not count.
    """

    def __init__(self) -> None:
        self._keys = _Keys(_Itself)
        self._modules: dict[nn.Module, Hashable] = {}

    def of_call(self, node: Node, root: nn.Module, *, without: int | None = None) -> Hashable:
        """The key of a node that calls something; without the value of the argument at a place, if one is given."""
        inputs = node.all_input_nodes
        target: Any = node.target
        if node.op == "call_module":
            target = self.of_module(_attribute(root, str(target)))
        args: tuple[Any, ...] = node.args
        kwargs = node.kwargs
        if without is not None:
            args = (*args[:without], ..., *args[without + 1 :])
        mark = node.meta.get("recompute")
        if mark is None and not kwargs and len(args) == len(inputs) and all(map(is_, args, inputs)):
            return node.op, target, len(args)  # Most nodes read their inputs in order, and nothing else.
        places = {read: at for at, read in enumerate(inputs)}
        return node.op, target, self._keys.of_value(args, places), self._keys.of_value(kwargs, places), mark

    def of_module(self, module: Any) -> Hashable:
        """The key of a module that is called, or of the body of an operator."""
        if not isinstance(module, nn.Module):
            return _Itself(module)
        if module not in self._modules:
            flags = tuple(inner.training for inner in module.modules())
            self._modules[module] = self._keys.of_module(module), flags
        return self._modules[module]


def settings_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module beside its tables: options, tensors that are neither parameters nor buffers."""
    lists_weights = isinstance(module, nn.RNNBase)
    for name, value in vars(module).items():
        if name not in _TABLES and not (lists_weights and name.startswith("_flat_weight")):
            yield name, value


class _UniqueError(Exception):
    """Something cannot be compared."""


def _refused(value: object) -> Hashable:
    raise _UniqueError


@final
class _Itself:
    """Compares an object by identity; an unpickled one equals no other."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Itself, (object(),)


@final
class _Keys:
    """Makes keys; `unknown` returns the key of an object that cannot be compared."""

    def __init__(self, unknown: Callable[[object], Hashable]) -> None:
        self._unknown = unknown

    def of_graph(self, module: GraphModule) -> Hashable:
        graph: Graph = module.graph
        number = {node: at for at, node in enumerate(graph.nodes)}
        groups: dict[Any, int] = {}
        return tuple(self._of_node(node, module, number, groups) for node in number)

    def of_module(self, module: Any) -> Hashable:
        """The key of a module that is called, or of the body of an operator, without its tensors."""
        if not isinstance(module, nn.Module) or call_overrides(module) is not None:
            return self._unknown(module)
        if isinstance(module, GraphModule):
            return "graph", self.of_graph(module), *_names_of_tensors(module)
        children = ((name, self.of_module(child)) for name, child in module._modules.items() if child is not None)
        kind: Hashable = type(module)  # type: ignore[assignment]
        return kind, *_names_of_tensors(module), *self._settings_of(module), *children

    def _of_node(self, node: Node, root: GraphModule, number: dict[Node, int], groups: dict[Any, int]) -> Hashable:
        if node.op == "placeholder":
            return node.op, len(node.args)
        if node.op in ("get_attr", "call_module"):
            target: Hashable = self.of_module(_attribute(root, str(node.target)))
        else:
            target = node.target
        marks = node.meta.get("recompute"), groups.setdefault(node.meta.get("ac_graph_id"), len(groups))
        return node.op, target, self.of_value(node.args, number), self.of_value(node.kwargs, number), marks

    def of_value(self, value: Any, number: dict[Node, int]) -> Hashable:
        """The key of an argument, in which a node is its number."""
        if isinstance(value, Node):
            return "node", number[value]
        if isinstance(value, tuple | list):
            return type(value).__name__, *(self.of_value(item, number) for item in value)
        if isinstance(value, dict):
            return "dict", *((self.of_value(key, number), self.of_value(item, number)) for key, item in value.items())
        if isinstance(value, slice):
            return "slice", *(self.of_value(item, number) for item in (value.start, value.stop, value.step))
        if type(value) in _PRINTED:
            return type(value), repr(value)
        if isinstance(value, _EQUAL) or has_process_lifetime(value):
            return value  # type: ignore[no-any-return]
        return self._unknown(value)

    def _settings_of(self, module: nn.Module) -> Iterator[Hashable]:
        """The keys of the other attributes of a module; the training flag is checked where a call is compiled."""
        for name, value in settings_of(module):
            yield name, "tensor" if isinstance(value, Tensor) else self.of_value(value, {})


_PRINTED = (bool, int, float, complex, str, bytes, type(None), type(...))
_EQUAL = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _attribute(root: Any, path: str) -> Any:
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), root)


def _names_of_tensors(module: nn.Module) -> Iterator[Hashable]:
    for table in (module._parameters, module._buffers):
        yield tuple((name, value is None) for name, value in table.items())


_TABLES = frozenset(vars(nn.Module()))


def digest_of_body(body: GraphModule) -> str:
    """The digest of a body and the modules inside it, in time linear in their nodes.

    Values of tensors do not count. A function that is no attribute of a module, such as a closure, equals only itself.
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
        arguments = map_nodes((node.args, node.kwargs), places.__getitem__)
        lines.append(f"{node.op} {texts[target]} {arguments!r}")
    return lines


def _text_of(target: Any) -> str:
    if isinstance(target, str | OpOverload | OpOverloadPacket | HigherOrderOperator):
        return str(target)
    name = f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', target)}"
    return name if has_process_lifetime(target) else f"{name} {id(target)}"


_PREFIX = "partita_annotation_"


def annotate(body: GraphModule, key: str, data: tuple[Any, ...], state: tuple[str, ...] = ()) -> None:
    """Annotates a body with `data` and with names of its parameters and buffers."""
    body.meta[_PREFIX + key] = (digest_of_body(body), data, state)


def annotation(body: GraphModule, key: str) -> tuple[tuple[Any, ...], tuple[str, ...]] | None:
    """The annotation of a body, if it was not edited since."""
    digest, data, state = body.meta.get(_PREFIX + key, (None, (), ()))
    return None if digest is None or digest != digest_of_body(body) else (data, state)


def propagate_annotations(body: GraphModule, rewritten: GraphModule) -> None:
    """Copies the annotations of a body to an equivalent one with the same inputs that was made from it."""
    keys = [key for key in body.meta if isinstance(key, str) and key.startswith(_PREFIX)]
    if body is rewritten or not keys:
        return
    names = {id(tensor): name for name, tensor in _named_tensors(rewritten)}
    moved = {name: names.get(id(tensor), name) for name, tensor in _named_tensors(body)}
    for key in keys:
        found = annotation(body, key.removeprefix(_PREFIX))
        if found is not None:
            data, state = found
            annotate(rewritten, key.removeprefix(_PREFIX), data, tuple(moved.get(name, name) for name in state))


def _named_tensors(body: GraphModule) -> Iterator[tuple[str, Tensor]]:
    yield from body.named_parameters()
    yield from body.named_buffers()
