"""A script that shows what differs for the operators of one region, with their inputs, and without Partita."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.pytrees import map_tensors
from partita.errors import OptionError
from partita.plans import Plan
from partita.plans.treatment import Treatment
from partita.program.program import Program
from partita.regions import Partition, Region

#: Backends of `Lower` that torch.compile has under the same name.
_OF_TORCH = frozenset({"inductor", "aot_eager", "eager"})


def write_reproduction(
    plan: Plan, args: Sequence[object], kwargs: Mapping[str, object], folder: str | os.PathLike[str], *, summary: str
) -> str:
    """Writes the script and the inputs of the one region of a plan into a folder; the path of the script."""
    (treatment,) = plan.treatments
    body, inputs = _first_call(plan, args, kwargs)
    backend = _torch_backend(treatment)
    stored: dict[str, Any] = {"inputs": inputs, "attributes": dict(_attributes(body))}
    if backend is None:
        stored["found"], stored["found_inputs"] = _treated_result(body, treatment, inputs)
    script = _script(body, backend, plan, summary)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    torch.save(stored, place / "inputs.pt")
    path = place / "reproduce.py"
    path.write_text(script, encoding="utf-8")
    return str(path)


@final
@dataclass(frozen=True)
class _Record:
    """Calls the body unchanged, and keeps it with copies of the inputs of its first call."""

    calls: list[tuple[GraphModule, tuple[Any, ...]]] = field(default_factory=list)

    def treat(self, body: GraphModule) -> nn.Module:
        return _Recorded(body, self)


class _Recorded(nn.Module):
    def __init__(self, body: GraphModule, record: _Record) -> None:
        super().__init__()
        self.body, self.record = body, record

    def forward(self, *args: Any) -> Any:
        if not self.record.calls:
            self.record.calls.append((self.body, _copies(args)))
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


def _treated_result(body: GraphModule, treatment: Treatment, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """What the treated body returns for these inputs, and leaves in them; the error as a text if it raises."""
    program, given = Program.of(body), _copies(inputs)
    nodes = tuple(node for node in body.graph.nodes if node.op not in ("placeholder", "output", "get_attr"))
    try:
        module = Plan(Partition(program, [Region("region", nodes)]), (treatment,)).apply().module()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found = module(*given)
        return map_tensors(Tensor.detach, found), map_tensors(Tensor.detach, given)
    except Exception as error:
        return f"{type(error).__name__}: {error}", given


def _attributes(body: GraphModule) -> Iterator[tuple[str, Any]]:
    """The modules and tensors that the body owns, as torch alone can store them."""
    for name, module in body.named_children():
        yield name, GraphModule(module, module.graph) if isinstance(module, GraphModule) else module
    for name, tensor in (*body.named_parameters(recurse=False), *body.named_buffers(recurse=False)):
        yield name, tensor.detach()


def _script(body: GraphModule, backend: str | None, plan: Plan, summary: str) -> str:
    code = body.graph.python_code("self")
    imports = [_import_of(name, value) for name, value in sorted(code.globals.items())]
    if "partita" in code.src:
        imports.append("import partita  # It registers operators that the body calls.")
    found = f'torch.compile(body, backend="{backend}", fullgraph=True)(*found_inputs)' if backend else 'stored["found"]'
    return _TEMPLATE.format(
        summary=indent(summary.replace('"""', "'''").replace("\\", "/"), "    ").strip(),
        imports="\n".join(dict.fromkeys(line for line in imports if line)),
        forward=indent(code.src.strip(), "    "),
        treatment=" ".join(repr(plan.treatments[0]).split()),
        relative=plan.tolerance.relative,
        absolute=plan.tolerance.absolute,
        found=found,
        gradients="True" if backend else "False",
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

It loads `inputs.pt`, a pickle, from its own folder: the inputs of the first call. Outputs, mutated inputs and gradients
are compared; it ends with status 1 if something differs.
"""

from pathlib import Path

import torch
{imports}


class Body(torch.nn.Module):
{forward}


def copied(values):
    return [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in values]


def tensors(value):
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [x for x in values if isinstance(x, torch.Tensor)]


def gradients(outputs, inputs):
    """The gradients of all inputs, from a sum of all outputs."""
    outputs = [x for x in tensors(outputs) if x.requires_grad]
    inputs = [x for x in tensors(inputs) if x.requires_grad]
    if not outputs or not inputs:
        return []
    total = sum(x.double().sum() for x in outputs)
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


def differs(one, other):
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{{one.dtype}} {{tuple(one.shape)}} != {{other.dtype}} {{tuple(other.shape)}}"
    one, other = one.detach(), other.detach()
    if not (one.is_floating_point() or one.is_complex()):
        wrong = int((one != other).sum())
        return f"{{wrong}} elements differ" if wrong else ""
    if torch.allclose(one, other, rtol={relative}, atol={absolute}, equal_nan=True):
        return ""
    error = (one - other).abs().nan_to_num(nan=float("inf")).max()
    return f"differs by up to {{error:.3g}}, largest element {{one.abs().max():.3g}}"


stored = torch.load(Path(__file__).with_name("inputs.pt"), weights_only=False)
body = Body()
for name, value in stored["attributes"].items():
    setattr(body, name, value)
expected_inputs, found_inputs = copied(stored["inputs"]), copied(stored["inputs"])
torch.manual_seed(0)
expected = body(*expected_inputs)
torch.manual_seed(0)
# As the treatment did: {treatment}
found = {found}
if isinstance(found, str):
    raise SystemExit(found)
found_inputs = stored.get("found_inputs", found_inputs)
pairs = [("output", *pair) for pair in zip(tensors(expected), tensors(found), strict=True)]
pairs += [("input", *pair) for pair in zip(tensors(expected_inputs), tensors(found_inputs), strict=True)]
if {gradients}:
    ones, others = gradients(expected, expected_inputs), gradients(found, found_inputs)
    pairs += [("gradient", *pair) for pair in zip(ones, others, strict=True)]
found = [(kind, number, differs(one, other)) for number, (kind, one, other) in enumerate(pairs)]
lines = [f"{{kind}} {{number}}: {{how}}" for kind, number, how in found if how]
print(*lines, sep="\\n")
raise SystemExit(1 if lines else 0)
'''
