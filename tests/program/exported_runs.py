"""One training step of a model, and the same step by a program that was saved, in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.helpers.processes import run_in_new_process
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map_only

#: What is told of a step, by name: outputs, inputs after the call, gradients, and the state that the step leaves.
Outcome = dict[str, Any]

#: The helpers bring the operators and containers of the models.
_CHILD = "import partita, tests.program.exported_helpers; from tests.program.exported_runs import run_jobs; run_jobs()"


@dataclass(frozen=True)
class Job:
    """A program that is saved under a name, and the model that it must equal."""

    name: str
    exported: ExportedProgram
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def trained(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
    """One step of training, with a known random state."""
    torch.manual_seed(2)
    leaves = tree_leaves(module(*args, **kwargs))
    told: Outcome = {f"output {at}": _plain(leaf) for at, leaf in enumerate(leaves)}
    told |= {f"input {at}": _plain(leaf) for at, leaf in enumerate(tree_leaves((args, dict(kwargs))))}
    losses = [leaf.float().square().mean() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if losses:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.stack(losses).sum().backward()
        told |= {f"gradient of {name}": _plain(parameter.grad) for name, parameter in module.named_parameters()}
        optimizer.step()
    return told | {f"state {name}": _plain(tensor) for name, tensor in module.state_dict().items()}


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """The names of what is not the same, bit by bit."""
    names = dict.fromkeys((*expected, *found))
    return [name for name in names if not _same(found.get(name, "missing"), expected.get(name, "missing"))]


def differences_in_another_process(jobs: Iterable[Job], folder: Path) -> str:
    """What saved programs do otherwise than their models, as text; none is the wanted answer."""
    written = []
    for job in jobs:
        path = folder / f"{job.name}.pt2"
        torch.export.save(job.exported, path)
        given = _copied((job.args, dict(job.kwargs)))
        written.append((str(path), given, _has_ties(job.model), trained(job.model, job.args, job.kwargs)))
    torch.save(written, folder / "jobs.pt")
    finished = run_in_new_process(_CHILD, folder, folder=Path(__file__).parents[2])
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def run_jobs() -> None:
    """What the other process does: each program is loaded by torch and by Partita, and trained."""

    from partita import Program

    torch.set_num_threads(1)
    for path, given, has_ties, expected in torch.load(Path(sys.argv[1]) / "jobs.pt", weights_only=False):
        modules = {"Partita": Program.of(path, operators=["partita_tests"]).module()}
        if not has_ties:  # torch loads tied weights as two parameters.
            modules["torch"] = torch.export.load(path).module()
        for loader, module in modules.items():
            found = differences(trained(module, *_copied(given)), expected)
            if found:
                print(f"{Path(path).stem}, loaded by {loader}:", *found, sep="\n  ")


def _has_ties(model: nn.Module) -> bool:
    return len([*model.parameters()]) != len([*model.named_parameters(remove_duplicate=False)])


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _copied(values: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, values)


def _same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and bool(first == second)
    return first.dtype is second.dtype and torch.equal(first, second)
