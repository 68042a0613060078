"""Replaces no_grad and inference mode by `detach`, at the inputs of nodes that run without gradients."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from partita._torch.dry_runs import Allowance, is_of_level
from partita._torch.fx.graph_writer import GraphWriter
from partita._torch.operator_schemas import is_higher_order
from partita._torch.pytrees import map_tensors, tensors_in
from partita._torch.toggles import IS_GRAD_ENABLED
from partita.analysis.effects.terms import nodes_in_slots
from partita.analysis.modes import Mode
from partita.analysis.nodes import find, value_of
from partita.analysis.projections import takes_item
from partita.dissolve._torch.sandbox import FakeSandbox, LimitedCalls, TensorMetadata
from partita.dissolve.traced_values import (
    call_with,
    can_carry_gradients,
    has_value,
    nodes_read,
    sandbox_for,
    value_read,
    write_beside,
)
from partita.errors import ModeError, OptionError
from partita.program.program import Program
from partita.rewrite.operator_calls import owned_inputs
from partita.rewrite.state import module_like, share_state

_DETACH = torch.ops.aten.detach.default


def dissolve_grad(program: Program) -> Program:
    """A flat program without grad and inference toggles; the same object if no node of it runs under one.

    `program` must be free of autocast.
    """
    if program.modes.by_number is None and records_gradients(program.caller):
        return program
    sandbox = sandbox_for(program)
    with sandbox.opened():
        return _Detacher(program, sandbox).dissolved()


class _Detacher:
    """The new graph while it is written."""

    def __init__(self, program: Program, sandbox: FakeSandbox) -> None:
        self.program, self.sandbox = program, sandbox
        self.returned = ReturnedArguments(program, sandbox)
        self.carriers = _Carriers(program, self.returned).found()
        self.writer = GraphWriter.like(program.graph)
        self.env: dict[Node, Any] = dict.fromkeys(program.modes.read)
        self.detached: dict[Node, Any] = {}
        #: By node that returns a container: the items that are its own arguments.
        self.items: dict[Node, dict[int | None, Node]] = {}

    def dissolved(self) -> Program:
        program, modes = self.program, self.program.modes
        self.writer.names.reserve(node.name for node in program.index.nodes)
        projections = frozenset(program.projections)
        for number, node in enumerate(program.index.nodes):
            if number in modes.toggles:
                continue
            mode = modes.at(number).within(program.caller)
            if number in projections:
                self._take_item(node)
            elif node.target is IS_GRAD_ENABLED and (mode.grad is not None or mode.inference):
                self.env[node] = records_gradients(mode)
            elif node.op in ("placeholder", "get_attr", "output") or records_gradients(mode):
                self._copy(node)
                for mutated in self.returned.mutated_by(node):
                    self.detached.pop(mutated, None)
            else:
                self._write_without_gradients(node)
        module = module_like(program.graph_module, self.writer.close())
        share_state(program.graph_module, module, without=frozenset())
        return program.rewritten(module)

    def _write_without_gradients(self, node: Node) -> None:
        if node.op == "call_module":
            raise OptionError(
                f"node {node.name!r} calls the module {node.target!r} where no gradients are recorded, and its "
                "parameters are out of reach there; trace the model into operators, for example with "
                "partita.capture(model, args)"
            )
        mutated = self.returned.mutated_by(node) & self.carriers
        if detaches(node) or not (mutated or self._may_return_gradients(node)):
            self._copy(node)
            return
        if mutated:
            self.returned.check_mutation(node)
        same = {item: source for item, source in self.returned.of(node).items() if source in self.carriers}
        # A node mutates through a detached alias; an argument that it only returns keeps its autograd history.
        kept = set(same.values()) - mutated
        detached = {read for read in node.all_input_nodes if read in self.carriers and read not in kept}
        self._copy(node, without_gradients=detached)
        self.items[node] = {item: source for item, source in same.items() if source in mutated}
        if None in self.items[node]:
            self.env[node] = self.env[same[None]]

    def _may_return_gradients(self, node: Node) -> bool:
        """Whether a result of `node` could carry gradients."""
        return not has_value(node) or any(map(can_carry_gradients, tensors_in(value_of(node))))

    def _take_item(self, node: Node) -> None:
        container, place = node.args
        source = self.items.get(container, {}).get(place)  # type: ignore[arg-type]
        if source is not None:
            self.env[node] = self.env[source]
        else:
            self._copy(node)

    def _copy(self, node: Node, *, without_gradients: Collection[Node] = ()) -> None:
        for read in node.all_input_nodes:
            if read in without_gradients and read not in self.detached:
                self.detached[read] = self._detach(read, node)
        inputs = {
            read: self.detached[read] if read in without_gradients else self.env[read] for read in node.all_input_nodes
        }
        self.env[node] = self.writer.copy(node, inputs.__getitem__, name=node.name)

    def _detach(self, source: Node, reader: Node) -> Any:
        """An alias of `source` without gradients, in the same storage."""
        value = value_read(self.program, source)
        if isinstance(value, tuple | list):
            items = range(len(value))
            taken = [self._item(self.env[source], place, value[place], reader) for place in items]
            return [self._detach_node(node, reader, value[place]) for place, node in zip(items, taken, strict=True)]
        return self._detach_node(self.env[source], reader, value)

    def _item(self, container: Any, place: int, value: Any, reader: Node) -> Any:
        if not isinstance(container, Node):
            return container[place]
        return write_beside(self.writer, reader, operator.getitem, (container, place), value=value)

    def _detach_node(self, node: Any, reader: Node, value: Any) -> Any:
        if not isinstance(value, Tensor) or not can_carry_gradients(value):
            return node
        return write_beside(self.writer, reader, _DETACH, (node,), value=map_tensors(self.sandbox.alias, value))


def records_gradients(mode: Mode) -> bool:
    """Whether operators in this mode record gradients; with an unknown caller they do."""
    return mode.grad is not False and not mode.inference


def detaches(node: Node) -> bool:
    """Whether `node` is a detach."""
    return node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach, torch.detach, "detach")


class _Carriers:
    """Finds the nodes whose results gradients may flow back through.

    Buffers carry none, unless they are mutated with a value that does where gradients are recorded.
    """

    def __init__(self, program: Program, returned: ReturnedArguments) -> None:
        self.program, self.returned = program, returned
        calls = program.calls
        self.classes, self.mutated = calls.storages.roots(), calls.mutated
        self.unknown = {node for node, effects in calls.effectful.items() if effects.unknown}
        self.owned = owned_inputs(program)
        self.tainted: set[int] = set()

    def found(self) -> frozenset[Node]:
        """Repeats until no further storage carries gradients: two passes in all but contrived graphs."""
        while True:
            before = len(self.tainted)
            carriers = self._walked()
            if len(self.tainted) == before:
                return frozenset(carriers)

    def _walked(self) -> set[Node]:
        carriers: set[Node] = set()
        modes, caller = self.program.modes, self.program.caller
        for number, node in enumerate(self.program.index.nodes):
            records = records_gradients(modes.at(number).within(caller))
            reads_some = any(read in carriers for read in node.all_input_nodes)
            if records and reads_some:
                self.tainted |= self.mutated.get(number, frozenset())
            if self._may_hold(node) and (
                self.classes[number] in self.tainted or self._carries(node, records=records, carriers=carriers)
            ):
                carriers.add(node)
        return carriers

    def _carries(self, node: Node, *, records: bool, carriers: Collection[Node]) -> bool:
        if node.op == "placeholder":
            return records_gradients(self.program.caller) and _may_require_gradients(self.owned.get(node))
        if node.op == "get_attr":
            return _may_require_gradients(find(self.program.graph_module, str(node.target)))
        if not records:
            return any(source in carriers for source in self.returned.of(node).values())
        makes_some = node.op == "call_module" or node in self.unknown or _requests_gradients(node)
        return makes_some or (not detaches(node) and any(read in carriers for read in node.all_input_nodes))

    def _may_hold(self, node: Node) -> bool:
        """Whether the result of `node` may have a dtype with gradients; True if it is unknown."""
        value: Any = value_of(node)
        if node.op == "get_attr":
            value = find(self.program.graph_module, str(node.target))
        elif node.op == "output":
            return False
        elif not has_value(node):
            return True
        return any(map(can_carry_gradients, tensors_in(value)))


def _may_require_gradients(owned: Any) -> bool:
    """Whether a tensor of the module may require gradients, now or when it is no longer frozen; inputs may."""
    if isinstance(owned, Tensor) and not isinstance(owned, nn.Parameter):
        return owned.requires_grad
    return not isinstance(owned, nn.Module)


def _requests_gradients(node: Node) -> bool:
    return node.kwargs.get("requires_grad") is True or "requires_grad_" in str(node.target)


class ReturnedArguments:
    """Finds nodes that return an argument by identity, neither a copy nor a view of it.

    Nodes that may do so are run on fake tensors; `sandbox` must be open.
    """

    def __init__(self, program: Program, sandbox: FakeSandbox) -> None:
        self._program, self._sandbox = program, sandbox
        self._known: dict[Node, dict[int | None, Node]] = {}
        self._aliasing = program.calls.aliasing()
        self._allowance = Allowance(_CALLS + _CALLS_BY_NODE * len(program.index.nodes))

    def of(self, node: Node) -> dict[int | None, Node]:
        """The inputs that `node` returns, by item where the result is a container, else under None."""
        if node not in self._known:
            self._known[node] = self._found(node)
        return self._known[node]

    def mutated_by(self, node: Node) -> frozenset[Node]:
        """The inputs that `node` may mutate."""
        effects = self._program.calls.of(node)
        return frozenset(nodes_in_slots(node, effects.mutates)) if effects.mutates else frozenset()

    def check_mutation(self, node: Node) -> None:
        """Raises where `node` changes the shape of a tensor, which an alias of the tensor would not reflect."""
        read = nodes_read(node)
        fakes = [self._sandbox.copy(value_read(self._program, source)) for source in read]
        before = [TensorMetadata.of(tensor) for tensor in tensors_in(fakes)]
        with torch.no_grad():
            self._attempt(node, fakes)
        if before != [TensorMetadata.of(tensor) for tensor in tensors_in(fakes)]:
            names = ", ".join(sorted(repr(source.name) for source in self.mutated_by(node)))
            raise ModeError(
                f"node {node.name!r} changes the shape or the storage of {names} in place where no gradients are "
                "recorded, which no plain operator can do to a tensor that has gradients; use the out-of-place form"
            )

    def _found(self, node: Node) -> dict[int | None, Node]:
        if takes_item(node, self._program.graph_module):
            container, item = node.args
            source = self.of(container).get(item)  # type: ignore[arg-type]
            return {} if source is None else {None: source}
        if node not in self._aliasing or (
            node.op == "call_function" and (is_higher_order(node.target) or is_of_level(node.target))
        ):
            return {}
        read = nodes_read(node)
        values = [value_read(self._program, source) for source in read]
        looks = [_look(tensor) for tensor in tensors_in(values)]
        if has_value(node) and not any(_look(tensor) in looks for tensor in tensors_in(value_of(node))):
            return {}
        return self._found_by_dry_run(node, read, values)

    def _found_by_dry_run(self, node: Node, read: list[Node], values: list[Any]) -> dict[int | None, Node]:
        fakes = [self._sandbox.copy(value) for value in values]
        with torch.no_grad():
            result = self._attempt(node, fakes)
        sources = {id(fake): source for source, fake in zip(read, fakes, strict=True) if isinstance(fake, Tensor)}
        if isinstance(result, Tensor):
            return {None: sources[id(result)]} if id(result) in sources else {}
        items = enumerate(result) if isinstance(result, tuple | list) else ()
        return {place: sources[id(item)] for place, item in items if id(item) in sources}

    def _attempt(self, node: Node, fakes: list[Any]) -> Any:
        """The result of `node` on fakes; None where it depends on data."""
        try:
            with LimitedCalls(self._allowance):
                return call_with(node, fakes)()
        except Exception:
            return None


#: How many operators all dry runs may execute, and how many more for each node.
_CALLS, _CALLS_BY_NODE = 100_000, 100


def _look(tensor: Tensor) -> tuple[object, ...]:
    """Sizes and dtype; sizes as text, since comparing data-dependent sizes is an error."""
    return (*map(str, tensor.shape), tensor.dtype)
