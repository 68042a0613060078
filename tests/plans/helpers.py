"""What the tests of held memory share: measuring what autograd really holds, and programs to measure it on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from partita import Plan, Region
from partita._torch.pytrees import flatten, tensors_in
from partita.plans.memory import SavedBytes, saved_bytes_of
from partita.program.saved_tensors import SavedTensors, bytes_in
from partita.testing.generator.build import build, random_nest_recipe, random_recipe
from partita.testing.generator.draft import Case
from partita.testing.generator.recipe import ALL, Features, Recipe
from partita.treatments import Recompute

#: Functions that nobody knows are never run to see what they save.
KNOWN = replace(ALL, unknown=False, hooks=False)


@dataclass(frozen=True)
class Checkpoint:
    """Recomputes a region by torch's own checkpoint."""

    def treat(self, body: GraphModule) -> nn.Module:
        return _Checkpointed(body)

    def saved_bytes(self, region: Region, saved: SavedTensors) -> SavedBytes | None:
        return saved_bytes_of(region, saved)


class _Checkpointed(nn.Module):
    def __init__(self, body: GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *operands: Any) -> Any:
        return checkpoint(self.body, *operands, use_reentrant=False)


def predicted_when_recomputed(plan: Plan, saved: SavedTensors) -> tuple[int | None, int]:
    """The bytes that a plan of `Recompute` holds in all, and the FLOPs that it adds."""
    outside = [node for node in plan.program.index.nodes if plan.partition.region_of(node) is None]
    held, flops = saved.memory(outside), 0
    for region, treatment in zip(plan.partition, plan.treatments, strict=True):
        assert isinstance(treatment, Recompute)
        holding = saved_bytes_of(region, saved, treatment.kept(region))
        assert holding is not None
        held, flops = held | holding.treated, flops + holding.extra_flops
    return bytes_in(held), flops


def bytes_really_held(module: nn.Module, call: Callable[[], Any]) -> int:
    """What autograd holds when `call` is over and its results are still there, less what `module` owns."""
    packed: list[tuple[weakref.ref[_Packed], Any]] = []

    def pack(tensor: Tensor) -> _Packed:
        stands_for = _Packed()
        packed.append((weakref.ref(stands_for), tensor.untyped_storage()))
        return stands_for

    with saved_tensors_hooks(pack, _never):
        results = call()
    owned = {tensor.untyped_storage()._cdata for tensor in _owned(module)}
    held = {storage._cdata: storage for stands_for, storage in packed if stands_for() is not None}
    del results
    return sum(storage.nbytes() for address, storage in held.items() if address not in owned)


def bytes_alive(module: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """What the history of the results alone keeps alive, less what `module` owns; measured in memory alone."""
    with _Births() as births:
        results = module(**{name: value.clone() for name, value in inputs.items()})
    history = [leaf.grad_fn for leaf in flatten(results).leaves if isinstance(leaf, Tensor)]
    del results
    owned = {tensor.untyped_storage()._cdata for tensor in _owned(module)}
    alive = {address: size for address, (storage, size) in births.seen.items() if not storage.expired()}
    del history
    return sum(size for address, size in alive.items() if address not in owned)


def bytes_alive_when_recomputed(module: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """What is alive when the last recomputation of a backward is over, less what `module` owns, and gradients."""
    births = _RecomputedBirths()
    with births:
        results = module(**{name: value.clone() for name, value in inputs.items()})
    loss = torch.stack([leaf.double().sum() for leaf in flatten(results).leaves if isinstance(leaf, Tensor)]).sum()
    del results
    gradient = torch.ones_like(loss)
    with births:
        loss.backward(gradient)
    owned = {tensor.untyped_storage()._cdata for tensor in _owned(module)}
    assert births.alive is not None
    return sum(size for address, size in births.alive.items() if address not in owned)


def backward_flops(call: Callable[[], Any]) -> int:
    """The FLOPs of the backward from all that `call` gives."""
    return _counted(call, forward=False)


def training_flops(call: Callable[[], Any]) -> int:
    """The FLOPs of `call` and of the backward from all that it gives.

    The counter hooks itself into modules. Where results are kept, what runs again must meet the same hooks as before.
    """
    return _counted(call, forward=True)


def _counted(call: Callable[[], Any], *, forward: bool) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
    with counter if forward else nullcontext():
        results = [leaf for leaf in flatten(call()).leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        with torch.enable_grad():  # A program may leave gradients switched off.
            loss = torch.stack([result.abs().double().sum() for result in dict.fromkeys(results)]).sum()
        with nullcontext() if forward else counter:
            loss.backward()
    return int(counter.get_total_flops())


def random_traced_case(seed: int, *, nests: bool = False, features: Features = KNOWN) -> Case:
    """A generated program whose inputs carry traced values, as capture and Dynamo write them down."""
    recipe = random_nest_recipe(seed, features=features) if nests else random_recipe(seed, features=features)
    return _with_gradients(build(replace(recipe, metadata="val")), recipe)


def _with_gradients(case: Case, recipe: Recipe) -> Case:
    """The generator's own tracer forgets which inputs need gradients."""
    placeholders = case.graph_module.graph.find_nodes(op="placeholder")
    given = flatten((case.args, case.kwargs)).leaves if recipe.pytree else case.args
    by_name = {**dict(zip((node.target for node in placeholders), given, strict=False)), **case.kwargs}
    for node in placeholders:
        traced, real = node.meta.get("val"), by_name.get(str(node.target))
        if isinstance(traced, Tensor) and isinstance(real, Tensor) and real.requires_grad:
            node.meta["val"] = traced.detach().requires_grad_()
    return case


def _owned(module: nn.Module) -> Iterable[Tensor]:
    for part in module.modules():
        tables = (vars(part), part._parameters, part._buffers)
        yield from (value for table in tables for value in table.values() if isinstance(value, Tensor))


class _Births(TorchDispatchMode):
    """The storages of all results, by address; one that is taken again replaces the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result


class _RecomputedBirths(_Births):
    """Storages made with gradients on, and which of them are alive when the last recomputation is over."""

    def __init__(self) -> None:
        super().__init__()
        self._is_recomputing = False
        self.alive: dict[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_backward = torch._C._current_graph_task_id() >= 0
        if torch.is_grad_enabled():  # The backward itself runs without, and so do blocks of a region.
            self._is_recomputing = is_backward
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self._is_recomputing:
            self._is_recomputing = False
            living = ((address, size) for address, (storage, size) in self.seen.items() if not storage.expired())
            self.alive = dict(living)
        return func(*args, **(kwargs or {}))


class _Packed:
    """Stands for a saved tensor."""


def _never(packed: object) -> Tensor:
    raise AssertionError("nobody asked for a backward")


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return 0  # It is the same with and without recomputation.


#: torch 2.13 counts the attention of accelerators only.
_ATTENTION: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
