"""The terms in which we say what a call may do to memory and to the world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.fx import Node

__all__ = [
    "ALIASES",
    "ALIASING",
    "EVERY",
    "FENCES",
    "FIRST",
    "IMPURE",
    "PURE",
    "QUIET",
    "UNKNOWN",
    "OpEffects",
    "Rule",
    "Slot",
    "argument",
    "merged",
    "nodes_in",
    "nodes_in_slots",
]


#: An argument: its position (-1 where only a keyword reaches it) and its name.
Slot = tuple[int, str]

#: The first argument, which for a method is the tensor it is called on.
FIRST: Slot = (0, "input")

#: All arguments at once.
EVERY: Slot = (-1, "*")


@dataclass(frozen=True, slots=True)
class OpEffects:
    """What one call may do; all it does not mention, it surely does not do."""

    #: Arguments whose storage the call may write.
    writes: tuple[Slot, ...] = ()
    #: Arguments whose storage the result, or anything inside it, may share.
    aliases: tuple[Slot, ...] = ()
    #: It reads or advances the state of a random number generator.
    draws: bool = False
    #: It does something that can be seen from outside: prints, asserts, logs.
    impure: bool = False
    #: It takes part in communication, whose order all processes must agree on.
    communicates: bool = False
    #: It completes a collective: its arguments may not be read before it, nor what the collective reads be written.
    waits: bool = False
    #: Nobody knows what it does.
    unknown: bool = False
    #: It changes how every later call is carried out.
    fences: bool = False
    #: Tensors that it owns and may write.
    state_writes: tuple[Tensor, ...] = field(default=(), compare=False)
    #: The result may share storage with tensors that it owns.
    shares_state: bool = False

    @property
    def acts(self) -> bool:
        """Whether it does more than compute a result."""
        return bool(self.writes or self.state_writes) or any(
            (self.draws, self.impure, self.communicates, self.unknown, self.fences)
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """The behaviour of every call of one target: fixed, or read off the arguments of each call."""

    usual: OpEffects
    by_call: Callable[[Node], OpEffects] | None = None
    #: No arguments whatever make it act.
    is_quiet: bool = False
    #: The keyword by which a caller makes it write a given tensor.
    out: str | None = None

    def of(self, node: Node) -> OpEffects:
        """What the call `node` may do."""
        told = self.usual if self.by_call is None else self.by_call(node)
        if self.out is not None and node.kwargs.get(self.out) is not None:
            slot = (-1, self.out)
            return replace(told, writes=(*told.writes, slot), aliases=(*told.aliases, slot))
        return told


PURE = OpEffects()
ALIASING = OpEffects(aliases=(EVERY,))
UNKNOWN = OpEffects(
    writes=(EVERY,), aliases=(EVERY,), draws=True, impure=True, communicates=True, unknown=True, shares_state=True
)

QUIET = Rule(PURE, is_quiet=True)
ALIASES = Rule(ALIASING, is_quiet=True)
IMPURE = Rule(OpEffects(impure=True))
FENCES = Rule(OpEffects(aliases=(EVERY,), fences=True))


def argument(node: Node, slot: Slot, default: Any = None) -> Any:
    """What the call `node` passes in `slot`."""
    position, name = slot
    args, kwargs = node.args, node.kwargs
    if 0 <= position < len(args):
        return args[position]
    if name in kwargs or not kwargs:
        return kwargs.get(name, default)
    return next((kwargs[other] for other in _SYNONYMS.get(name, ()) if other in kwargs), default)


#: What torch's Python functions also call an argument that the schema calls so.
_SYNONYMS = {"self": ("input", "x", "a", "x1"), "input": ("self", "x", "a", "x1"), "other": ("x2",)}


def nodes_in(value: Any) -> Iterator[Node]:
    """The nodes inside an argument, containers opened."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from nodes_in(item)
    elif isinstance(value, slice):
        yield from nodes_in((value.start, value.stop, value.step))


def nodes_in_slots(node: Node, slots: Iterable[Slot]) -> Iterator[Node]:
    """The nodes that the call `node` passes in `slots`."""
    for slot in slots:
        if slot is EVERY or slot == EVERY:
            yield from node.all_input_nodes
        else:
            yield from nodes_in(argument(node, slot))


def merged(behaviours: Iterable[OpEffects]) -> OpEffects:
    """What a call may do that may do what any of `behaviours` does."""
    told = list(behaviours)
    return OpEffects(
        writes=tuple(dict.fromkeys(slot for one in told for slot in one.writes)),
        aliases=tuple(dict.fromkeys(slot for one in told for slot in one.aliases)),
        draws=any(one.draws for one in told),
        impure=any(one.impure for one in told),
        communicates=any(one.communicates for one in told),
        waits=any(one.waits for one in told),
        unknown=any(one.unknown for one in told),
        fences=any(one.fences for one in told),
        state_writes=tuple({id(tensor): tensor for one in told for tensor in one.state_writes}.values()),
        shares_state=any(one.shares_state for one in told),
    )
