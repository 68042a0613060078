"""The graph of a plan as columns of plain values: nodes, edges, modules, modes and reasons; texts are interned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from torch.fx import Node

from partita.analysis.effects.terms import Effects
from partita.analysis.nodes import TracedBytes, find, is_module_state, traced_bytes, value_of, value_text
from partita.plans import Plan
from partita.plans.report import called_name
from partita.policies.by_module import ModuleCall, calls_around, calls_in
from partita.program.flops import Flops
from partita.program.program import Program, counted_operators
from partita.regions import Partition
from partita.regions.region import Reason

OPS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")

#: What a node does besides computing its value, or what it is: bits of the column `flags`.
FLAGS = {
    "mutates": 1,
    "random numbers": 2,
    "side effect": 4,
    "communicates": 8,
    "unknown effects": 16,
    "fence": 32,
    "mode toggle": 64,
    "state": 128,
    "forward": 256,
    "backward": 512,
    "saved for backward": 1024,
    "with its container": 2048,
    "with its reader": 4096,
    "tangent": 8192,
    "operator": 16384,
    "dynamic sizes": 32768,
}

#: A region that a node is in, if not a number from 0 on.
OUTSIDE, NOWHERE = -1, -2


@final
class Texts:
    """Each text once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a text, which is added if it is new."""
        return self._numbers.setdefault(text, len(self._numbers))

    def list(self) -> list[str]:
        """All texts by number."""
        return list(self._numbers)


def graph_data(plan: Plan, texts: Texts) -> dict[str, Any]:
    """Columns of all nodes in graph order, the edges, and the tables that the columns refer to."""
    partition, program = plan.partition, plan.program
    index, modules = program.index, _Modules(program, texts)
    modes: dict[str, int] = {str(mode): at for at, mode in enumerate((program.modes.at(0),))} if len(index) else {}
    reasons = _Reasons(partition)
    counter, described = Flops(), _Values(program, texts)
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("name", "op", "target", "module", "value", "bytes", "flops", "mode", "region", "reason", "flags")
    }
    states = _state_names(program)
    flags = _flags(plan, states)
    for number, node in enumerate(index.nodes):
        value, (size, is_dynamic) = described.of(node)
        mode = str(program.modes.at(number))
        row = (
            node.name,
            OPS.index(node.op),
            texts.number(states.get(node.name) or _target(node)),
            modules.of(node),
            value,
            size,
            counter.of(node),
            modes.setdefault(mode, len(modes)),
            max(partition.owner[number], NOWHERE),
            reasons.of(node),
            flags[number] | (FLAGS["dynamic sizes"] if is_dynamic else 0),
        )
        for column, entry in zip(columns.values(), row, strict=True):
            column.append(entry)
    return {
        "nodes": columns,
        "edges": {"from": list(index.sources), "to": list(index.targets)},
        "effect_edges": {"from": list(program.effects.before), "to": list(program.effects.after)},
        "order": call_order(partition),
        "copies": [[number, sorted(owners)] for number, owners in partition.copies.items()],
        "modules": modules.rows,
        "modes": list(modes),
        "reasons": reasons.rows,
        "ops": list(OPS),
        "flags": FLAGS,
    }


def call_order(partition: Partition) -> list[int]:
    """The nodes that run, in the order of a plan that is applied: regions are unbroken runs of it."""
    held: list[list[int]] = [[] for _ in partition.regions]
    for number, owner in enumerate(partition.owner):
        if owner >= 0:
            held[owner].append(number)
    found: list[int] = []
    for vertex in partition.order:
        found += held[vertex] if vertex < len(held) else [vertex - len(held)]
    return found


def class_name(kind: object) -> str:
    """The name of a class without its module; torch.export records the names of classes, other tracers the classes."""
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def _target(node: Node) -> str:
    return "" if node.op == "output" else called_name(node)


@final
class _Values:
    """The text and the bytes of traced values."""

    def __init__(self, program: Program, texts: Texts) -> None:
        self._program, self._texts = program, texts

    def of(self, node: Node) -> tuple[int, TracedBytes]:
        value = value_of(node)
        if value is None and node.op == "get_attr":
            value = find(self._program.graph_module, str(node.target))
        if value is None or node.op == "output":
            return -1, TracedBytes(None)
        return self._texts.number(value_text(value)), traced_bytes(value)


@final
class _Modules:
    """The modules that nodes were traced in: rows of path, class and the row of the module around."""

    def __init__(self, program: Program, texts: Texts) -> None:
        self._root, self._texts = program.graph_module, texts
        self._by_stack: dict[tuple[object, ...], int] = {}
        self._by_call: dict[tuple[int, str], int] = {}
        self.rows: list[tuple[int, int, int]] = []

    def of(self, node: Node) -> int:
        """The row of the innermost module of a node; -1 for the model itself."""
        if node.op in ("placeholder", "output"):
            return -1
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if not stack or not isinstance(stack, Mapping):
            return self._row(calls_around(node, self._root))
        # Nodes of one call of a module have stacks with the same keys, and most nodes follow one of the same call.
        key = tuple(stack)
        if key not in self._by_stack:
            self._by_stack[key] = self._row(calls_in(stack))
        return self._by_stack[key]

    def _row(self, calls: Iterable[ModuleCall]) -> int:
        row = -1
        for call in calls:
            around = row
            row = self._by_call.setdefault((around, call.key), len(self.rows))
            if row == len(self.rows):
                name = class_name(call.type)
                self.rows.append((self._texts.number(call.path), self._texts.number(name), around))
        return row


@final
class _Reasons:
    """Why nodes are in no region, each reason once."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._numbers: dict[str, int] = {}
        self.rows: list[dict[str, str]] = []

    def of(self, node: Node) -> int:
        text = self._partition.reasons.get(node)
        if text is None:
            return -1
        number = self._numbers.setdefault(text, len(self.rows))
        if number == len(self.rows):
            reason = Reason.of(text)
            self.rows.append({"text": str(reason), "kind": reason.kind, "by": reason.by, "why": reason.why})
        return number


def _state_names(program: Program) -> Mapping[str, str]:
    """The placeholders that stand for parameters, buffers and constants, with the names of these."""
    if program.export is not None:
        signature = program.export.signature
        named: dict[str, Any] = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
            **signature.inputs_to_lifted_custom_objs,
        }
        return {name: str(path) for name, path in named.items()}
    if program.joint is not None:
        return {node.name: name for node, name in zip(program.joint.inputs, program.joint.state, strict=False)}
    inputs = program.graph.find_nodes(op="placeholder")
    return {node.name: node.name for node in inputs if is_module_state(node)}


def _flags(plan: Plan, states: Mapping[str, str]) -> list[int]:
    program, number = plan.program, plan.program.index.number
    flags = [0] * len(program.index)
    for node, effects in program.calls.effectful.items():
        flags[number[node]] |= _effect_flags(effects)
    for at in program.modes.toggles:
        flags[at] |= FLAGS["mode toggle"]
    for at in program.once(counted_operators):
        flags[at] |= FLAGS["operator"]
    for node in program.index.nodes:
        if node.op == "get_attr" or node.name in states:
            flags[number[node]] |= FLAGS["state"]
    if program.joint is not None:
        saved = [node for storage in program.joint.saved if not storage.is_input for node in storage.nodes]
        halves = (("forward", program.joint.forward), ("backward", program.joint.backward))
        for name, nodes in (*halves, ("tangent", program.joint.tangents), ("saved for backward", saved)):
            for node in nodes:
                flags[number[node]] |= FLAGS[name]
    named = {number[node] for region in plan.partition for node in region.nodes}
    for at, owner in enumerate(plan.partition.owner):
        if owner >= 0 and at not in named:
            flags[at] |= FLAGS["with its reader" if at in program.symbolic_scalars else "with its container"]
    return flags


def _effect_flags(effects: Effects) -> int:
    found = {
        "mutates": effects.may_mutate,
        "random numbers": effects.uses_rng,
        "side effect": effects.impure,
        "communicates": effects.communicates,
        "unknown effects": effects.unknown,
        "fence": effects.fences,
    }
    return sum(FLAGS[name] for name, is_so in found.items() if is_so)
