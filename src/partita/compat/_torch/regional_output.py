"""What torch keeps in the cache of AOTAutograd for a graph of which regions are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from partita._torch.modes import read_ambient

__all__ = ["for_the_cache", "is_kept_in_the_cache", "modes_of_compiled_graphs"]


def is_kept_in_the_cache() -> bool:
    """Whether AOTAutograd will keep what its compilers give, in its cache or in a file."""
    import torch._functorch.config as settings

    return bool(getattr(settings, "force_autograd_cache", False)) and _output_code() is not None


def for_the_cache(gm: GraphModule) -> Any:
    """`gm` as the cache takes it: torch stores it with its GraphPickler."""
    make = _output_code()
    assert make is not None
    return make(gm)


@contextmanager
def modes_of_compiled_graphs() -> Iterator[None]:
    """Inside, modes are those in which AOTAutograd calls the graphs that it had compiled: no gradients, no autocast."""
    devices = [device for device, enabled, _ in read_ambient().autocast if enabled]
    with torch.no_grad():
        for device in devices:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            for device in devices:
                torch.set_autocast_enabled(device, True)


def _output_code() -> Any:
    """The class that torch 2.13 has for it; None in a torch that has none."""
    from torch._inductor import output_code

    return getattr(output_code, "RegionalOutputCode", None)
