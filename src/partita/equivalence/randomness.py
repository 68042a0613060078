"""Random state: what the generators would draw next, read and put back."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RandomState", "random_state"]


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of Python's generator and of torch's own on the CPU and on every CUDA device."""

    python: tuple[object, ...]
    cpu: Tensor
    cuda: tuple[Tensor, ...]

    def restore(self) -> None:
        random.setstate(self.python)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    def moved(self, other: RandomState) -> tuple[str, ...]:
        """The generators that stand elsewhere in `other`."""
        named = {"Python's random": self.python == other.python, "the CPU": torch.equal(self.cpu, other.cpu)}
        for number, (mine, theirs) in enumerate(zip(self.cuda, other.cuda, strict=True)):
            named[f"cuda:{number}"] = torch.equal(mine, theirs)
        return tuple(name for name, same in named.items() if not same)


def random_state() -> RandomState:
    """The random state now."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return RandomState(random.getstate(), torch.get_rng_state(), tuple(cuda))
