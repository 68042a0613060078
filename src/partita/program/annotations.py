"""Annotations of bodies: facts about a graph module that hold until it is edited, and follow it into copies.

They are stored in its metadata as plain data, with a digest of its code: pickling drops all other metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from partita._torch.fx.structural_hash import digest_of_body

_PREFIX = "partita_annotation_"


def annotate(body: GraphModule, key: str, data: tuple[Any, ...], state: tuple[str, ...] = ()) -> None:
    """Annotates a body with `data` and with names of its parameters and buffers."""
    body.meta[_PREFIX + key] = (digest_of_body(body), data, state)


def annotation(body: GraphModule, key: str) -> tuple[tuple[Any, ...], tuple[str, ...]] | None:
    """The annotation of a body, if it was not edited since."""
    digest, data, state = body.meta.get(_PREFIX + key, (None, (), ()))
    return None if digest is None or digest != digest_of_body(body) else (data, state)


def propagate_annotations(body: GraphModule, rewritten: GraphModule) -> None:
    """Copies the annotations of a body to an equivalent one with the same inputs that was made from it."""
    keys = [key for key in body.meta if isinstance(key, str) and key.startswith(_PREFIX)]
    if body is rewritten or not keys:
        return
    names = {id(tensor): name for name, tensor in _named_tensors(rewritten)}
    moved = {name: names.get(id(tensor), name) for name, tensor in _named_tensors(body)}
    for key in keys:
        found = annotation(body, key.removeprefix(_PREFIX))
        if found is not None:
            data, state = found
            annotate(rewritten, key.removeprefix(_PREFIX), data, tuple(moved.get(name, name) for name in state))


def _named_tensors(body: GraphModule) -> Iterator[tuple[str, Tensor]]:
    yield from body.named_parameters()
    yield from body.named_buffers()
