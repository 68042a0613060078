"""A mode: the grad, inference and autocast state of a node, and the blocks that make it up."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch


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
