"""`Effects` (mutation, aliasing, RNG use and other side effects of a call) and the rules that compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Generator, Tensor
from torch.fx import Node

from partita.analysis.nodes import value_of

#: An argument: its position (-1 where only a keyword reaches it) and its name.
Slot = tuple[int, str]

#: The first argument, which for a method is the tensor it is called on.
FIRST: Slot = (0, "input")

#: All arguments at once.
EVERY: Slot = (-1, "*")

#: The argument for a generator, where it has no position.
GENERATOR: Slot = (-1, "generator")


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects that one call, of an operator, a function, a module or a body, may have; it has no others."""

    #: Arguments whose storage the call may mutate.
    mutates: tuple[Slot, ...] = ()
    #: Arguments that the result, or a tensor inside it, may alias.
    aliases: tuple[Slot, ...] = ()
    #: It reads or advances the state of a random number generator.
    uses_rng: bool = False
    #: That is a generator which is passed to it, and not the default one of a device.
    own_generator: bool = False
    #: It has a side effect that is visible from outside: prints, asserts, logs.
    impure: bool = False
    #: It takes part in communication, whose order all processes must agree on.
    communicates: bool = False
    #: It completes a collective: its arguments may not be read before it, nor the inputs of the collective be mutated.
    waits: bool = False
    #: Nothing is known about it.
    unknown: bool = False
    #: It changes how every later call runs.
    fences: bool = False
    #: Tensors that it owns and may mutate.
    mutated_state: tuple[Tensor, ...] = field(default=(), compare=False)
    #: The result may alias tensors that it owns.
    shares_state: bool = False

    @property
    def may_mutate(self) -> bool:
        """Whether it may mutate an argument or a tensor that it owns."""
        return bool(self.mutates or self.mutated_state)

    @property
    def is_effectful(self) -> bool:
        """Whether it does more than compute a result; aliasing is no effect."""
        return self.may_mutate or any((self.uses_rng, self.impure, self.communicates, self.unknown, self.fences))


@dataclass(frozen=True, slots=True)
class Rule:
    """The effects of every call of one target: fixed, or derived from the arguments of each call."""

    usual: Effects
    by_call: Callable[[Node], Effects] | None = None
    #: It has no effects, whatever its arguments are.
    is_quiet: bool = False
    #: The keywords for tensors to write the result into.
    out: tuple[str, ...] = ()
    #: The arguments that may be a generator.
    generators: tuple[Slot, ...] = (GENERATOR,)

    def of(self, node: Node) -> Effects:
        """The effects of the call `node`."""
        effects = self.usual if self.by_call is None else self.by_call(node)
        if effects.uses_rng and any(_may_be_generator(argument(node, slot)) for slot in self.generators):
            effects = replace(effects, own_generator=True)
        slots = [(-1, name) for name in self.out if node.kwargs.get(name) is not None] if node.kwargs else ()
        if slots:
            return replace(effects, mutates=(*effects.mutates, *slots), aliases=(*effects.aliases, *slots))
        return effects


def _may_be_generator(value: object) -> bool:
    """Whether an argument may be a generator; another overload may have something else in its position."""
    known = value_of(value) if isinstance(value, Node) else value
    return isinstance(known, Generator) or (known is None and isinstance(value, Node))


PURE = Effects()
ALIASING = Effects(aliases=(EVERY,))
UNKNOWN = Effects(
    mutates=(EVERY,), aliases=(EVERY,), uses_rng=True, impure=True, communicates=True, unknown=True, shares_state=True
)

QUIET = Rule(PURE, is_quiet=True)
ALIASES = Rule(ALIASING, is_quiet=True)
IMPURE = Rule(Effects(impure=True))
FENCES = Rule(Effects(aliases=(EVERY,), fences=True))


def argument(node: Node, slot: Slot, default: Any = None) -> Any:
    """What the call `node` passes in `slot`."""
    position, name = slot
    args, kwargs = node.args, node.kwargs
    if 0 <= position < len(args):
        return args[position]
    if name in kwargs or not kwargs:
        return kwargs.get(name, default)
    return next((kwargs[other] for other in _SYNONYMS.get(name, ()) if other in kwargs), default)


#: Other names in torch's Python functions for arguments of schemas.
_SYNONYMS = {"self": ("input", "x", "a", "x1"), "input": ("self", "x", "a", "x1"), "other": ("x2",)}


def nodes_in(value: Any) -> Iterator[Node]:
    """The nodes inside an argument, nested containers included."""
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


def merged(several: Iterable[Effects]) -> Effects:
    """The effects of a call that may have any of these."""
    effects = list(several)
    return Effects(
        mutates=tuple(dict.fromkeys(slot for one in effects for slot in one.mutates)),
        aliases=tuple(dict.fromkeys(slot for one in effects for slot in one.aliases)),
        uses_rng=any(one.uses_rng for one in effects),
        own_generator=any(one.own_generator for one in effects),
        impure=any(one.impure for one in effects),
        communicates=any(one.communicates for one in effects),
        waits=any(one.waits for one in effects),
        unknown=any(one.unknown for one in effects),
        fences=any(one.fences for one in effects),
        mutated_state=tuple({id(tensor): tensor for one in effects for tensor in one.mutated_state}.values()),
        shares_state=any(one.shares_state for one in effects),
    )
