"""Modes: the grad, inference and autocast state that each node runs under, found in one forward pass.

A graph switches modes by nodes that affect everything after them. As a property of the nodes in between, a mode no
longer depends on order: a node can move, and code generation sets the mode that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch import toggles
from partita._torch.modes import can_autocast
from partita._torch.operator_schemas import is_higher_order
from partita.analysis.index import Index
from partita.analysis.nodes import bodies_read, find
from partita.errors import ModeError


@dataclass(frozen=True, slots=True)
class Grad:
    """Gradients are recorded, or not."""

    enabled: bool

    def __str__(self) -> str:
        return "enable_grad" if self.enabled else "no_grad"


@dataclass(frozen=True, slots=True)
class Inference:
    """One inference block; it sets the grad mode as well, to the opposite."""

    enabled: bool

    def __str__(self) -> str:
        return "inference_mode" if self.enabled else "no inference_mode"


@dataclass(frozen=True, slots=True)
class Autocast:
    """The arguments of one autocast block; None means: inherited from the surrounding block.

    In a mode, `cache` is the same for all devices: torch has one flag for all of them.
    """

    device: str
    dtype: torch.dtype | None = None
    enabled: bool = True
    cache: bool | None = None

    def __str__(self) -> str:
        how = "" if self.dtype is None else f" {str(self.dtype).removeprefix('torch.')}"
        return f"autocast on {self.device}{how}" if self.enabled else f"no autocast on {self.device}"

    def within(self, outer: Autocast | None) -> Autocast:
        """This block inside another one of its device, from which it inherits what is None."""
        if outer is None:
            return self
        dtype = outer.dtype if self.dtype is None else self.dtype
        return replace(self, dtype=dtype, cache=outer.cache if self.cache is None else self.cache)


#: What a block, or a switch of the grad mode, sets.
Setting: TypeAlias = Grad | Inference | Autocast

#: All kinds of settings.
EVERY_SETTING: frozenset[type] = frozenset((Grad, Inference, Autocast))


def identifier_of(setting: Setting) -> str:
    """A name for what runs under `setting`."""
    if isinstance(setting, Autocast):
        return "autocast" if setting.enabled else "no_autocast"
    return str(setting).replace(" ", "_")


@dataclass(frozen=True, slots=True)
class Block:
    """An open autocast or inference block; blocks with equal settings are distinguished by their key.

    The identity matters: autocast caches casts of weights until the outermost block is left.
    """

    key: Hashable
    sets: Inference | Autocast = field(compare=False)
    #: The grad mode where the block was entered.
    grad: bool | None = field(compare=False)
    #: Whether it is what blocks that crossed have left in force, all closed: torch's nesting depth does not count it.
    is_closed: bool = field(default=False, compare=False)

    def within(self, outer: Mode, call: Hashable) -> Block:
        """This block in a body that `call` runs under `outer`."""
        return replace(self, key=(call, self.key), grad=outer.grad if self.grad is None else self.grad)


@dataclass(frozen=True, slots=True)
class Mode:
    """The modes that a graph has set; None, or no entry for a device, means: inherited from the caller."""

    grad: bool | None = None
    inference: bool | None = None
    autocast: tuple[Autocast, ...] = ()

    #: The open blocks, the outermost first. Modes that come from other blocks but set the same are equal.
    blocks: tuple[Block, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        words = []
        if self.inference is not None:
            words.append(str(Inference(self.inference)))
        if self.grad is not None and self.grad != (None if self.inference is None else not self.inference):
            words.append(str(Grad(self.grad)))
        return ", ".join([*words, *map(str, self.autocast)]) or "the caller's modes"

    def setting(self, setting: Setting) -> Mode:
        """This mode once `setting` holds."""
        if isinstance(setting, Grad):
            return replace(self, grad=setting.enabled)
        if isinstance(setting, Inference):
            return replace(self, inference=setting.enabled, grad=not setting.enabled)
        return replace(self, autocast=_entered(self.autocast, setting))

    def inside(self, block: Block) -> Mode:
        """The mode at the start of `block`, entered here."""
        return replace(self.setting(block.sets), blocks=(*self.blocks, block))

    def beside(self, caller: Mode) -> Mode:
        """The part of this mode that differs from the mode of the caller."""
        if self == caller:
            return Mode(blocks=self.blocks)
        return Mode(
            None if self.grad == caller.grad else self.grad,
            None if self.inference == caller.inference else self.inference,
            tuple(autocast for autocast in self.autocast if autocast not in caller.autocast),
            self.blocks,
        )

    def within(self, outer: Mode, *, call: Hashable = None) -> Mode:
        """This mode in a body that is called under `outer`; `call` distinguishes this call of the body from others."""
        autocast = outer.autocast
        for entered in self.autocast:
            autocast = _entered(autocast, entered)
        return Mode(
            outer.grad if self.grad is None else self.grad,
            outer.inference if self.inference is None else self.inference,
            autocast,
            (*outer.blocks, *(block.within(outer, call) for block in self.blocks)),
        )


AMBIENT = Mode()


def with_cache(autocasts: Iterable[Autocast], cache: bool | None) -> tuple[Autocast, ...]:  # noqa: FBT001
    """The state of all devices under this cache flag, which is one for all of them."""
    return tuple(a if a.cache is cache else replace(a, cache=cache) for a in autocasts)


def _entered(autocasts: tuple[Autocast, ...], block: Autocast) -> tuple[Autocast, ...]:
    """The state of all devices in a block."""
    active = {autocast.device: autocast for autocast in autocasts}
    cache = autocasts[0].cache if block.cache is None and autocasts else block.cache
    active[block.device] = block.within(active.get(block.device))
    return with_cache(active.values(), cache)


# Bodies that a graph calls, the modes that they leave switched, and the grad mode that they were traced under.


def traced_grad(module: GraphModule) -> bool | None:
    """The grad mode that a graph was traced under, as its toggles tell; None if it has none, or not all are constant.

    A traced block ends by restoring the mode at its entry, so the last constant of a graph is that mode. An odd number
    of constants means that a block was never closed; then True is assumed. Leaving an inference block restores the grad
    mode, so constants inside one are ignored. Where a body and the graph around it disagree, it is True: a body that
    ends by enabling gradients would leave them enabled for a caller without.
    """
    every = list(_grad_constants(module))
    if not any(found.values for found in every) or not all(found.are_constant for found in every):
        return None
    telling = [found.outside_inference for found in every if found.in_callers_mode and found.outside_inference]
    return not telling or any(values[-1] is not False or len(values) % 2 == 1 for values in telling)


def check_bodies(index: Index, root: nn.Module, modes: Modes, *, grad: bool | None = None) -> None:
    """Raises where a call leaves a mode switched for the nodes after it: only toggles in the graph itself may do so.

    `grad` is the grad mode of the caller, if it is known. If not, a body that ends by enabling gradients is assumed to
    have closed a block without.
    """
    _BodyCheck().check(index, root, modes, grad=grad)


class _BodyCheck:
    """Caches the bodies that were checked, and under which grad mode: one that is called often is walked once."""

    def __init__(self) -> None:
        self.known: dict[GraphModule, tuple[Index, Modes]] = {}
        self.checked: set[tuple[GraphModule, bool | None]] = set()

    def check(self, index: Index, root: nn.Module, modes: Modes, *, grad: bool | None) -> None:
        waiting: list[tuple[Index, nn.Module, Modes, bool | None]] = [(index, root, modes, grad)]
        while waiting:  # No recursion, since nests may be deep.
            waiting += self._check_one(*waiting.pop())

    def _check_one(
        self,
        index: Index,
        root: nn.Module,
        modes: Modes,
        grad: bool | None,  # noqa: FBT001
    ) -> Iterator[tuple[Index, GraphModule, Modes, bool | None]]:
        """Checks the calls of one graph, and yields the bodies that are still to be checked."""
        graph = index.graph
        for node in (*graph.find_nodes(op="call_module", sort=False), *graph.find_nodes(op="get_attr", sort=False)):
            body = find(root, str(node.target))
            if not isinstance(body, GraphModule):
                continue
            inner, inside = self._analysed(body)
            calls = (node,) if node.op == "call_module" else tuple(node.users)
            around = [grad if at is None else at for at in (modes.at(index.number[call]).grad for call in calls)]
            if inside.final != AMBIENT and not _restores_grad(body, inside.final, zip(calls, around, strict=True)):
                raise ModeError(
                    f"the body {node.target!r} of node {node.name!r} leaves {inside.final} behind for everything after "
                    "it; close its blocks"
                )
            found = {_grad_inside(call, at) for call, at in zip(calls, around, strict=True)}
            known = found.pop() if len(found) == 1 else None
            if (body, known) not in self.checked:
                self.checked.add((body, known))
                yield inner, body, inside, known

    def _analysed(self, body: GraphModule) -> tuple[Index, Modes]:
        if body not in self.known:
            index = Index(body.graph)
            self.known[body] = (index, modes_of(index))
        return self.known[body]


def _restores_grad(body: GraphModule, left: Mode, calls: Iterable[tuple[Node, bool | None]]) -> bool:
    """Whether a body that ends in this mode ends in that of its callers, or they restore theirs themselves."""
    if left != Mode(grad=left.grad):
        return False
    found_if_unknown = traced_grad(body) is not False
    return all(
        _sets_grad(call) is not None or left.grad == (found_if_unknown if at is None else at) for call, at in calls
    )


def _grad_inside(call: Node, around: bool | None) -> bool | None:  # noqa: FBT001
    """The grad mode that a body starts in."""
    sets = _sets_grad(call)
    return around if sets is None else sets


def _sets_grad(call: Node) -> bool | None:
    """The grad mode that an operator sets for its body and restores afterwards; None for other operators."""
    name = getattr(call.target, "__name__", None) if is_higher_order(call.target) else None
    enabled = call.args[0] if call.args and name in _GRAD_OPERATORS else None
    if not isinstance(enabled, bool):
        return None
    return not enabled if name == "partita_inference_mode" else enabled


_GRAD_OPERATORS = ("wrap_with_set_grad_enabled", "partita_set_grad_enabled", "partita_inference_mode")


@dataclass(frozen=True, slots=True)
class _GradConstants:
    """What one graph sets the grad mode to, in order."""

    values: tuple[object, ...]
    outside_inference: tuple[object, ...]
    #: Whether the graph starts in the grad mode of the caller of the outermost one.
    in_callers_mode: bool

    @property
    def are_constant(self) -> bool:
        return all(isinstance(value, bool) for value in self.values)


def _grad_constants(module: GraphModule) -> Iterator[_GradConstants]:
    """What the grad mode is set to, by graph: that of the module and all bodies that its operators run."""
    waiting, seen = [(module, True)], {(module, True)}
    while waiting:  # No recursion, since nests may be deep.
        owner, in_callers_mode = waiting.pop()
        index = Index(owner.graph)
        modes = modes_of(index)
        switches = owner.graph.find_nodes(op="call_function", target=toggles.SET_GRAD)
        outside = [switch for switch in switches if modes.at(index.number[switch]).inference is None]
        yield _GradConstants(_values_set(switches), _values_set(outside), in_callers_mode)
        for read, body in bodies_read(owner, owner.graph.find_nodes(op="get_attr")):
            is_kept = any(_grad_inside(call, modes.at(index.number[call]).grad) is None for call in read.users)
            found = (body, in_callers_mode and is_kept)
            if found not in seen:
                seen.add(found)
                waiting.append(found)


def _values_set(switches: Iterable[Node]) -> tuple[object, ...]:
    return tuple(value for switch in switches for value in (*switch.args, *switch.kwargs.values()))


# The mode of every node.


@dataclass(frozen=True, slots=True)
class Modes:
    """The mode of every node; `toggles` are the nodes that only switch modes, `final` is the mode at the end."""

    by_number: tuple[Mode, ...] | None = None
    toggles: frozenset[int] = frozenset()
    final: Mode = AMBIENT

    #: Toggles whose result, which is always None, is used.
    read: tuple[Node, ...] = ()

    def with_projections(self, sources: Mapping[int, int]) -> Modes:
        """Modes in which each projection has the mode of the node that made the container."""
        if self.by_number is None or not sources:
            return self
        by_number = list(self.by_number)
        for number, source in sources.items():
            by_number[number] = by_number[source]
        return replace(self, by_number=tuple(by_number))

    def at(self, number: int) -> Mode:
        return AMBIENT if self.by_number is None else self.by_number[number]


def modes_of(index: Index, caller: Mode = AMBIENT) -> Modes:
    """The modes of all nodes, relative to `caller`; costs nothing in a graph without toggles."""
    if not has_toggles(index.graph):
        return Modes()
    switches, by_number, found = ModeSwitches(caller), [], set()
    for number, node in enumerate(index.nodes):
        if node.op == "call_function" and switches.take(node):
            found.add(number)
        by_number.append(switches.shown)
    read = tuple(_used_toggles(index.nodes[number] for number in sorted(found)))
    return Modes(tuple(by_number), frozenset(found), switches.shown, read)


def has_toggles(graph: Graph, kinds: Collection[type] = EVERY_SETTING) -> bool:
    """Whether a graph switches any mode by toggles of these kinds."""
    targets = (target for kind in kinds for target in _TOGGLES_OF[kind])
    return any(graph.find_nodes(op="call_function", target=target, sort=False) for target in targets)


_TOGGLES_OF: dict[type, tuple[Callable[..., Any], ...]] = {
    Grad: (toggles.SET_GRAD,),
    Inference: (toggles.ENTER_INFERENCE, toggles.EXIT_INFERENCE),
    Autocast: (toggles.ENTER_AUTOCAST, toggles.EXIT_AUTOCAST),
}


def _used_toggles(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        readers = [user for user in node.users if user.target not in toggles.TOGGLES]
        if readers and node.target in (toggles.ENTER_AUTOCAST, toggles.ENTER_INFERENCE):
            raise ModeError(
                f"node {readers[0].name!r} reads {node.name!r}, the handle of a block; only the node that leaves the "
                "block may read it: take it out of the arguments"
            )
        if readers and node.target is not toggles.IS_GRAD_ENABLED:
            yield node


# The toggles of a graph in order: the mode in force, and what each open block will restore.


class ModeSwitches:
    """`shown` is the mode in force, relative to that of the caller."""

    def __init__(self, caller: Mode) -> None:
        self.caller = caller
        self.mode = replace(caller, blocks=())
        self.shown = Mode()
        self.active = {autocast.device: autocast for autocast in with_cache(caller.autocast, None)}
        self.cache = _cache_of(caller)
        self.open_autocasts: dict[Node, tuple[Autocast | None, bool | None]] = {}
        self.open_inference: dict[Node, tuple[Mode, tuple[Node, ...]]] = {}
        self.order: list[Node] = []
        self.has_crossed = False
        self.queried_grad: dict[Node, bool | None] = {}

    def take(self, node: Node) -> bool:
        """Applies `node`; whether it does nothing but switch modes."""
        action = _ACTIONS.get(node.target)  # type: ignore[arg-type]
        if action is not None:
            action(self, node)
            self.shown = self.mode.beside(self.caller)
            return True
        if node.target is toggles.IS_GRAD_ENABLED:
            self.queried_grad[node] = self.mode.grad
            return bool(node.users) and all(user.target is toggles.SET_GRAD for user in node.users)
        return False

    def set_grad(self, node: Node) -> None:
        wanted = only_argument(node, "enabled")
        if isinstance(wanted, Node) and wanted in self.queried_grad:
            self.mode = replace(self.mode, grad=self.queried_grad[wanted])
        elif isinstance(wanted, bool):
            self.mode = replace(self.mode, grad=wanted)
        else:
            raise _not_constant(node)

    def enter_inference(self, node: Node) -> None:
        wanted = node.args[0] if node.args else node.kwargs.get("mode", True)
        if not isinstance(wanted, bool):
            raise _not_constant(node)
        if not node.users:
            return  # The block ends when its handle is dropped, which generated code does at once.
        self.open_inference[node] = (self.mode, tuple(self.open_autocasts))
        self.order.append(node)
        changed = (self.mode.inference, self.mode.grad) != (wanted, not wanted)
        entered = self.mode.inside(Block(node, Inference(wanted), self.shown.grad))
        self.mode = entered if changed else self.mode

    def exit_inference(self, node: Node) -> None:
        opener = _opener(node, self.open_inference)
        before, blocks = self.open_inference.pop(opener)
        closed = self.order[-1] is opener and blocks == tuple(self.open_autocasts)
        if not closed or before.autocast != self.mode.autocast:
            # Leaving an inference block restores the whole dispatch state, autocast included (seen in torch 2.13).
            inner = self.order[self.order.index(opener) + 1 :]
            crossing = sorted({block.name for block in {*blocks} ^ {*self.open_autocasts} | {*inner}}) or ["autocast"]
            raise ModeError(
                f"{', '.join(map(repr, crossing))} crosses the inference block that {node.name!r} leaves: autocast is "
                "not as it was where the block was entered; close the inner blocks before the outer one"
            )
        self.order.pop()
        self.mode = before

    def enter_autocast(self, node: Node) -> None:
        entered = autocast_arguments(node)
        outer = self.active.get(entered.device)
        self.open_autocasts[node] = (outer, self.cache)
        self.order.append(node)
        if entered.cache is None and self.cache is not _cache_of(self.mode):
            entered = replace(entered, cache=self.cache)  # Blocks that crossed have left the flag switched.
        inside = self.mode.inside(Block(node, entered, self.shown.grad))
        self.cache = _cache_of(inside)
        if inside == self.mode:
            return  # It has no effect.
        self.active[entered.device] = replace(entered.within(outer), cache=None)
        self.mode = inside

    def exit_autocast(self, node: Node) -> None:
        opener = _opener(node, self.open_autocasts)
        device = autocast_arguments(opener).device
        outer, self.cache = self.open_autocasts.pop(opener)
        if outer is None:
            self.active.pop(device, None)
        else:
            self.active[device] = outer
        blocks = self.mode.blocks
        self.has_crossed = self.has_crossed or self.order[-1] is not opener
        if self.has_crossed:
            blocks = self._blocks_after_crossing(node)
        elif blocks and blocks[-1].key is opener:
            blocks = blocks[:-1]
        if self.order[-1] is opener:
            self.order.pop()
        else:
            self.order.remove(opener)
        self.has_crossed = self.has_crossed and bool(self.open_autocasts)
        self.mode = replace(self.mode, autocast=with_cache(self.active.values(), self.cache), blocks=blocks)

    def _blocks_after_crossing(self, node: Node) -> tuple[Block, ...]:
        """Blocks that make up the state in force, after blocks were left in another order than they were entered in."""
        blocks = self.mode.blocks
        kept = max((at + 1 for at, block in enumerate(blocks) if isinstance(block.sets, Inference)), default=0)
        around = with_cache(self.caller.autocast, None)
        own = [autocast for autocast in self.active.values() if autocast not in around]
        if own and self.cache is not _cache_of(self.caller):
            own[-1] = replace(own[-1], cache=self.cache)
        grad, is_closed = self.shown.grad, not self.open_autocasts
        return (*blocks[:kept], *(Block((node, a.device), a, grad, is_closed) for a in own))


_ACTIONS = {
    toggles.SET_GRAD: ModeSwitches.set_grad,
    toggles.ENTER_INFERENCE: ModeSwitches.enter_inference,
    toggles.EXIT_INFERENCE: ModeSwitches.exit_inference,
    toggles.ENTER_AUTOCAST: ModeSwitches.enter_autocast,
    toggles.EXIT_AUTOCAST: ModeSwitches.exit_autocast,
}


def _cache_of(mode: Mode) -> bool | None:
    """Whether autocast caches casts of weights, if the mode sets that."""
    return mode.autocast[0].cache if mode.autocast else None


def autocast_arguments(node: Node) -> Autocast:
    """The arguments of the node that enters an autocast block, by position, by keyword or by default."""
    named = dict(zip(("device_type", "dtype", "enabled", "cache_enabled"), node.args, strict=False)) | dict(node.kwargs)
    device, dtype = named.get("device_type"), named.get("dtype")
    enabled, cache = named.get("enabled", True), named.get("cache_enabled")
    if (
        isinstance(device, str)
        and isinstance(dtype, torch.dtype | None)
        and isinstance(enabled, bool)
        and isinstance(cache, bool | None)
    ):
        if not can_autocast(device):
            raise ModeError(
                f"node {node.name!r} enters autocast on {device!r}, which is no device type that torch can cast on; "
                "it takes a type without an index, for example 'cpu' or 'cuda'"
            )
        return Autocast(device.partition(":")[0], dtype, enabled, cache)  # torch takes "cpu:0" for "cpu".
    raise _not_constant(node)


def only_argument(node: Node, name: str) -> object:
    """The one argument of a toggle, by position or by keyword; None if there is another number of them."""
    values = (*node.args, *(value for keyword, value in node.kwargs.items() if keyword == name))
    return values[0] if len(values) == 1 and len(node.args) + len(node.kwargs) == 1 else None


def _opener(node: Node, still_open: Mapping[Node, object]) -> Node:
    opener = only_argument(node, "mode")
    if isinstance(opener, Node) and opener in still_open:
        return opener
    named = opener.name if isinstance(opener, Node) else opener
    raise ModeError(
        f"node {node.name!r} leaves {named!r}, which is not an open block: it was never entered or is left twice; "
        f"erase {node.name!r}, or enter the block before it"
    )


def _not_constant(node: Node) -> ModeError:
    return ModeError(
        f"node {node.name!r} switches a mode by values that are not constants: {node.format_node()}; "
        "a mode must be known before the program runs: trace the model again with the mode fixed"
    )
