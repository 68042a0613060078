"""Compiles a graph of Dynamo with a partitioner of joint graphs of our own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from partita._torch.fx.lazy_graph_module import take_inputs_in_a_list
from partita._torch.operator_schemas import flattens_inputs
from partita.torch_compile._torch.backends import adopt_origin, find_backend, sources_of


def compile_with_partitioner(
    gm: GraphModule, inputs: Sequence[Any], partition: Callable[..., Any] | None, *, inner: str
) -> Callable[..., Any]:
    """`gm` compiled by Inductor or `aot_eager`; joint graphs are cut by `partition`.

    Inductor's reuse of dead buffers keeps memory allocated that the plan counts as free (torch 2.11): identical plans
    peak higher with it, and run no faster. So it is switched off.
    """
    if inner == "aot_eager":
        return _compiled_ahead(gm, inputs, partition)
    from functorch.compile import config as settings

    compile_fx: Any = find_backend("inductor")
    if partition is None:
        plain: Callable[..., Any] = compile_fx(gm, list(inputs))
        return plain
    patches: dict[str, Any] = {"custom_partitioner_fn": partition, "allow_buffer_reuse": False}
    # AOTAutograd's cache would skip the partitioner, and the step would have no plan; Inductor's cache still serves.
    with settings.patch(enable_autograd_cache=False):
        function: Callable[..., Any] = compile_fx(gm, list(inputs), config_patches=patches)
        return function


def _compiled_ahead(gm: GraphModule, inputs: Sequence[Any], partition: Callable[..., Any] | None) -> Callable[..., Any]:
    """What the backend `aot_eager` makes of `gm`, by this partitioner."""
    from functorch.compile import aot_module_simplified, default_partition
    from torch._dynamo.utils import counters

    # By this DDP's compiler sees that the graph of a bucket has a backward to compile, and keeps what that needs.
    counters["aot_autograd"]["total"] += 1
    cut = default_partition if partition is None else partition
    made = aot_module_simplified(
        gm,
        list(inputs),
        _boxed,
        torch.compiler.disable(_boxed_backward),
        partition_fn=cut,
        keep_inference_input_mutations=True,
    )
    function: Callable[..., Any] = torch.compiler.disable(made)
    return function


def _boxed(graph: GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """What runs a graph of AOTAutograd; each saved value is freed after its last use, not when the backward ends."""
    from functorch.compile import make_boxed_func

    take_inputs_in_a_list(graph.graph)
    graph.recompile()
    forward = graph.forward
    if not flattens_inputs(graph.graph):
        unboxed: Callable[..., Any] = make_boxed_func(forward)
        return unboxed

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _boxed_backward(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The same for a backward, which may run while a compiled frame does."""
    run: Callable[..., Any] = torch.compiler.disable(_boxed(graph, inputs))
    return run


def copied_graph(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """A module with a copy of the graph of `gm`, and the same attributes."""
    copied = GraphModule(gm, copy.deepcopy(gm.graph))
    adopt_origin(copied, gm, sources=sources_of(gm), args=inputs)
    return copied
