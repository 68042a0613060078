"""Chapter: a compiler that gets one operator wrong, and the operator found by halving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

import partita
from partita.backends import Compiled
from partita.policies import BySize
from partita.treatments import Lower
from partita_cli.demo.splitting import WORDS, Decoder

TITLE = "A compiler with a bug, and where it is"


@dataclass(frozen=True)
class Faulty:
    """Compiles nothing, and rounds products without a bias, of which the model has one, to half precision."""

    name: ClassVar[str] = "faulty"

    def refusal(self, node: Node) -> str | None:
        """It takes everything."""
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """The body, with the fault."""
        for node in filter(_has_no_bias, list(body.graph.nodes)):
            with body.graph.inserting_after(node):
                rounded = body.graph.call_method("bfloat16", (node,))
            with body.graph.inserting_after(rounded):
                widened = body.graph.call_method("float", (rounded,))
            node.replace_all_uses_with(widened, delete_user_cb=lambda user, rounded=rounded: user is not rounded)
        body.recompile()
        return body.forward


def _has_no_bias(node: Node) -> bool:
    return node.target is torch.ops.aten.linear.default and len(node.args) == 2


def show() -> bool:
    """Shows that results differ, and what bisect finds; returns whether that is the operator that was spoilt."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (2, 16))
    program = partita.capture(Decoder(2).eval(), (ids,))
    plan = partita.plan(program, BySize(parts=5), Lower(Faulty()))
    comparison = partita.compare(program, plan.apply(), (ids,), gradients=False, second_call=False)
    print(f"five regions, compiled: {comparison.differences[0] if comparison.differences else 'nothing differs'}\n")
    found = partita.bisect(plan, (ids,), gradients=False, second_call=False, no_grad_call=False)
    print(f"bisected: {str(found).partition(chr(10))[0]}")
    for node in found.nodes:
        print(f"  {node.name}: {node.target}, with the weight {node.args[1]}")
    print("found.reproduce(folder) writes a script with inputs that shows it without Partita.")
    return list(found.nodes) == list(filter(_has_no_bias, program.operators()))
