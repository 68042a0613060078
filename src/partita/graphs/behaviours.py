"""What each node may do: read, write, alias, draw, or act on the world in ways that nobody knows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, final

from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.schemas import (
    has_keywords,
    has_registered_effect,
    is_higher_order,
    nodes_by_target,
    registers_hook,
)
from partita._torch.standing_modules import StandsForBody
from partita._torch.toggles import TOGGLES
from partita.errors import MissingTargetError
from partita.graphs.attributes import find
from partita.graphs.behaviour_bodies import behaviour_of_body, behaviour_of_call
from partita.graphs.behaviour_functions import rule_of_function
from partita.graphs.behaviour_methods import rule_of_method
from partita.graphs.behaviour_modules import behaviour_of_module
from partita.graphs.behaviour_terms import ALIASES, EVERY, FIRST, PURE, UNKNOWN, Behaviour, Rule, Slot

__all__ = ["EVERY", "Behaviour", "Behaviours", "Slot", "behaviour_of"]


def behaviour_of(node: Node, root: GraphModule, pure: frozenset[Callable[..., Any]] = frozenset()) -> Behaviour:
    """What the single node `node` of `root` may do; functions in `pure` are trusted to do nothing but compute."""
    return Behaviours(root, pure).of(node)


@final
class Behaviours:
    """The behaviour of every node of one graph module, with what was found out about modules and bodies kept."""

    def __init__(
        self,
        root: nn.Module,
        pure: frozenset[Callable[..., Any]] = frozenset(),
        known_modules: dict[nn.Module, Behaviour] | None = None,
    ) -> None:
        self.root = root
        self.pure = pure
        self._known_modules = {} if known_modules is None else known_modules
        self._rules: dict[Any, Rule] = {}

    def of(self, node: Node) -> Behaviour:
        """What `node` may do; the mode toggles are nobody's effect here, since modes are told apart per node."""
        if node.op == "call_function":
            return PURE if node.target in TOGGLES else self._of_function(node)
        if node.op == "call_method":
            return rule_of_method(str(node.target)).of(node)
        if node.op == "call_module":
            return behaviour_of_call(node, self.called_module(node), self.of_module)
        return PURE

    def acting(self, graph: Graph) -> dict[Node, Behaviour]:
        """The nodes that do more than compute a result; whole targets that cannot are skipped without a walk."""
        return {node: told for node, told in self._told(graph, _may_act) if told.acts}

    def aliasing(self, graph: Graph) -> dict[Node, Behaviour]:
        """The nodes whose result may share storage with an argument or with state."""
        told = self._told(graph, _may_alias)
        return {node: behaviour for node, behaviour in told if behaviour.aliases or behaviour.shares_state}

    def of_module(self, module: nn.Module) -> Behaviour:
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

    def _inspected(self, module: nn.Module) -> Behaviour:
        if isinstance(module, StandsForBody):
            return self.of_module(module.body)
        if not isinstance(module, GraphModule) or module in self.pure:
            return behaviour_of_module(module, self.pure)
        return behaviour_of_body(module, Behaviours(module, self.pure, self._known_modules))

    def _of_function(self, node: Node) -> Behaviour:
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
    ) -> Iterator[tuple[Node, Behaviour]]:
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
_HOOKED = Behaviour(writes=(FIRST,), aliases=(FIRST,))

_target = operator.attrgetter("target")
