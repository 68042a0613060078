"""Effects of every call in a graph, bodies included."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, final

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.nn_modules import StandsForBody, has_only_export_hooks
from partita._torch.operators.schemas import (
    flattens_inputs,
    has_keywords,
    has_registered_effect,
    is_higher_order,
    nodes_by_target,
    registers_hook,
    signatures_of,
    storage_key,
)
from partita._torch.toggles import TOGGLES
from partita.analysis.index import Index
from partita.analysis.modes import AMBIENT, modes_of
from partita.analysis.nodes import find, modules_in, runs_its_graph, tensors_in, value_of
from partita.analysis.op_effects.functions import rule_of_function, rule_of_method
from partita.analysis.op_effects.modules import behaviour_of_module, is_check
from partita.analysis.op_effects.operators import rule_of_operator
from partita.analysis.op_effects.terms import (
    ALIASES,
    ALIASING,
    EVERY,
    FIRST,
    PURE,
    UNKNOWN,
    OpEffects,
    Rule,
    Slot,
    merged,
    nodes_in_slots,
)
from partita.errors import MissingTargetError

__all__ = ["CallEffects", "OpEffects", "Storages", "behaviour_of", "storages_of", "tensors_of", "written_classes"]


# What each node may do: read, write, alias, draw, or act on the world in ways that nobody knows.


def behaviour_of(node: Node, root: GraphModule, pure: frozenset[Callable[..., Any]] = frozenset()) -> OpEffects:
    """What the single node `node` of `root` may do; functions in `pure` are trusted to do nothing but compute."""
    return CallEffects(root, pure).of(node)


@final
class CallEffects:
    """The behaviour of every node of one graph module, with what was found out about modules and bodies kept."""

    def __init__(
        self,
        root: nn.Module,
        pure: frozenset[Callable[..., Any]] = frozenset(),
        known_modules: dict[nn.Module, OpEffects] | None = None,
    ) -> None:
        self.root = root
        self.pure = pure
        self._known_modules = {} if known_modules is None else known_modules
        self._rules: dict[Any, Rule] = {}

    def of(self, node: Node) -> OpEffects:
        """What `node` may do; the mode toggles are nobody's effect here, since modes are told apart per node."""
        if node.op == "call_function":
            return PURE if node.target in TOGGLES else self._of_function(node)
        if node.op == "call_method":
            return rule_of_method(str(node.target)).of(node)
        if node.op == "call_module":
            return behaviour_of_call(node, self.called_module(node), self.of_module)
        return PURE

    def acting(self, graph: Graph) -> dict[Node, OpEffects]:
        """The nodes that do more than compute a result; whole targets that cannot are skipped without a walk."""
        return {node: told for node, told in self._told(graph, _may_act) if told.acts}

    def aliasing(self, graph: Graph) -> dict[Node, OpEffects]:
        """The nodes whose result may share storage with an argument or with state."""
        told = self._told(graph, _may_alias)
        return {node: behaviour for node, behaviour in told if behaviour.aliases or behaviour.shares_state}

    def of_module(self, module: nn.Module) -> OpEffects:
        """What a call of `module` may do, with slots by the position and name of its own inputs."""
        known = self._known_modules.get(module)
        if known is None:
            # A body that contains itself meets this answer halfway.
            self._known_modules[module] = UNKNOWN
            self._known_modules[module] = known = self._inspected(module)
        return known

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
        """The modules that a call of `node` runs: the one it names, or the bodies it is given."""
        if node.op == "call_module":
            yield self.called_module(node)
        elif node.op == "call_function" and is_higher_order(node.target):
            for given in node.all_input_nodes:
                body = find(self.root, str(given.target)) if given.op == "get_attr" else None
                if isinstance(body, nn.Module):
                    yield body

    def _inspected(self, module: nn.Module) -> OpEffects:
        if isinstance(module, StandsForBody):
            return self.of_module(module.body)
        if not isinstance(module, GraphModule) or module in self.pure:
            return behaviour_of_module(module, self.pure)
        return behaviour_of_body(module, CallEffects(module, self.pure, self._known_modules))

    def _of_function(self, node: Node) -> OpEffects:
        if registers_hook(node.target):
            return _HOOKED
        if self._runs_bodies(node.target):
            bodies = list(self.bodies(node))
            told = behaviour_of_call(node, bodies, self.of_module)
            return replace(told, impure=True) if has_registered_effect(node.target) and not bodies else told
        return self._rule(node.target).of(node)

    def _rule(self, target: Any) -> Rule:
        rule = self._rules.get(target)
        if rule is None:
            rule = ALIASES if target in self.pure else rule_of_function(target)
            if _is_impure_by_registration(target, rule) and target not in self.pure:
                rule = _also_impure(rule)
            self._rules[target] = rule
        return rule

    def _told(
        self, graph: Graph, suspicion: Callable[[Rule, Iterable[Node]], bool]
    ) -> Iterator[tuple[Node, OpEffects]]:
        """The behaviour of every node whose target is under suspicion."""
        for (op, target), nodes in nodes_by_target(graph).items():
            if op == "call_method":
                names = {name for name in set(map(_target, nodes)) if suspicion(rule_of_method(name), ())}
                yield from ((node, self.of(node)) for node in nodes if node.target in names)
            elif op == "call_module" or (op == "call_function" and self._runs_bodies(target)):
                yield from ((node, self.of(node)) for node in nodes)
            elif op == "call_function" and target not in TOGGLES:
                rule = self._rule(target)
                if suspicion(rule, nodes):
                    yield from zip(nodes, map(rule.of, nodes), strict=True)

    def _runs_bodies(self, target: Any) -> bool:
        return is_higher_order(target) and target not in self.pure


def _is_impure_by_registration(target: Any, rule: Rule) -> bool:
    return has_registered_effect(target) and not rule.usual.impure and target is not operator.setitem


def _also_impure(rule: Rule) -> Rule:
    return Rule(replace(rule.usual, impure=True), lambda node: replace(rule.of(node), impure=True))


def _may_act(rule: Rule, nodes: Iterable[Node]) -> bool:
    return not rule.is_quiet and (
        rule.usual.acts or rule.by_call is not None or (rule.out is not None and has_keywords(nodes))
    )


def _may_alias(rule: Rule, nodes: Iterable[Node]) -> bool:
    return (
        bool(rule.usual.aliases or rule.usual.shares_state)
        or rule.by_call is not None
        or (rule.out is not None and has_keywords(nodes))
    )


#: A hook belongs to its tensor as that is now: it stays on its side of writes and of other hooks. Its body runs later.
_HOOKED = OpEffects(writes=(FIRST,), aliases=(FIRST,))

_target = operator.attrgetter("target")


# Storage classes: which values of a graph may live in one storage, as far as anyone can tell before it runs.


class NodeBehaviours(Protocol):
    """What we need to know about the nodes of one graph."""

    root: nn.Module

    def aliasing(self, graph: Graph) -> dict[Node, OpEffects]: ...

    def bodies(self, node: Node) -> Iterator[nn.Module]: ...


@final
class Storages:
    """Nodes by number, and tensors of the module by storage, joined into classes that may share memory.

    Number `world` stands for all that an unknown function may reach. Tensors get numbers above it as they turn up;
    once an unknown function is seen, they all belong to the world.
    """

    def __init__(self, count: int, *, is_open: bool) -> None:
        self.world = count
        self.is_open = is_open
        self._parent = list(range(count + 1))
        self._number_by_key: dict[int, int] = {}
        self._tensors: dict[int, Tensor] = {}

    def find(self, i: int) -> int:
        """The number that stands for the class of `i`."""
        parent = self._parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        """From now on `i` and `j` may share memory; the smaller number stands for both."""
        i, j = self.find(i), self.find(j)
        if i != j:
            self._parent[max(i, j)] = min(i, j)

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
        """The number of a tensor of the module, or None if nothing in the graph has met its storage."""
        return self._number_by_key.get(storage_key(tensor))

    def tensors_in(self, classes: Container[int]) -> Iterator[Tensor]:
        """The tensors of the module that are in one of `classes`."""
        return (tensor for number, tensor in self._tensors.items() if self.find(number) in classes)

    def roots(self) -> list[int]:
        """The number that stands for the class of each node."""
        find, parent = self.find, self._parent
        return [i if parent[i] == i else find(i) for i in range(self.world)]


def storages_of(index: Index, behaviours: NodeBehaviours, acting: Mapping[Node, OpEffects]) -> Storages:
    """The storage classes of a graph: from schemas, from the tensors of the module, and from traced values.

    A traced value may only join classes, since some tracers give each value a storage of its own.
    """
    storages = Storages(len(index), is_open=any(told.unknown for told in acting.values()))
    _join_results(index, storages, behaviours)
    _join_attributes(index, storages, behaviours.root)
    _join_traced_values(index, storages)
    return storages


def written_classes(index: Index, storages: Storages, acting: Mapping[Node, OpEffects]) -> dict[int, set[int]]:
    """The classes that each writing node may write, by its number."""
    find, number = storages.find, index.number
    written: dict[int, set[int]] = {}
    for node, told in acting.items():
        if told.writes or told.state_writes:
            classes = {find(number[given]) for given in nodes_in_slots(node, told.writes)}
            classes.update(find(storages.number_of(tensor)) for tensor in told.state_writes)
            written[number[node]] = classes | {find(storages.world)} if told.unknown else classes
    return written


def _join_results(index: Index, storages: Storages, behaviours: NodeBehaviours) -> None:
    number, join = index.number, storages.join
    for node, told in behaviours.aliasing(index.graph).items():
        i = number[node]
        for given in nodes_in_slots(node, told.aliases):
            join(i, number[given])
        if told.unknown:
            join(i, storages.world)
        elif told.shares_state:
            for body in behaviours.bodies(node):
                for tensor in tensors_of(body):
                    join(i, storages.number_of(tensor))


def _join_attributes(index: Index, storages: Storages, root: nn.Module) -> None:
    for i, node in enumerate(index.nodes):
        if node.op == "get_attr":
            value = find(root, str(node.target))
            if isinstance(value, Tensor):
                storages.join(i, storages.number_of(value))


def _join_traced_values(index: Index, storages: Storages) -> None:
    first: dict[int, int] = {}
    for i, node in enumerate(index.nodes):
        if node.meta:
            for tensor in tensors_in(value_of(node)):
                storages.join(i, first.setdefault(storage_key(tensor), i))


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """The parameters, buffers and other tensors that `module` and its children hold."""
    parts = list(modules_in(module))
    for tables in ([part._parameters for part in parts], [part._buffers for part in parts], map(vars, parts)):
        yield from (value for table in tables for value in table.values() if isinstance(value, Tensor))


# The behaviour of calls that run bodies: graph modules, and the operators that are given some.


class ActingNodes(NodeBehaviours, Protocol):
    """The behaviour of the nodes of one body."""

    def acting(self, graph: Graph) -> dict[Node, OpEffects]: ...


def behaviour_of_body(body: GraphModule, behaviours: ActingNodes) -> OpEffects:
    """What a call of `body` may do, its slots by the place of each placeholder.

    The module of an exported program checks its own inputs. That can raise, as any operator can that is given what it
    does not take, and is no act of its own.
    """
    is_exported = has_only_export_hooks(body)
    if not is_exported and not runs_its_graph(body):
        return UNKNOWN
    index = Index(body.graph)
    acting = behaviours.acting(body.graph)
    if is_exported:
        acting = {node: told for node, told in acting.items() if not _checks_inputs(node, body)}
    storages = storages_of(index, behaviours, acting)
    written = set().union(*written_classes(index, storages, acting).values())
    returned = {storages.find(i) for i in index.inputs(len(index) - 1)}
    inside = merged(acting.values())
    return replace(
        inside,
        writes=_slots_of_inputs(index, {i for i, _ in _placeholders(index) if storages.find(i) in written}),
        aliases=_slots_of_inputs(index, {i for i, _ in _placeholders(index) if storages.find(i) in returned}),
        state_writes=tuple(
            {id(tensor): tensor for tensor in (*storages.tensors_in(written), *inside.state_writes)}.values()
        ),
        shares_state=inside.unknown or any(True for _ in storages.tensors_in(returned)),
        waits=False,
        # A body that leaves a mode behind changes how every later call is carried out.
        fences=inside.fences or modes_of(index).final != AMBIENT,
    )


def behaviour_of_call(
    node: Node, modules: nn.Module | Sequence[nn.Module], of_module: Callable[[nn.Module], OpEffects]
) -> OpEffects:
    """What the call `node` of these modules may do, its slots by the place of each argument."""
    if isinstance(modules, nn.Module):
        return of_module(modules)
    if getattr(node.target, "__name__", "") == _DELEGATE:
        return OpEffects(impure=True)
    if not modules:
        return _of_bare_operator(node)
    return merged(_as_seen_by_operator(node, body, of_module(body)) for body in modules)


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


def _as_seen_by_operator(node: Node, body: nn.Module, told: OpEffects) -> OpEffects:
    """`told`, with the inputs of the body found among the operands of the operator."""
    if told.unknown or not isinstance(body, GraphModule):
        return UNKNOWN
    places = _operand_places(node, sum(n.op == "placeholder" for n in body.graph.nodes))

    def seen(slots: Iterable[Slot]) -> tuple[Slot, ...]:
        if places is None or EVERY in slots:
            return (EVERY,) if slots else ()
        return tuple(dict.fromkeys((places[position], "") for position, _ in slots))

    return replace(told, writes=seen(told.writes), aliases=seen(told.aliases))


def _operand_places(node: Node, count: int) -> list[int] | None:
    """The argument in which each of `count` inputs of the body travels; None where that cannot be told."""
    leaves = [(i, leaf) for i, given in enumerate(node.args) for leaf in _leaves(given)]
    last_body = max((i for i, leaf in leaves if isinstance(leaf, Node) and _reads_body(leaf)), default=-1)
    # `invoke_subgraph` names its body in a string between body and operands.
    places = [i for i, leaf in leaves if i > last_body and not isinstance(leaf, str)]
    return places if len(places) == count else None


def _reads_body(node: Node) -> bool:
    """Whether a node reads a body, and no tensor, from the module that owns the graph."""
    root = node.graph.owning_module
    value = find(root, str(node.target)) if node.op == "get_attr" and root is not None else None
    return isinstance(value, nn.Module)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _of_bare_operator(node: Node) -> OpEffects:
    """Operators that are given an operator, or nothing, to run."""
    name = getattr(node.target, "__name__", "")
    if name in _KNOWN:
        return _KNOWN[name]
    if name not in _RUNS_OPERATOR | _FUNCTIONAL:
        return UNKNOWN
    inner = [a for a in node.args if callable(a) and not isinstance(a, Node)]
    if len(inner) != 1 or is_higher_order(inner[0]):
        return PURE if name in _FUNCTIONAL else UNKNOWN
    told = rule_of_operator(signatures_of(inner[0])).usual
    if name in _FUNCTIONAL:  # It writes copies and gives them back.
        return replace(told, writes=(), aliases=(), state_writes=())
    ordered = OpEffects(draws="rng" in name, impure=name == "with_effects")
    return merged((replace(told, writes=(EVERY,) if told.writes else (), aliases=(EVERY,)), ordered))


#: ExecuTorch's operator, which runs what a delegate made of a functional graph: it gives new tensors and writes none of
#: its arguments. It may own buffers, so that calls keep their order.
_DELEGATE = "executorch_call_delegate"
_FUNCTIONAL = frozenset(
    ("auto_functionalized", "auto_functionalized_v2", "out_dtype", "triton_kernel_wrapper_functional")
)
_RUNS_OPERATOR = frozenset(
    ("graphsafe_run_with_rng_state", "run_and_save_rng_state", "run_with_rng_state", "with_effects")
)
_KNOWN = {
    "print": OpEffects(impure=True),
    "_export_tracepoint": replace(ALIASING, impure=True),
    "triton_kernel_wrapper_mutation": OpEffects(writes=(EVERY,)),
}
