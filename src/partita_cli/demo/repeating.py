"""Chapter: the equal blocks of a model are found without being named, and each distinct body exists once."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import partita
from partita.policies import Repeats
from partita.treatments import Call
from partita_cli.demo.splitting import WORDS, Decoder

TITLE = "Equal blocks, found by structure and kept once"

_LAYERS = 4


def show() -> bool:
    """Shows the distinct bodies, and the files with and without sharing; returns whether the blocks were found."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (2, 16))
    program = partita.capture(Decoder(_LAYERS).eval(), (ids,))
    plan = partita.plan(program, Repeats(), Call())
    bodies = plan.bodies()
    print(f"{_LAYERS} blocks, found without annotations; the distinct bodies:\n")
    for body in bodies:
        print(f"  {body}")
    shared, separate = plan.apply(), plan.apply(share_bodies=False)
    with TemporaryDirectory() as folder:
        sizes = [_nodes_written(one, Path(folder, "cut.pt2")) for one in (shared, separate)]
    print(f"\nnodes in a file: {sizes[0]:,} with each body once, {sizes[1]:,} with a body for each region")
    comparison = partita.compare(program, shared, (ids,))
    print(f"compared: {comparison}; a compiler gets each body once, too")
    return comparison.equal and sizes[0] < sizes[1] and max(body.calls for body in bodies) == _LAYERS


def _nodes_written(program: partita.Program, path: Path) -> int:
    """How many nodes a file of the program has, in its graph and in all bodies, as it is read again."""
    program.save(path)
    read = partita.Program.of(path)
    modules = {id(one): one for one in read.graph_module.modules() if isinstance(one, torch.fx.GraphModule)}
    return sum(len(one.graph.nodes) for one in modules.values())
