"""Writes a script that shows what differs for the operators of one region, with their inputs, once it has shown it."""

from __future__ import annotations

import copy
import io
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch.fx import GraphModule

from partita._torch.pytrees import leaves_of, map_tensors
from partita._torch.symbolic_shapes import symbols_in
from partita.analysis.nodes import value_of
from partita.analysis.tolerance import Tolerance
from partita.equivalence.ambient import generators_of, random_state, restored_ambient
from partita.equivalence.compare import replay
from partita.equivalence.differences import Comparison
from partita.equivalence.observe import subject_of
from partita.equivalence.reproduction_script import Scripted, observed, script_of
from partita.equivalence.state import snapshot_of
from partita.errors import OptionError
from partita.plans import Plan
from partita.plans.treatment import Treatment
from partita.program.program import Program
from partita.regions import Partition, Region

#: Backends of `Lower` that torch.compile has under the same name.
_OF_TORCH = frozenset({"inductor", "aot_eager", "eager"})
#: Differences that are no values: a script that ends with an error shows them.
_ENDS = frozenset({"exception", "compilation", "crash"})

#: What the operators get in one call: inputs, attributes, whether gradients are recorded, and the name of the call.
_Call: TypeAlias = dict[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """What the plan was compared with: arguments and options; without a tolerance, by that of the plan."""

    args: Sequence[object]
    kwargs: Mapping[str, object]
    gradients: bool = True
    tolerance: Tolerance | None = None


def write_reproduction(
    plan: Plan, asked: Asked, folder: str | os.PathLike[str], *, summary: str, differs: Comparison
) -> str:
    """Writes the script and the inputs of the one region of a plan into a folder; the path of the script.

    It is written if it shows a difference: for the call that differs by itself, or for all calls until then. The state
    of the program and of all generators is as before.
    """
    kinds = {difference.kind for difference in differs.differences}
    tolerance = plan.tolerance if asked.tolerance is None else asked.tolerance
    reason = ""
    with _undone(plan.program, (*asked.args, *asked.kwargs.values())), TemporaryDirectory() as made:
        for calls, body in _tried(plan, asked, differs):
            reason = _eager_error(body, calls)
            scripted = Scripted(body, repr(plan.treatments[0]), tolerance, summary, _named(calls))
            for script, found in () if reason else _scripts(plan, scripted, calls, differs):
                (Path(made) / "reproduce.py").write_text(script, encoding="utf-8")
                torch.save({"calls": calls, "found": found}, Path(made) / "inputs.pt")
                reason = _why_not(Path(made) / "reproduce.py", found, kinds)
                if not reason:
                    return _moved(Path(made), Path(folder))
    raise OptionError(
        "no script is written: the operators by themselves, called as in the model, do not show the difference "
        f"({reason or 'the region is not called with these arguments'})"
    )


def _moved(made: Path, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for file in made.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    return str(folder / "reproduce.py")


def _named(calls: Sequence[_Call]) -> str:
    names = [call["name"] for call in calls]
    return f"one call ({names[0]})" if len(names) == 1 else f"{len(names)} calls ({'; '.join(names)})"


@contextmanager
def _undone(program: Program, arguments: Sequence[object]) -> Iterator[None]:
    """Restores the state, modes and generators that a run of the program changes."""
    subject = subject_of(program)
    roots = [] if subject.root is None else [subject.root]
    random = random_state(generators_of(roots, leaves_of(list(arguments))))
    snapshot = snapshot_of(roots, subject.slots, mutated=subject.mutated)
    try:
        with restored_ambient():
            yield
    finally:
        snapshot.restore()
        random.restore()


# What the operators get


@final
@dataclass
class _Record:
    """Calls the body unchanged, and keeps copies of it and of what it gets in each call."""

    name: str = ""
    calls: list[_Call] = field(default_factory=list)
    body: GraphModule | None = None

    def treat(self, body: GraphModule) -> nn.Module:
        return _Recorded(body, self)

    def announce(self, name: str) -> None:
        self.name = name

    def keep(self, body: GraphModule, args: tuple[Any, ...]) -> None:
        if self.body is None:
            self.body = copy.deepcopy(body)
        # What shares memory does so among the copies, too.
        plain = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), args)
        attributes = dict(_attributes(copy.deepcopy(body)))
        grad = torch.is_grad_enabled()
        self.calls.append({"name": self.name, "inputs": copy.deepcopy(plain), "attributes": attributes, "grad": grad})


class _Recorded(nn.Module):
    def __init__(self, body: GraphModule, record: _Record) -> None:
        super().__init__()
        self.body, self.record = body, record

    def forward(self, *args: Any) -> Any:
        self.record.keep(self.body, args)
        return self.body(*args)


def _tried(plan: Plan, asked: Asked, differs: Comparison) -> Iterator[tuple[list[_Call], GraphModule]]:
    """The body, with the calls that may show the difference: the fewest first."""
    names = list(dict.fromkeys(difference.when for difference in differs.differences))
    for last in names:
        record = _Record()
        recorded = Plan(plan.partition, (record,), plan.puts_back_modes).apply()
        args, kwargs, gradients = asked.args, asked.kwargs, asked.gradients
        replay(plan.program, recorded, args, kwargs, gradients=gradients, last=last, on_call=record.announce)
        if record.body is None:
            continue
        # A difference without a call is the error of a treatment or a compiler, which any call may raise.
        for call in record.calls:
            if call["name"] == last or not last:
                yield [call], record.body
        if len(record.calls) > 1:
            yield record.calls, record.body


def _attributes(body: GraphModule) -> Iterator[tuple[str, Any]]:
    """The modules and tensors that the body owns, as torch alone can store them."""
    for name, module in body.named_children():
        yield name, GraphModule(module, module.graph) if isinstance(module, GraphModule) else module
    yield from (*body.named_parameters(recurse=False), *body.named_buffers(recurse=False))


# Scripts, and whether they show it

_Found: TypeAlias = dict[str, Any] | str


def _scripts(
    plan: Plan, scripted: Scripted, calls: Sequence[_Call], differs: Comparison
) -> Iterator[tuple[str, _Found | None]]:
    """The scripts that may show the difference: one that compiles by torch alone, one with stored results."""
    (treatment,) = plan.treatments
    kinds = {one.kind for one in differs.differences}
    backend = _torch_backend(treatment)
    if backend is not None:
        yield script_of(scripted, backend, dynamic=_dynamic(scripted.body, treatment)), None
    crashes = [str(one) for one in differs.differences if one.kind == "crash"]
    yield script_of(scripted, None), crashes[0] if crashes else _treated_run(scripted.body, treatment, calls, kinds)


def _torch_backend(treatment: Treatment) -> str | None:
    backend = getattr(treatment, "backend", None)
    return backend if isinstance(backend, str) and backend in _OF_TORCH else None


def _dynamic(body: GraphModule, treatment: Treatment) -> bool | None:
    """Sizes that were traced as symbols are symbols for the backend."""
    wanted: bool | None = getattr(treatment, "dynamic", None)
    placeholders = body.graph.find_nodes(op="placeholder")
    return True if wanted is None and any(symbols_in(value_of(node)) for node in placeholders) else wanted


def _treated_run(body: GraphModule, treatment: Treatment, calls: Sequence[_Call], kinds: Set[str]) -> _Found:
    """What is observed of the treated body in these calls; the error as a text if it, or its compiler, raises."""
    own = _body_with(body, calls)
    program = Program.of(own)
    nodes = tuple(node for node in own.graph.nodes if node.op not in ("placeholder", "output", "get_attr"))
    try:
        plan = Plan(Partition(program, [Region("region", nodes)]), (treatment,))
        found = observed(plan.apply().module(), calls, dict(_attributes(own)))
    except Exception as error:
        return _line_of(error)
    failed = [f"{failure.backend} failed: {failure.reason}" for failure in plan.failures]
    return failed[0] if failed and "compilation" in kinds else found


def _body_with(body: GraphModule, calls: Sequence[_Call]) -> GraphModule:
    own = copy.deepcopy(body)
    for name, value in copy.deepcopy(calls[0]["attributes"]).items():
        setattr(own, name, value)
    return own


def _eager_error(body: GraphModule, calls: Sequence[_Call]) -> str:
    """The error of the operators without the treatment; empty if they run."""
    own = _body_with(body, calls)
    try:
        observed(own, calls, dict(_attributes(own)))
    except Exception as error:
        return f"run eagerly, they raise {_line_of(error)}"
    return ""


def _line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _why_not(script: Path, found: _Found | None, kinds: Set[str]) -> str:
    """Why a script does not show differences of these kinds; empty if it does."""
    if isinstance(found, str):
        return "" if kinds & _ENDS else f"treated, they raise {found}"
    if found is None:
        # A fault of a compiler may need a process that has compiled nothing else, and may crash it.
        run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
        if run.returncode == 1 and run.stdout.strip():
            return ""
        last = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
        return "nothing differs" if not run.returncode else "" if kinds & _ENDS else last
    try:
        with redirect_stdout(io.StringIO()):
            runpy.run_path(str(script))
    except SystemExit as end:
        return "" if end.code else "nothing differs"
    except Exception as error:
        return f"the script raises {_line_of(error)}"
    return "nothing differs"
