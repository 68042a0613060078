"""Where an operator comes from: what it calls, the module that it was traced in, and the line of the model's source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.fx import Node

from partita._plain_help import PlainHelp
from partita.plans.report import called_name
from partita.policies.by_module import calls_around
from partita.program.program import Program


@final
@dataclass(frozen=True, slots=True)
class Place(metaclass=PlainHelp):
    """An operator and where it comes from; texts are empty where the tracer, or the file, recorded nothing."""

    node: str
    #: The operator, as the graph calls it.
    calls: str
    #: The path of the innermost module, and its class.
    module: str
    module_class: str
    #: The innermost line outside of torch, as file:line.
    source: str

    def __str__(self) -> str:
        words = [f"{self.node}: {self.calls}"]
        words += [f"in {self.module} ({self.module_class})"] if self.module else []
        words += [f"at {self.source}"] if self.source else []
        return " ".join(words)


def place_of(node: Node, program: Program) -> Place:
    """Where a node of a program comes from."""
    calls = calls_around(node, program.graph_module)
    kind: Any = calls[-1].type if calls else ""
    return Place(
        node=node.name,
        calls=called_name(node),
        module=calls[-1].path if calls else "",
        module_class=str(getattr(kind, "__name__", kind)).rpartition(".")[2],
        source=_source(str(node.meta.get("stack_trace") or "")),
    )


def _source(trace: str) -> str:
    frames: list[tuple[str, str]] = _FRAME.findall(trace)
    own = [frame for frame in frames if _TORCH not in Path(frame[0]).parents] or frames
    return ":".join(own[-1]) if own else ""


_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)
_TORCH = Path(torch.__file__).parent
