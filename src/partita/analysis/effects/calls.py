"""Effects of every call in a graph, bodies of higher-order operators included, and the storages that values share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from partita._torch.nn_modules import StandsForBody, has_only_export_hooks, runs_its_graph
from partita._torch.operator_schemas import (
    flattens_inputs,
    has_keywords,
    has_registered_effect,
    is_higher_order,
    nodes_by_target,
    registers_hook,
    signatures_of,
    storage_key,
)
from partita._torch.pytrees import leaves_of
from partita._torch.toggles import TOGGLES
from partita.analysis.effects.functions import rule_of_function, rule_of_method, rule_of_operator
from partita.analysis.effects.modules import effects_of_module, is_check
from partita.analysis.effects.terms import (
    ALIASES,
    ALIASING,
    EVERY,
    FIRST,
    PURE,
    UNKNOWN,
    Effects,
    Rule,
    Slot,
    merged,
    nodes_in_slots,
)
from partita.analysis.index import Index
from partita.analysis.modes import AMBIENT, modes_of
from partita.analysis.nodes import find, modules_in, tensors_in, value_of
from partita.errors import MissingTargetError


@final
class CallEffects:
    """The effects of every node of one graph module, and which values share memory: each is computed once, on demand.

    Functions in `pure` are trusted to have no effects. `known_modules` caches the effects of calls of modules and
    bodies; new entries are added.
    """

    def __init__(
        self,
        root: GraphModule,
        pure: frozenset[Callable[..., Any]] = frozenset(),
        *,
        index: Index | None = None,
        known_modules: dict[nn.Module, Effects] | None = None,
    ) -> None:
        self.root = root
        self.pure = pure
        if index is not None:
            self.index = index
        self._known_modules = {} if known_modules is None else known_modules
        self._rules: dict[Any, Rule] = {}

    @cached_property
    def index(self) -> Index:
        return Index(self.root.graph)

    def of(self, node: Node) -> Effects:
        """The effects of `node`; mode toggles have none here, since the mode is a property of each node."""
        if node.op == "call_function":
            return PURE if node.target in TOGGLES else self._of_function(node)
        if node.op == "call_method":
            return rule_of_method(str(node.target)).of(node)
        if node.op == "call_module":
            return self.of_module(self.called_module(node))
        return PURE

    @cached_property
    def effectful(self) -> dict[Node, Effects]:
        """The nodes with effects; targets that cannot have any are skipped without visiting their nodes."""
        return {node: effects for node, effects in self._candidates(_may_have_effects) if effects.is_effectful}

    def aliasing(self) -> dict[Node, Effects]:
        """The nodes whose result may alias an argument or state."""
        candidates = self._candidates(_may_alias)
        return {node: effects for node, effects in candidates if effects.aliases or effects.shares_state}

    @property
    def mutates(self) -> bool:
        """Whether any node mutates; where none does, the storage classes need not be computed."""
        return any(effects.may_mutate for effects in self.effectful.values())

    @cached_property
    def storages(self) -> Storages:
        """The storage classes of the graph: from schemas, from the tensors of the module, and from traced values.

        A traced value may only join classes, since some tracers give each value a storage of its own.
        """
        storages = Storages(len(self.index), is_open=any(effects.unknown for effects in self.effectful.values()))
        _join_results(storages, self)
        _join_attributes(storages, self)
        _join_traced_values(storages, self)
        return storages

    @cached_property
    def mutated(self) -> dict[int, frozenset[int]]:
        """The storage classes that each mutating node may mutate, by its number, in order."""
        if not self.mutates:
            return {}
        storages, number = self.storages, self.index.number
        mutated: dict[int, frozenset[int]] = {}
        for node, effects in self.effectful.items():
            if effects.may_mutate:
                operands = [number[operand] for operand in nodes_in_slots(node, effects.mutates)]
                state = [storages.number_of(tensor) for tensor in effects.mutated_state]
                world = [storages.world] if effects.unknown else []
                mutated[number[node]] = frozenset(map(storages.find, (*operands, *state, *world)))
        return dict(sorted(mutated.items()))

    def of_module(self, module: nn.Module) -> Effects:
        """The effects of a call of `module`, with slots by the position and name of its own inputs."""
        known, waiting = self._known_modules, [(module, False)]
        while waiting:  # Inner bodies first, by a stack of our own: they may be nested deeper than Python can recurse.
            body, is_entered = waiting.pop()
            if is_entered:
                known[body] = self._inspected(body)
            elif body not in known:
                known[body] = UNKNOWN  # A body that contains itself finds this entry.
                waiting.append((body, True))
                waiting += [(inner, False) for inner in self._bodies_inside(body)]
        return known[module]

    def called_module(self, node: Node) -> nn.Module:
        """The module that a call_module node calls."""
        module = find(self.root, str(node.target))
        if isinstance(module, nn.Module):
            return module
        raise MissingTargetError(
            f"Node target {node.target} not found! Node {node.name!r} calls it, but {type(self.root).__name__} has no "
            "such module; add it with `add_submodule`, or erase the node"
        )

    def bodies(self, node: Node) -> Iterator[nn.Module]:
        """The modules that a call of `node` runs: its target, or the bodies among its arguments."""
        if node.op == "call_module":
            yield self.called_module(node)
        elif node.op == "call_function" and is_higher_order(node.target):
            for read in node.all_input_nodes:
                body = find(self.root, str(read.target)) if read.op == "get_attr" else None
                if isinstance(body, nn.Module):
                    yield body

    def _inspected(self, module: nn.Module) -> Effects:
        if isinstance(module, StandsForBody):
            return self.of_module(module.body)
        if not isinstance(module, GraphModule) or module in self.pure:
            return effects_of_module(module, self.pure)
        return _effects_of_body(CallEffects(module, self.pure, known_modules=self._known_modules))

    def _bodies_inside(self, module: nn.Module) -> list[nn.Module]:
        if isinstance(module, StandsForBody):
            return [module.body]
        if not isinstance(module, GraphModule) or module in self.pure:
            return []
        calls = CallEffects(module, self.pure, known_modules=self._known_modules)
        by_target = nodes_by_target(module.graph).items()
        running = (nodes for (op, target), nodes in by_target if op == "call_module" or self._runs_bodies(target))
        return [body for nodes in running for node in nodes for body in calls.bodies(node)]

    def _of_function(self, node: Node) -> Effects:
        if registers_hook(node.target):
            return _HOOKED
        if self._runs_bodies(node.target):
            bodies = list(self.bodies(node))
            effects = _effects_of_higher_order(node, {body: self.of_module(body) for body in bodies})
            return replace(effects, impure=True) if has_registered_effect(node.target) and not bodies else effects
        return self._rule(node.target).of(node)

    def _rule(self, target: Any) -> Rule:
        rule = self._rules.get(target)
        if rule is None:
            rule = ALIASES if target in self.pure else rule_of_function(target)
            if _is_registered_impure(target, rule) and target not in self.pure:
                rule = _also_impure(rule)
            self._rules[target] = rule
        return rule

    def _candidates(self, may_matter: Callable[[Rule, Iterable[Node]], bool]) -> Iterator[tuple[Node, Effects]]:
        """The effects of every node whose target `may_matter`."""
        for (op, target), nodes in nodes_by_target(self.root.graph).items():
            if op == "call_method":
                names = {name for name in set(map(_target, nodes)) if may_matter(rule_of_method(name), ())}
                yield from ((node, self.of(node)) for node in nodes if node.target in names)
            elif op == "call_module" or (op == "call_function" and self._runs_bodies(target)):
                yield from ((node, self.of(node)) for node in nodes)
            elif op == "call_function" and target not in TOGGLES:
                rule = self._rule(target)
                if may_matter(rule, nodes):
                    yield from zip(nodes, map(rule.of, nodes), strict=True)

    def _runs_bodies(self, target: Any) -> bool:
        return is_higher_order(target) and target not in self.pure


def _is_registered_impure(target: Any, rule: Rule) -> bool:
    return has_registered_effect(target) and not rule.usual.impure and target is not operator.setitem


def _also_impure(rule: Rule) -> Rule:
    return Rule(replace(rule.usual, impure=True), lambda node: replace(rule.of(node), impure=True))


def _may_have_effects(rule: Rule, nodes: Iterable[Node]) -> bool:
    return not rule.is_quiet and (
        rule.usual.is_effectful or rule.by_call is not None or bool(rule.out and has_keywords(nodes))
    )


def _may_alias(rule: Rule, nodes: Iterable[Node]) -> bool:
    return (
        bool(rule.usual.aliases or rule.usual.shares_state)
        or rule.by_call is not None
        or bool(rule.out and has_keywords(nodes))
    )


#: A hook is ordered with mutations of its tensor and with other hooks on it. Its body runs later.
_HOOKED = Effects(mutates=(FIRST,), aliases=(FIRST,))

_target = operator.attrgetter("target")


# Storage classes: which values of a graph may share a storage, conservatively.


@final
class Storages:
    """Nodes by number, and tensors of the module by storage, joined into classes that may share memory (union-find).

    Number `world` represents all memory that an unknown function may reach. Tensors get numbers above it as they turn
    up; where the graph calls an unknown function, they are all joined with the world.
    """

    def __init__(self, count: int, *, is_open: bool) -> None:
        self.world = count
        self.is_open = is_open
        self._parent = list(range(count + 1))
        self._number_by_key: dict[int, int] = {}
        self._tensors: dict[int, Tensor] = {}

    def find(self, i: int) -> int:
        """The representative of the class of `i`."""
        parent = self._parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        """From now on `i` and `j` may share memory; the smaller number represents both."""
        i, j = self.find(i), self.find(j)
        if i != j:
            self._parent[max(i, j)] = min(i, j)

    def joined(self, numbers: Sequence[int]) -> Storages:
        """A copy in which all of these may share memory."""
        copied = Storages(self.world, is_open=self.is_open)
        copied._parent = self._parent.copy()
        copied._number_by_key, copied._tensors = self._number_by_key.copy(), self._tensors.copy()
        for number in numbers:
            copied.join(numbers[0], number)
        return copied

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor of the module."""
        key = storage_key(tensor)
        number = self._number_by_key.get(key)
        if number is None:
            number = self._number_by_key[key] = len(self._parent)
            self._parent.append(number)
            self._tensors[number] = tensor
            if self.is_open:
                self.join(number, self.world)
        return number

    def known_number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor of the module, or None if its storage has no number yet."""
        return self._number_by_key.get(storage_key(tensor))

    def tensors_in(self, classes: Container[int]) -> Iterator[Tensor]:
        """The tensors of the module that are in one of `classes`."""
        return (tensor for number, tensor in self._tensors.items() if self.find(number) in classes)

    def roots(self) -> list[int]:
        """The representative of the class of each node."""
        find, parent = self.find, self._parent
        return [i if parent[i] == i else find(i) for i in range(self.world)]


def _join_results(storages: Storages, calls: CallEffects) -> None:
    number, join = calls.index.number, storages.join
    for node, effects in calls.aliasing().items():
        i = number[node]
        for operand in nodes_in_slots(node, effects.aliases):
            join(i, number[operand])
        if effects.unknown:
            join(i, storages.world)
        elif effects.shares_state:
            for body in calls.bodies(node):
                for tensor in tensors_of(body):
                    join(i, storages.number_of(tensor))


def _join_attributes(storages: Storages, calls: CallEffects) -> None:
    for i, node in enumerate(calls.index.nodes):
        if node.op == "get_attr":
            value = find(calls.root, str(node.target))
            if isinstance(value, Tensor):
                storages.join(i, storages.number_of(value))


def _join_traced_values(storages: Storages, calls: CallEffects) -> None:
    copied, first = _traced_as_their_copies(calls.root), dict[int, int]()
    for i, node in enumerate(calls.index.nodes):
        if node.meta and node not in copied:
            for tensor in tensors_in(value_of(node)):
                storages.join(i, first.setdefault(storage_key(tensor), i))


def _traced_as_their_copies(root: GraphModule) -> set[Node]:
    """The literals of a model whose traced value is that of their copy, as torch.export (2.13) gives integer ones."""
    copies = root.graph.find_nodes(op="call_function", target=torch.ops.aten.lift_fresh_copy.default)
    pairs = ((node.args[0], value_of(node)) for node in copies)
    return {
        source
        for source, value in pairs
        if isinstance(source, Node) and isinstance(value, Tensor) and isinstance(value_of(source), Tensor)
        if storage_key(value_of(source)) == storage_key(value)
    }


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """The parameters, buffers and other tensors that `module` and its children hold."""
    parts = list(modules_in(module))
    for tables in ([part._parameters for part in parts], [part._buffers for part in parts], map(vars, parts)):
        yield from (value for table in tables for value in table.values() if isinstance(value, Tensor))


# Calls that run bodies: of graph modules and of higher-order operators.


def _effects_of_body(calls: CallEffects) -> Effects:
    """The effects of a call of the body with these calls, its slots by the place of each placeholder.

    The module of an exported program checks its inputs. Like any operator it may raise on bad arguments, which does not
    count as an effect.
    """
    body, is_exported = calls.root, has_only_export_hooks(calls.root)
    if not is_exported and not runs_its_graph(body):
        return UNKNOWN
    index, storages = calls.index, calls.storages
    mutated = frozenset[int]().union(*calls.mutated.values())
    returned = {storages.find(i) for i in index.inputs(len(index) - 1)}
    effectful = calls.effectful.items()
    inside = merged(effects for node, effects in effectful if not (is_exported and _checks_inputs(node, body)))
    return replace(
        inside,
        mutates=_slots_of_inputs(index, {i for i, _ in _placeholders(index) if storages.find(i) in mutated}),
        aliases=_slots_of_inputs(index, {i for i, _ in _placeholders(index) if storages.find(i) in returned}),
        mutated_state=tuple(
            {id(tensor): tensor for tensor in (*storages.tensors_in(mutated), *inside.mutated_state)}.values()
        ),
        shares_state=inside.unknown or any(True for _ in storages.tensors_in(returned)),
        waits=False,
        # A body that leaves a mode switched changes how every later call runs.
        fences=inside.fences or modes_of(index).final != AMBIENT,
    )


def _effects_of_higher_order(node: Node, bodies: Mapping[nn.Module, Effects]) -> Effects:
    """The effects of an operator that runs these bodies, its slots by the place of each argument."""
    if getattr(node.target, "__name__", "") == _DELEGATE:
        return Effects(impure=True)
    if not bodies:
        return _of_bare_operator(node)
    return merged(_as_seen_by_operator(node, body, effects) for body, effects in bodies.items())


def _checks_inputs(node: Node, body: GraphModule) -> bool:
    called = find(body, str(node.target)) if node.op == "call_module" else None
    return isinstance(called, nn.Module) and is_check(called)


def _placeholders(index: Index) -> Iterator[tuple[int, Node]]:
    return ((i, node) for i, node in enumerate(index.nodes) if node.op == "placeholder")


def _slots_of_inputs(index: Index, wanted: set[int]) -> tuple[Slot, ...]:
    """The slots of the placeholders in `wanted`; all at once where arguments and placeholders do not match."""
    if not wanted:
        return ()
    if flattens_inputs(index.graph) or any(str(node.target).startswith("*") for _, node in _placeholders(index)):
        return (EVERY,)
    return tuple((k, str(node.target)) for k, (i, node) in enumerate(_placeholders(index)) if i in wanted)


def _as_seen_by_operator(node: Node, body: nn.Module, effects: Effects) -> Effects:
    """The effects of a body, with its inputs mapped to the operands of the operator."""
    if effects.unknown or not isinstance(body, GraphModule):
        return UNKNOWN
    places = _operand_places(node, sum(n.op == "placeholder" for n in body.graph.nodes))

    def seen(slots: Iterable[Slot]) -> tuple[Slot, ...]:
        if places is None or EVERY in slots:
            return (EVERY,) if slots else ()
        return tuple(dict.fromkeys((places[position], "") for position, _ in slots))

    return replace(effects, mutates=seen(effects.mutates), aliases=seen(effects.aliases))


def _operand_places(node: Node, count: int) -> list[int] | None:
    """The argument that holds each of `count` inputs of the body; None where that cannot be determined."""
    leaves = [(i, leaf) for i, argument in enumerate(node.args) for leaf in leaves_of(argument)]
    last_body = max((i for i, leaf in leaves if isinstance(leaf, Node) and _reads_body(leaf)), default=-1)
    # `invoke_subgraph` names its body in a string between body and operands.
    places = [i for i, leaf in leaves if i > last_body and not isinstance(leaf, str)]
    return places if len(places) == count else None


def _reads_body(node: Node) -> bool:
    """Whether a node reads a body, and no tensor, from the module that owns the graph."""
    root = node.graph.owning_module
    value = find(root, str(node.target)) if node.op == "get_attr" and root is not None else None
    return isinstance(value, nn.Module)


def _of_bare_operator(node: Node) -> Effects:
    """The effects of a higher-order operator that runs another operator, or nothing."""
    name = getattr(node.target, "__name__", "")
    if name in _KNOWN:
        return _KNOWN[name]
    if name not in _RUNS_OPERATOR | _FUNCTIONAL:
        return UNKNOWN
    inner = [a for a in node.args if callable(a) and not isinstance(a, Node)]
    if len(inner) != 1 or is_higher_order(inner[0]):
        return PURE if name in _FUNCTIONAL else UNKNOWN
    effects = rule_of_operator(signatures_of(inner[0])).usual
    if name in _FUNCTIONAL:  # It mutates copies and returns them.
        return replace(effects, mutates=(), aliases=(), mutated_state=())
    ordered = Effects(uses_rng="rng" in name, impure=name == "with_effects")
    return merged((replace(effects, mutates=(EVERY,) if effects.mutates else (), aliases=(EVERY,)), ordered))


#: ExecuTorch's operator, which runs what a delegate compiled from a functional graph: it returns new tensors and
#: mutates none of its arguments. It may own buffers, so calls keep their order.
_DELEGATE = "executorch_call_delegate"
_FUNCTIONAL = frozenset(
    ("auto_functionalized", "auto_functionalized_v2", "out_dtype", "triton_kernel_wrapper_functional")
)
_RUNS_OPERATOR = frozenset(
    ("graphsafe_run_with_rng_state", "run_and_save_rng_state", "run_with_rng_state", "with_effects")
)
_KNOWN = {
    "print": Effects(impure=True),
    "_export_tracepoint": replace(ALIASING, impure=True),
    "triton_kernel_wrapper_mutation": Effects(mutates=(EVERY,)),
}
