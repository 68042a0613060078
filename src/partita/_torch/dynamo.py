"""What a compiler backend needs from Dynamo: other backends by name, and a tracing context for each of its graphs.

Dynamo is only imported when one of these functions runs, so that `import partita` stays quick.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["backend_names", "find_backend", "own_tracing_context"]


def find_backend(name: str) -> Callable[..., Any] | None:
    """The backend that torch.compile knows under this name, or None."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        backend: Callable[..., Any] = lookup_backend(name)
    except InvalidBackend:
        return None
    return backend


def backend_names() -> list[str]:
    """The names of all backends that torch.compile knows."""
    from torch._dynamo.backends.registry import list_backends

    return list(list_backends(exclude_tags=()))


@contextmanager
def own_tracing_context(mode: Any) -> Iterator[None]:
    """A tracing context like the one in force, but for what AOTAutograd writes on it.

    A backward is compiled when it first runs, from the context that its forward was compiled in. Were the context
    shared, the pieces of one graph would find the records of the last of them there.
    """
    from torch._guards import TracingContext, tracing

    found = TracingContext.try_get()
    context = TracingContext(mode) if found is None else copy.copy(found)
    context.fake_mode = mode
    with tracing(context):
        yield
