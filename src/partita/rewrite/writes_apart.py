"""Bodies that leave their inputs alone: what they write is a copy, and its contents are given back at the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import GraphModule

__all__ = ["write_apart"]


def write_apart(body: GraphModule, written: Sequence[int], *, without: Collection[int] = ()) -> None:
    """Makes the contents of the inputs at `written` the last outputs, and drops the outputs at `without`."""
    graph = body.graph
    placeholders = graph.find_nodes(op="placeholder")
    contents = []
    with graph.inserting_after(placeholders[-1]):
        for place in written:
            given = placeholders[place]
            users = tuple(given.users)
            copied = graph.call_function(torch.clone, (given,))
            copied.meta.update(given.meta)
            for user in users:
                user.replace_input_with(given, copied)
            contents.append(copied)
    output = graph.output_node()
    given_back = output.args[0]
    assert isinstance(given_back, tuple | list)
    output.args = ((*(value for place, value in enumerate(given_back) if place not in without), *contents),)
    body.recompile()
