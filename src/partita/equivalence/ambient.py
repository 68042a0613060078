"""Ambient modes, settings and RNG state: read before a call, restored after it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.modes import read_ambient, restore_autocast
from partita.equivalence.settings import read_settings


@contextmanager
def restored_ambient() -> Iterator[None]:
    """Restores modes and settings after the block."""
    found, settings = read_ambient(), read_settings()
    # A weight that autocast has cached would carry the autograd graph of one run into the next.
    torch.clear_autocast_cache()
    try:
        # The guard behind inference_mode restores the whole autograd state, a leaked inference mode included.
        with torch.inference_mode(found.inference), torch.set_grad_enabled(found.grad):
            yield
    finally:
        restore_autocast(found)
        settings.restore()


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of Python's and NumPy's generators, of torch's on every device, and of a program's own."""

    python: tuple[object, ...]
    #: None where NumPy is not imported.
    numpy: Any
    cpu: Tensor
    cuda: tuple[Tensor, ...]
    owned: tuple[tuple[Any, Any], ...] = ()

    def restore(self) -> None:
        """Restores every generator."""
        for generator, state in self.owned:
            _set_state(generator, state)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    def moved(self, other: RandomState) -> tuple[str, ...]:
        """The generators whose state differs in `other`."""
        named = {
            "Python's random": self.python == other.python,
            "NumPy's random": str(self.numpy) == str(other.numpy),
            "the CPU": torch.equal(self.cpu, other.cpu),
        }
        for number, (mine, theirs) in enumerate(zip(self.cuda, other.cuda, strict=True)):
            named[f"cuda:{number}"] = torch.equal(mine, theirs)
        return tuple(name for name, same in named.items() if not same)


def random_state(owned: Iterable[object] = ()) -> RandomState:
    """The RNG state now, that of the `owned` generators included."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = tuple((generator, state_of(generator)) for generator in owned)
    return RandomState(random.getstate(), _numpy_state(), torch.get_rng_state(), tuple(cuda), states)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return (name, keys.tolist(), *rest)


def generators_of(roots: Iterable[nn.Module], values: Iterable[object]) -> list[object]:
    """The generators of torch, Python and NumPy that modules hold as attributes, or that are among `values`."""
    held = (value for root in roots for module in root.modules() for value in vars(module).values())
    found = {id(value): value for value in (*held, *values) if state_of(value) is not None}
    return list(found.values())


def state_of(value: Any) -> Any:
    """The state of a generator; None for anything else, and for a generator without a state."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state()
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    return None


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
