"""Exported models lowered, beside torch.compile of the same module: measured in processes of their own."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita import Program, plan
from partita.policies import ByCapability
from partita.treatments import Lower

__all__ = ["call_overhead", "lowered_model"]

_CALLS = 2_000
_TURNS = 9


def lowered_model(model: str, way: str, *, refused: bool) -> dict[str, float]:
    """The CPU seconds to the first result and of one call after that, without gradients, with an empty cache.

    `way` is "partita" or "torch.compile". Where operators are refused, these are the same for both: Partita leaves them
    outside, Dynamo breaks the graph at them.
    """
    with tempfile.TemporaryDirectory() as cache, torch.no_grad():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        _start_toolchain()
        module, args = _EXPORTED[model]()
        kinds = _refused_kinds(module) if refused else frozenset()
        start, began = _cpu_seconds(), time.perf_counter()
        called = _WAYS[way](module, kinds)
        called(*args)
        first, first_wall = _cpu_seconds() - start, time.perf_counter() - began
        return {"first": first, "first wall": first_wall, "steady": _steady(called, args)}


def call_overhead(inputs: int) -> dict[str, float]:
    """The seconds of one call of a lowered region, and of the compiled function itself, in inference."""
    module = _sum(inputs)
    args = tuple(torch.ones(8, 8) for _ in range(inputs))
    with torch.no_grad():
        lowered = plan(Program.of(module), ByCapability(lambda node: None), Lower("inductor", strict=True)).apply()
        (region,) = (child for child in lowered.module().children() if hasattr(child, "lowering"))
        region(*args)
        compiled = region._variants._functions[0].function
        return {"region": _steady(region, args), "function": _steady(compiled, args)}


def _sum(inputs: int) -> GraphModule:
    graph = Graph()
    first, *others = [graph.placeholder(f"x_{place}") for place in range(inputs)]
    total = graph.call_method("sin", (first,))
    for other in others:
        total = graph.call_function(torch.add, (total, other))
    graph.output((total,))
    return GraphModule(nn.Module(), graph)


def _steady(called: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """The least of the means of several turns, in wall seconds: what interrupts a turn only adds."""
    called(*args)
    turns = []
    for _ in range(_TURNS):
        start, calls = time.perf_counter(), 0
        while calls < _CALLS and (calls < 5 or time.perf_counter() - start < 0.5):
            called(*args)
            calls += 1
        turns.append((time.perf_counter() - start) / calls)
    return min(turns)


def _cpu_seconds() -> float:
    """Of this process and of the compilers that it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _start_toolchain() -> None:
    """A process looks for its compiler, and for what the machine can do, once; that is nobody's cost."""
    torch.compile(lambda x: x + 1, fullgraph=True)(torch.ones(2))
    torch.compiler.reset()


def _by_partita(module: GraphModule, refused: frozenset[Any]) -> Callable[..., Any]:
    def refusal(node: Node) -> str | None:
        return "refused" if node.target in refused else None

    return plan(Program.of(module), ByCapability(refusal), Lower("inductor")).apply().module()


def _by_torch(module: GraphModule, refused: frozenset[Any]) -> Callable[..., Any]:
    broken = copy.deepcopy(module)
    outside = {target: torch.compiler.disable(_called(target)) for target in refused}
    for node in broken.graph.nodes:
        if node.target in outside:
            node.target = outside[node.target]
    broken.recompile()
    return torch.compile(broken, fullgraph=not refused)


def _called(target: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return call


_WAYS: dict[str, Callable[[GraphModule, frozenset[Any]], Callable[..., Any]]] = {
    "partita": _by_partita,
    "torch.compile": _by_torch,
}


def _refused_kinds(module: GraphModule) -> frozenset[Any]:
    """Kinds of operators that make up about a tenth of all, rare ones first, so that there are several."""
    counts: dict[Any, int] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("aten."):
            counts[node.target] = counts.get(node.target, 0) + 1
    total, chosen, held = sum(counts.values()), [], 0
    for target, count in sorted(counts.items(), key=lambda item: (item[1], str(item[0]))):
        if held + count <= total / 10 and count > 1:
            chosen.append(target)
            held += count
    return frozenset(chosen)


def _llama() -> tuple[GraphModule, tuple[Any, ...]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=128,
        use_cache=False,
    )
    return _exported(LlamaForCausalLM(config).eval())


def _bert() -> tuple[GraphModule, tuple[Any, ...]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=1024
    )
    return _exported(BertModel(config).eval())


def _exported(model: nn.Module) -> tuple[GraphModule, tuple[Any, ...]]:
    tokens = torch.arange(64).reshape(1, 64)
    module = torch.export.export(model, (tokens,), strict=False).module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module, (tokens,)


_EXPORTED = {"Llama": _llama, "BERT": _bert}
