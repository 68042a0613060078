"""The text of a script that runs the operators of one region eagerly and as a treatment did, without Partita."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getsource
from textwrap import indent
from types import ModuleType
from typing import Any, final

import torch
from torch.fx import GraphModule

from partita.analysis.tolerance import Tolerance
from partita.errors import OptionError


@final
@dataclass(frozen=True, slots=True)
class Scripted:
    """What a script is made of, its inputs aside: the operators, what was done to them, and what it says about it."""

    body: GraphModule
    treatment: str
    tolerance: Tolerance
    summary: str
    #: In words, which calls of the comparison the inputs come from.
    calls: str


def script_of(scripted: Scripted, backend: str | None, *, dynamic: bool | None = None) -> str:
    """The script; it compiles by a backend of torch, or without one compares with results that are stored."""
    graph = copy.deepcopy(scripted.body.graph)
    for node in graph.nodes:
        node.type = None  # An annotation, maybe a text that only the model's module can resolve.
    code = graph.python_code("self")
    imports = [_import_of(name, value) for name, value in sorted(code.globals.items())]
    if "partita" in code.src:
        imports.append("import partita  # It registers operators that the body calls.")
    compiled = (
        f'attributes = copy.deepcopy(stored["calls"][0]["attributes"])\n'
        f'compiled = torch.compile(body_with(attributes), backend="{backend}", fullgraph=True, dynamic={dynamic})\n'
        'found = observed(compiled, stored["calls"], attributes)'
    )
    functions = (tensors_of, inputs_of, seen_in, observed, difference)
    return _TEMPLATE.format(
        summary=indent(scripted.summary.replace('"""', "'''").replace("\\", "/"), "    ").strip(),
        calls=scripted.calls,
        imports="\n".join(dict.fromkeys(line for line in imports if line)),
        forward=indent(code.src.strip(), "    "),
        treatment=" ".join(scripted.treatment.split()),
        tolerance=f"relative={scripted.tolerance.relative}, absolute={scripted.tolerance.absolute}",
        found=compiled if backend else 'found = stored["found"]',
        functions="\n\n".join(getsource(function) for function in functions),
    )


# The next functions are part of the script.


def tensors_of(attributes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the attributes and in modules among them, by name."""
    found = {}
    for name, value in attributes.items():
        if isinstance(value, torch.nn.Module):
            found.update({f"{name}.{part}": tensor for part, tensor in value.state_dict(keep_vars=True).items()})
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


def inputs_of(stored: Sequence[Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Copies that share memory as the stored inputs do, and by name the leaves that collect their gradients.

    A leaf that requires a gradient could not be mutated, so the call gets copies, or views of a copy, of the leaf.
    """
    given: list[Any] = copy.deepcopy(list(stored))
    leaves: dict[str, torch.Tensor] = {}
    shared: dict[int, list[int]] = {}
    for place, x in enumerate(given):
        if torch.is_grad_enabled() and isinstance(x, torch.Tensor):
            plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided and x.numel()
            shared.setdefault(x.untyped_storage().data_ptr() if plain else id(x), []).append(place)
    for places in shared.values():
        distinct = {id(given[place]): given[place] for place in places}
        one = next(iter(distinct.values()))
        if not any(x.requires_grad for x in distinct.values()):
            continue
        if len(distinct) == 1 and one.clone().stride() == one.stride():
            leaves[f"input {places[0]}"], new = one, {id(one): one.clone()}
        elif len({x.dtype for x in distinct.values()}) == 1:
            memory = one.untyped_storage()
            leaf = torch.empty(0, dtype=one.dtype, device=one.device)
            leaf.set_(memory, 0, (memory.nbytes() // one.element_size(),), (1,)).requires_grad_()
            leaves[f"the memory of input{'s' * (len(places) > 1)} {', '.join(map(str, places))}"] = leaf
            base = leaf.clone()
            views = {key: base.as_strided(x.shape, x.stride(), x.storage_offset()) for key, x in distinct.items()}
            new = {key: view if distinct[key].requires_grad else view.detach() for key, view in views.items()}
        else:
            leaves |= {f"input {place}": given[place] for place in places if given[place].requires_grad}
            continue
        for place in places:
            given[place] = new[id(given[place])]
    return given, leaves


def seen_in(function: Callable[..., Any], inputs: Sequence[Any], state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Results of a call from one seed, what it left in inputs, state and the generator, and gradients, by name."""
    torch.manual_seed(0)
    given, leaves = inputs_of(inputs)
    result = function(*given)
    found: dict[str, Any] = {}
    memory: dict[Any, str] = {}
    for place, x in enumerate(given):
        if isinstance(x, torch.Tensor):
            found[f"input {place} after the call"] = x
            if x.layout is torch.strided and x.numel():
                memory.setdefault(x.untyped_storage().data_ptr(), f"shares memory with input {place}")
    results = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, torch.Tensor)]
    found = {f"output {place}": x for place, x in enumerate(results)} | found
    for place, x in enumerate(results):
        found[f"requires_grad of output {place}"] = x.requires_grad
        if x.layout is torch.strided and x.numel():
            strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
            found[f"strides of output {place}, without those of single elements"] = strides
            alone = f"shares memory with output {place}"
            found[f"memory of output {place}"] = memory.setdefault(x.untyped_storage().data_ptr(), alone)
    found |= {f"{name} after the call": x for name, x in state.items()}
    found["random state after the call"] = torch.get_rng_state()
    wanted = leaves | {name: x for name, x in state.items() if x.requires_grad and x.is_leaf}
    ends = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in results if x.requires_grad]
    if ends and wanted:
        totals = [(x.double().flatten() * torch.linspace(1, 2, x.numel(), device=x.device)).sum() for x in ends]
        gradients = torch.autograd.grad(totals, list(wanted.values()), allow_unused=True)
        found |= {f"gradient of {name}": x for name, x in zip(wanted, gradients, strict=True) if x is not None}
    return {name: x.detach().clone() if isinstance(x, torch.Tensor) else x for name, x in found.items()}


def observed(
    function: Callable[..., Any], calls: Sequence[dict[str, Any]], attributes: dict[str, Any]
) -> dict[str, Any]:
    """All that is seen in calls that are made one after the other, each with the state that it had in the model."""
    found: dict[str, Any] = {}
    state = tensors_of(attributes)
    for call in calls:
        with torch.no_grad():
            for name, x in tensors_of(call["attributes"]).items():
                if not torch.equal(state[name], x):
                    state[name].copy_(x)
        with torch.set_grad_enabled(call["grad"]):
            seen = seen_in(function, call["inputs"], state)
        found |= {f"{name} ({call['name']})" if len(calls) > 1 else name: x for name, x in seen.items()}
    return found


def difference(name: str, one: Any, other: Any, *, relative: float, absolute: float) -> str | None:
    """What differs by more than the tolerance, in a line."""
    if one is None or other is None:
        return f"{name}: {'only the treatment' if one is None else 'only eager mode'} has one"
    if not isinstance(one, torch.Tensor):
        return f"{name}: {one} != {other}" if one != other else None
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{name}: {one.dtype} {tuple(one.shape)} != {other.dtype} {tuple(other.shape)}"
    if name.startswith("random state"):
        return None if torch.equal(one, other) else f"{name}: more, fewer or other random numbers"
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    if torch.allclose(other, one, rtol=relative, atol=absolute, equal_nan=True):
        return None
    error, largest = (one - other).abs().max(), one.abs().max()
    return f"{name}: differs by up to {error:.3g}, largest element {largest:.3g}"


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

It loads `inputs.pt`, a pickle, from its own folder: what the operators get in {calls}.
Results, inputs and state after the call, memory that is shared, random numbers and gradients are compared; it ends
with status 1 if something differs.
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

def body_with(attributes):
    """A new body with these attributes."""
    body = Body()
    for name, value in attributes.items():
        setattr(body, name, value)
    return body


stored = torch.load(Path(__file__).with_name("inputs.pt"), weights_only=False)
attributes = copy.deepcopy(stored["calls"][0]["attributes"])
expected = observed(body_with(attributes), stored["calls"], attributes)
# As the treatment did: {treatment}
{found}
if isinstance(found, str):
    raise SystemExit(found)
lines = [difference(name, expected.get(name), found.get(name), {tolerance}) for name in (expected | found)]
differences = [line for line in lines if line is not None]
print("\\n".join(differences) or "nothing differs")
raise SystemExit(1 if differences else 0)
'''
