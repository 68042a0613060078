"""A script that shows what differs for the operators of one region, with their inputs, and without Partita."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import getsource
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.pytrees import leaves_of, map_tensors
from partita.equivalence.ambient import generators_of, random_state, restored_ambient
from partita.equivalence.observe import subject_of
from partita.equivalence.state import snapshot_of
from partita.errors import OptionError
from partita.plans import Plan
from partita.plans.treatment import Treatment
from partita.program.program import Program
from partita.regions import Partition, Region

#: Backends of `Lower` that torch.compile has under the same name.
_OF_TORCH = frozenset({"inductor", "aot_eager", "eager"})


def write_reproduction(
    plan: Plan,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    folder: str | os.PathLike[str],
    *,
    summary: str,
    grad: bool = True,
) -> str:
    """Writes the script and the inputs of the one region of a plan into a folder; the path of the script.

    The script runs with or without gradients, as `grad` says. The state of the program and of all generators is as
    before.
    """
    (treatment,) = plan.treatments
    with _undone(plan.program, (*args, *kwargs.values())), torch.set_grad_enabled(grad):
        body, inputs = _first_call(plan, args, kwargs)
        backend = _torch_backend(treatment)
        stored: dict[str, Any] = {"inputs": inputs, "attributes": dict(_attributes(body))}
        if backend is None:
            stored["found"] = _treated_run(body, treatment, inputs)
    script = _script(body, backend, plan, summary, grad=grad)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    torch.save(stored, place / "inputs.pt")
    path = place / "reproduce.py"
    path.write_text(script, encoding="utf-8")
    return str(path)


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


@final
@dataclass(frozen=True)
class _Record:
    """Calls the body unchanged, and keeps copies of it and of its inputs, as they are before its first call."""

    calls: list[tuple[GraphModule, tuple[Any, ...]]] = field(default_factory=list)

    def treat(self, body: GraphModule) -> nn.Module:
        return _Recorded(body, self)


class _Recorded(nn.Module):
    def __init__(self, body: GraphModule, record: _Record) -> None:
        super().__init__()
        self.body, self.record = body, record

    def forward(self, *args: Any) -> Any:
        if not self.record.calls:
            self.record.calls.append((copy.deepcopy(self.body), _copies(args)))
        return self.body(*args)


def _first_call(
    plan: Plan, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[GraphModule, tuple[Any, ...]]:
    """The body of the region, and what it is called with."""
    record = _Record()
    module = Plan(plan.partition, (record,)).apply().module()
    module(*_copies(tuple(args)), **_copies(dict(kwargs)))
    if not record.calls:
        raise OptionError("the region is not called with these arguments, so there is nothing to reproduce")
    return record.calls[0]


def _copies(values: Any) -> Any:
    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return map_tensors(copied, values)


def _torch_backend(treatment: Treatment) -> str | None:
    backend = getattr(treatment, "backend", None)
    return backend if isinstance(backend, str) and backend in _OF_TORCH else None


def _treated_run(body: GraphModule, treatment: Treatment, inputs: tuple[Any, ...]) -> dict[str, Tensor] | str:
    """What is observed of the treated body with these inputs; the error as a text if it raises."""
    own = copy.deepcopy(body)
    program = Program.of(own)
    nodes = tuple(node for node in own.graph.nodes if node.op not in ("placeholder", "output", "get_attr"))
    try:
        module = Plan(Partition(program, [Region("region", nodes)]), (treatment,)).apply().module()
        return observed(module, inputs, dict(_attributes(own)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _attributes(body: GraphModule) -> Iterator[tuple[str, Any]]:
    """The modules and tensors that the body owns, as torch alone can store them."""
    for name, module in body.named_children():
        yield name, GraphModule(module, module.graph) if isinstance(module, GraphModule) else module
    yield from (*body.named_parameters(recurse=False), *body.named_buffers(recurse=False))


# The next three functions are part of the script.


def tensors_of(attributes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the attributes and in modules among them, by name."""
    found = {}
    for name, value in attributes.items():
        if isinstance(value, torch.nn.Module):
            found.update({f"{name}.{part}": tensor for part, tensor in value.state_dict(keep_vars=True).items()})
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


def observed(
    function: Callable[..., Any], inputs: Sequence[Any], attributes: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Results of a call from one seed, the inputs and attributes after it, and gradients of a weighted sum, by name."""
    torch.manual_seed(0)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    # A leaf that requires a gradient could not be mutated.
    given = [x.clone() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in leaves]
    result = function(*given)
    results = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, torch.Tensor)]
    state = tensors_of(attributes)
    found = {f"output {place}": x for place, x in enumerate(results)}
    found |= {f"input {place} after the call": x for place, x in enumerate(given) if isinstance(x, torch.Tensor)}
    found |= {f"{name} after the call": x for name, x in state.items()}
    wanted = {f"input {place}": x for place, x in enumerate(leaves) if isinstance(x, torch.Tensor)} | state
    wanted = {name: x for name, x in wanted.items() if x.requires_grad and x.is_leaf}
    ends = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in results if x.requires_grad]
    if ends and wanted:
        totals = [(x.double().flatten() * torch.linspace(1, 2, x.numel(), device=x.device)).sum() for x in ends]
        gradients = torch.autograd.grad(totals, list(wanted.values()), allow_unused=True)
        found |= {f"gradient of {name}": x for name, x in zip(wanted, gradients, strict=True) if x is not None}
    return {name: x.detach().clone() for name, x in found.items()}


def difference(
    name: str, one: torch.Tensor | None, other: torch.Tensor | None, *, relative: float, absolute: float
) -> str | None:
    """What differs by more than the tolerance, in a line."""
    if one is None or other is None:
        return f"{name}: {'only the treatment' if one is None else 'only eager mode'} has one"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{name}: {one.dtype} {tuple(one.shape)} != {other.dtype} {tuple(other.shape)}"
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    if torch.allclose(other, one, rtol=relative, atol=absolute, equal_nan=True):
        return None
    error, largest = (one - other).abs().max(), one.abs().max()
    return f"{name}: differs by up to {error:.3g}, largest element {largest:.3g}"


def _script(body: GraphModule, backend: str | None, plan: Plan, summary: str, *, grad: bool) -> str:
    code = body.graph.python_code("self")
    imports = [_import_of(name, value) for name, value in sorted(code.globals.items())]
    if "partita" in code.src:
        imports.append("import partita  # It registers operators that the body calls.")
    compiled = (
        "body, attributes = with_attributes()\n"
        f'compiled = torch.compile(body, backend="{backend}", fullgraph=True)\n'
        'found = observed(compiled, stored["inputs"], attributes)'
    )
    return _TEMPLATE.format(
        summary=indent(summary.replace('"""', "'''").replace("\\", "/"), "    ").strip(),
        grad=grad,
        imports="\n".join(dict.fromkeys(line for line in imports if line)),
        forward=indent(code.src.strip(), "    "),
        treatment=" ".join(repr(plan.treatments[0]).split()),
        tolerance=f"relative={plan.tolerance.relative}, absolute={plan.tolerance.absolute}",
        found=compiled if backend else 'found = stored["found"]',
        functions="\n\n".join(getsource(function) for function in (tensors_of, observed, difference)),
    )


def _import_of(name: str, value: object) -> str:
    """The line that makes a global name of generated code known."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
    if isinstance(value, float):
        return f'{name} = float("{value}")'
    if value is type(None):
        return f"{name} = type(None)"
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module is None or "<" in qualname or "." in qualname:
        raise OptionError(f"the region calls {value!r}, which a script cannot import; define it at the top of a module")
    return f"from {module} import {qualname} as {name}" if qualname != name else f"from {module} import {name}"


_TEMPLATE = '''"""{summary}

It loads `inputs.pt`, a pickle, from its own folder: the inputs of the first call. Results, inputs and state after the
call and gradients are compared; it ends with status 1 if something differs.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
{imports}


class Body(torch.nn.Module):
{forward}


{functions}

def with_attributes():
    """A new body, with attributes of its own."""
    body, attributes = Body(), copy.deepcopy(stored["attributes"])
    for name, value in attributes.items():
        setattr(body, name, value)
    return body, attributes


stored = torch.load(Path(__file__).with_name("inputs.pt"), weights_only=False)
torch.set_grad_enabled({grad})
body, attributes = with_attributes()
expected = observed(body, stored["inputs"], attributes)
# As the treatment did: {treatment}
{found}
if isinstance(found, str):
    raise SystemExit(found)
lines = [difference(name, expected.get(name), found.get(name), {tolerance}) for name in (expected | found)]
differences = [line for line in lines if line is not None]
print("\\n".join(differences) or "nothing differs")
raise SystemExit(1 if differences else 0)
'''
