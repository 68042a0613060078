"""A fingerprint: equal for programs that differ only in legal order, names, and where items and sizes are read.

Every node is hashed with its inputs, its mode and its effect predecessors; the fingerprint is the hash of all nodes. It
is the same in every process. Equal calls without effects count once.
"""

from __future__ import annotations

import operator
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from partita._torch.operator_schemas import OPERATORS, SYM_SIZE, is_higher_order
from partita.analysis.nodes import container_items, find, value_of
from partita.analysis.projections import takes_item
from partita.program.program import Program


def fingerprint(program: Program | GraphModule | ExportedProgram) -> str:
    """A short hash of the calls of a program, up to legal reordering and renaming.

    It excludes the values of parameters, buffers and constants, the containers around the results of an exported
    program, which of equal results are one tensor, whether an argument of an operator is a list or a tuple, which a
    `.pt2` file does not say, and the options of modules that are called as a whole.
    """
    return _Hasher(Program.of(program)).fingerprint()


def program_digest(program: Program) -> str:
    """The same for graphs whose nodes have the same names, operators and inputs in the same order.

    Unlike a fingerprint, which is equal for programs that compute the same by nodes of other names. A node that reads
    the body of an operator counts where it is used, as that body: a `.pt2` file keeps neither its name nor its place.
    """
    hasher = _Hasher(program)
    digest = blake2b(hasher.fingerprint().encode(), digest_size=16)
    names: dict[Node, str] = {}
    for node in program.index.nodes:
        target: Any = node.target
        name = target if isinstance(target, str) else getattr(target, "__qualname__", None) or type(target).__name__
        body = find(program.graph_module, name) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            names[node] = hasher.bodies[body]
            continue
        names[node] = node.name
        reads = ",".join(names[read] for read in node.all_input_nodes)
        digest.update(f"{node.name}\0{node.op}\0{name}\0{reads}\0".encode())
    return digest.hexdigest()


class _Hasher:
    """Hashes the nodes of a program in graph order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.index, self.modes, self.effects = program.index, program.modes, program.effects
        self.hashes: list[str] = []
        self.bodies: dict[GraphModule, str] = {}
        self.read = frozenset(self.modes.read)
        self.behind: dict[int, list[int]] = {}
        for before, after in zip(self.effects.before, self.effects.after, strict=True):
            self.behind.setdefault(after, []).append(before)

    def fingerprint(self) -> str:
        pure, effectful, inputs = set(), [], []
        for number, node in enumerate(self.index.nodes):
            self.hashes.append(self._hash(number, node))
            if number in self.modes.toggles:
                continue
            if node.op == "placeholder":
                inputs.append(self.hashes[-1])
            elif number in self.effects.effectful:
                effectful.append(self.hashes[-1])
            elif node.op != "get_attr" and node.target not in (SYM_SIZE, operator.getitem, torch.Size):
                pure.add(self.hashes[-1])
        return _digest(inputs, sorted(effectful), sorted(pure), repr(self.modes.final))

    def _hash(self, number: int, node: Node) -> str:
        if number in self.modes.toggles:
            return ""
        same = self._rebuilt_container(node)
        if same is not None:
            return self.hashes[same]
        item = takes_item(node, self.program.graph_module)
        behind = sorted({self.hashes[at] for at in self.behind.get(number, ()) if not self._may_be_read_elsewhere(at)})
        modeless = item or number in self.program.symbolic_scalars or node.op in ("placeholder", "get_attr", "output")
        mode = "" if modeless else repr(self.modes.at(number))
        is_operator = isinstance(node.target, OPERATORS) or is_higher_order(node.target)
        arguments = [self._argument(given, is_operator=is_operator) for given in (node.args, node.kwargs)]
        return _digest(node.op, self._target(node), arguments, behind, mode)

    def _may_be_read_elsewhere(self, number: int) -> bool:
        """Whether a node only takes an item or a size, which a cut may place on either side of a region boundary."""
        node = self.index.nodes[number]
        return node.target in (SYM_SIZE, torch.Size) or takes_item(node, self.program.graph_module)

    def _target(self, node: Node) -> str:
        if node.op in ("call_module", "get_attr"):
            value: Any = self.program.graph_module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if isinstance(value, GraphModule):
                if value not in self.bodies:
                    self.bodies[value] = fingerprint(Program.of(value, pure=self.program.pure))
                return self.bodies[value]
            kind = type(value).__qualname__ if isinstance(value, nn.Module) else "state"
            return f"{self.program.state_keys.original(str(node.target))} {kind}"
        return node.target if isinstance(node.target, str) else _named(node.target)

    def _argument(self, argument: Any, *, is_operator: bool) -> Any:
        if isinstance(argument, Node):
            if argument in self.read:
                return repr(None)
            if container_items(argument) == ():
                return [type(value_of(argument)).__name__]  # A cut rebuilds it wherever it is read.
            return f"%{self.hashes[self.index.number[argument]]}"
        if isinstance(argument, tuple | list):
            whole = self._whole_container(argument)
            if whole is not None:
                return f"%{self.hashes[whole]}"
            kind = "list" if is_operator else type(argument).__name__.removeprefix("immutable_")
            return [kind, *(self._argument(item, is_operator=is_operator) for item in argument)]
        if isinstance(argument, dict):
            return {str(key): self._argument(value, is_operator=is_operator) for key, value in argument.items()}
        if isinstance(argument, slice):
            ends = (argument.start, argument.stop, argument.step)
            return ["slice", *(self._argument(end, is_operator=is_operator) for end in ends)]
        if isinstance(argument, torch.Tensor):
            return ["tensor", str(argument.dtype), list(argument.shape), argument.tolist()]
        return repr(argument) if isinstance(argument, _PRINTED) else _named(argument)

    def _rebuilt_container(self, node: Node) -> int | None:
        if node.target is torch.Size and node.args and isinstance(node.args[0], tuple | list):
            return self._whole_container(node.args[0])
        return None

    def _whole_container(self, items: tuple[Any, ...] | list[Any]) -> int | None:
        """The node whose container `items` rebuilds item by item; None if there is none."""
        sources = {
            item.args[0] for item in items if isinstance(item, Node) and item.target is operator.getitem and item.args
        }
        if len(sources) != 1:
            return None
        source = next(iter(sources))
        traced = container_items(source) if isinstance(source, Node) else None
        if not isinstance(source, Node) or traced is None or len(traced) != len(items):
            return None
        for place, (item, value) in enumerate(zip(items, traced, strict=True)):
            if isinstance(item, Node):
                if item.target is not operator.getitem or item.args != (source, place):
                    return None
            elif type(value) is not int or item != value:
                return None
        return self.index.number[source]


_PRINTED = (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.device, torch.layout, type(...))


def _named(value: Any) -> str:
    """A name for a function, operator or other object that is the same in every process."""
    qualified = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if qualified is None or isinstance(value, OPERATORS):
        return f"{type(value).__name__} {value}"
    return f"{getattr(value, '__module__', '')}.{qualified}"


def _digest(*parts: Any) -> str:
    return blake2b(repr(parts).encode(), digest_size=12).hexdigest()
