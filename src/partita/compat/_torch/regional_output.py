"""The cache of AOTAutograd, for graphs with compiled regions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from partita._torch.modes import enabled_autocast


def is_cached() -> bool:
    """Whether AOTAutograd will store what its compilers return, in its cache or in a file."""
    from functorch.compile import config as settings

    return bool(getattr(settings, "force_autograd_cache", False)) and _output_code() is not None


def cacheable(gm: GraphModule) -> Any:
    """`gm` in the form that the cache accepts: torch stores it with its GraphPickler."""
    make = _output_code()
    assert make is not None
    return make(gm)


@contextmanager
def modes_of_compiled_graphs() -> Iterator[None]:
    """Runs the block in the modes in which AOTAutograd calls compiled graphs: no gradients, no autocast."""
    devices = [device for device, _ in enabled_autocast()]
    with torch.no_grad():
        for device in devices:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            for device in devices:
                torch.set_autocast_enabled(device, True)


def _output_code() -> Any:
    """The class of torch 2.13 for it; None in a torch without it."""
    from torch._inductor import output_code

    return getattr(output_code, "RegionalOutputCode", None)
