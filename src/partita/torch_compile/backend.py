"""The torch.compile backend `partita`: cuts Dynamo's graph and compiles each part with another backend.

`torch.compile(model, backend="partita", options={"policy": ByModule(...), "inner": "inductor"})` finds it by its
entry point; the function can be passed as the backend as well.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.attention import sdpa_kernel

from partita._torch.symbolic_shapes import symbols_in
from partita._torch.toggles import TOGGLES
from partita.analysis.effects.functions import rule_of_function, rule_of_method
from partita.analysis.effects.terms import Effects
from partita.analysis.modes import Mode
from partita.analysis.nodes import has_nested_tensors, is_module_state, value_of
from partita.plans import Plan, plan
from partita.plans.treatment import annotation_suffices, is_treatment
from partita.program.program import Program
from partita.recompute.operators import restore_rng_in_checkpoints
from partita.regions.equal_bodies import has_repeats
from partita.solvers.quotient import ALONE
from partita.torch_compile._torch.backends import (
    apart_from_buckets,
    no_recompute_without_backward,
    numbers_of,
    reset_with_dynamo,
    without_tracing_for_others,
)
from partita.torch_compile._torch.direct_training import refuse_second_backward
from partita.torch_compile.frame_warnings import forget_warnings, warning_of_mismatches
from partita.torch_compile.frames import FramePlan, RunningModel, forget_plans
from partita.torch_compile.numbers import specialize_floats, specialize_sizes, take_numbers_out
from partita.torch_compile.options import BackendOptions, Inner
from partita.torch_compile.peak import compile_to_fit
from partita.torch_compile.piece_borders import Border, Bordered, border_of_graph
from partita.torch_compile.pieces import DeferredTreatment, compile_pieces, lost_backward
from partita.torch_compile.shared_memory import checking_shared_memory
from partita.torch_compile.shared_pieces import piece_key
from partita.torch_compile.steps import Steps, forget_steps, steps_of

log = logging.getLogger(__name__)

#: A parameter; another tensor that a module holds; a tensor of fixed or of symbolic sizes; a number.
InputKind: TypeAlias = Literal["parameter", "buffer", "static", "dynamic", "number"]


def backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A function like `gm` whose regions are compiled by the inner backend; nodes outside regions run eagerly.

    The options are `policy` (by default the blocks that the model repeats are regions, and so is what lies between),
    `treatment` (by default `Call()`), `on_plan`, a function that gets a `FramePlan` for each graph, `inner`, the name
    of a backend or a function from a graph and fake example inputs to a callable (by default "inductor"), and `share`,
    whether equal regions are compiled once, as they are by default with the backends of torch.
    It compiles the regions that are still graphs after their treatment, each with a tuple as output. Where annotations
    suffice for all treatments (`Recompute`), it compiles the whole annotated graph, unless its regions hold everything
    and some are equal. With `peak`, the bytes that a training step may take, it compiles the whole graph so that it
    fits, by `inner` ("inductor" or "aot_eager"), and `on_plan` gets a `JointMemoryPlan`; graphs that are compiled with
    the same mapping of options share the bytes, and `on_plan` gets a `StepMemoryPlan` of steps that have several.
    `rates` are those of the device, `communication` the bytes that data parallelism takes during a step, `optimizer`
    the optimizer or the bytes of its state, and `checkpoints="respect"` recomputes what `torch.utils.checkpoint` marks
    in every plan.
    """
    chosen = BackendOptions.read(options)
    numbers = take_numbers_out(gm)
    specialize_sizes(gm)
    if chosen.peak is None:
        function = _compiled(gm, example_inputs, chosen)
    else:
        function = _fitted(gm, example_inputs, chosen, None if options is None else steps_of(options))
    return function if numbers is None else numbers.beside(function)


def _fitted(
    gm: GraphModule, example_inputs: Sequence[Any], chosen: BackendOptions, steps: Steps | None
) -> Callable[..., Any]:
    """The graph compiled as a whole, so that a training step takes `peak` bytes."""
    assert chosen.peak is not None
    if chosen.inner == "inductor":
        specialize_floats(gm)
    checked = checking_shared_memory(Program(gm), example_inputs)
    function = checked(
        compile_to_fit(
            gm,
            example_inputs,
            peak=chosen.peak,
            inner=chosen.inner,
            rates=chosen.rates,
            communication=chosen.communication,
            optimizer=chosen.optimizer,
            checkpoints=chosen.checkpoints,
            on_plan=chosen.on_plan,
            steps=steps,
        )
    )
    reset_with_dynamo(backend)
    return function


def input_kinds(body: GraphModule) -> tuple[InputKind, ...]:
    """The kind of each input of a graph that the backend `partita` gives to an inner backend, in order.

    Modules hold parameters and buffers: they are the same tensors in every call unless the user replaces them. The
    other tensors are new ones.
    """
    return tuple(map(_kind, body.graph.find_nodes(op="placeholder")))


def _kind(node: Node) -> InputKind:
    value = value_of(node)
    if is_module_state(node):
        return "parameter" if isinstance(value, nn.Parameter) else "buffer"
    if not isinstance(value, Tensor):
        return "number"
    return "dynamic" if symbols_in(value) else "static"


def _compiled(gm: GraphModule, example_inputs: Sequence[Any], chosen: BackendOptions) -> Callable[..., Any]:
    model = RunningModel(gm)
    inner = _CountedBodies(chosen.inner_backend(), numbers_of(gm), specializes_floats=chosen.inner == "inductor")
    begin = time.perf_counter()
    # Dynamo guards on the grad mode, and records the end of a no_grad block as setting that mode, not as restoring it.
    program = Program(gm, caller=Mode(grad=torch.is_grad_enabled()), frame=model.frame)
    decided, checked = plan(program, chosen.policy, chosen.treatment), checking_shared_memory(program, example_inputs)
    with _annotated(decided, example_inputs):
        compiles_whole = _suffice_annotations(decided, chosen.treatment)
        lost = lost_backward(gm) if compiles_whole else None
        if lost is not None:
            log.warning("the graph %s; it runs uncompiled", lost)
            function = _uncompiled(decided)
        elif compiles_whole and not (chosen.shares and _are_all_in_repeats(decided)):
            border, compiled = border_of_graph(gm), inner(gm, example_inputs)
            function = compiled if border == Border() else Bordered(compiled, border)
        else:
            with apart_from_buckets():
                function = _compile_in_pieces(gm, decided, inner, example_inputs, shares=chosen.shares)
    path = model.frame.paths[0] if model.frame.paths else ""
    report = FramePlan(decided, path, chosen.policy, time.perf_counter() - begin, len(inner.bodies))
    log.debug("%r: %s", report, ", ".join(region.name for region in decided.partition))
    model.record(report)
    reset_with_dynamo(backend)
    if chosen.on_plan is not None:
        chosen.on_plan(report)
    return warning_of_mismatches(checked(function), model, report)


def _forget_frames() -> None:
    forget_plans()
    forget_warnings()
    forget_steps()


# torch.compiler.reset() calls this attribute of backends that have it.
backend.reset = _forget_frames  # type: ignore[attr-defined]


def _suffice_annotations(decided: Plan, option: object) -> bool:
    """Whether the whole graph is compiled, with marks; also one without a region, next to others of its model."""
    if decided.treatments:
        return all(map(annotation_suffices, decided.treatments))
    possible = list(option.values()) if isinstance(option, Mapping) else [option]
    return bool(possible) and all(is_treatment(one) and annotation_suffices(one) for one in possible)


def _are_all_in_repeats(decided: Plan) -> bool:
    """Whether compiling in pieces saves work and leaves nothing uncompiled: some regions are equal, and hold it all."""
    return not decided.excluded() and has_repeats(decided.partition)


@final
class _CountedBodies:
    """The inner backend, which notes how many different bodies it compiles."""

    def __init__(self, inner: Inner, numbers: Collection[str], *, specializes_floats: bool) -> None:
        self._inner, self._numbers, self._specializes_floats = inner, numbers, specializes_floats
        self.bodies: set[object] = set()

    def __call__(self, body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        key = piece_key(body, inputs)
        self.bodies.add(len(self.bodies) if key is None else key)
        if self._specializes_floats:
            specialize_floats(body)
        with without_tracing_for_others(self._numbers, body):
            function = self._inner(body, inputs)
        if function is body or getattr(function, "__self__", None) is body:
            # Nothing is compiled, as by the backend "eager".
            restore_rng_in_checkpoints(body)
            return body if function is body else body.forward
        refuse_second_backward(function)
        return function


def _compile_in_pieces(
    gm: GraphModule, decided: Plan, inner: Inner, example_inputs: Sequence[Any], *, shares: bool
) -> Callable[..., Any]:
    if decided.program.effects.fences and _enters_transforms(gm):
        # Between the nodes that enter and leave a transform tensors are wrapped; compilers do not support these.
        log.warning("the graph enters torch.func transforms; its parts run uncompiled")
        return _uncompiled(decided)
    if _divides_kernel_choice(decided):
        # Compiled code chooses its kernels when it is compiled; in another piece it would choose others.
        log.warning("the graph sets kernels of attention for nodes of another region; its parts run uncompiled")
        return _uncompiled(decided)
    if has_nested_tensors(gm.graph):
        # The symbol that stands for the lengths of a nested tensor has no value with which a piece could be traced.
        log.warning("the graph has nested tensors; its parts run uncompiled")
        return _uncompiled(decided)
    deferred = replace(decided, treatments=tuple(map(DeferredTreatment, decided.treatments)), puts_back_modes=False)
    cut, progress = deferred.apply().graph_module, decided.compilations.progress
    return compile_pieces(cut, gm, inner, example_inputs, shares=shares, progress=progress)


def _divides_kernel_choice(decided: Plan) -> bool:
    """Whether an `sdpa_kernel` block of the model, which sets kernels and puts back others, is not in one region."""
    nodes, number, owner = decided.program.index.nodes, decided.program.index.number, decided.partition.owner
    calls = Counter(owner[number[node]] for node in nodes if _name_in_attention(node) == _SETS_KERNELS)
    if any(count % 2 for count in calls.values()) or (ALONE in calls and decided.treatments):
        return True
    named = (node for node in nodes if _name_in_attention(node) == "_backend_from_string")
    return any(owner[number[node]] != owner[number[user]] for node in named for user in node.users)


def _name_in_attention(node: Node) -> str:
    is_its = getattr(node.target, "__module__", None) == sdpa_kernel.__module__
    return getattr(node.target, "__name__", "") if is_its else ""


_SETS_KERNELS = "_sdpa_kernel"


def _enters_transforms(gm: GraphModule) -> bool:
    """Whether a node of the graph or of a body in it enters a transform or runs autograd.

    A body that ends with gradients switched on, as after a `no_grad` block, is a fence as well, but compiles.
    """
    nodes = (node for one in gm.modules() if isinstance(one, GraphModule) for node in one.graph.nodes)
    calls = (node for node in nodes if node.op in ("call_function", "call_method") and node.target not in TOGGLES)
    return any(_own_effects(node).fences for node in calls if _name_in_attention(node) != _SETS_KERNELS)


def _own_effects(node: Node) -> Effects:
    target = node.target
    return (rule_of_method(target) if isinstance(target, str) else rule_of_function(target)).usual


def _uncompiled(decided: Plan) -> Callable[..., Any]:
    applied = decided.apply().graph_module
    restore_rng_in_checkpoints(applied)
    return applied


@contextmanager
def _annotated(decided: Plan, example_inputs: Sequence[Any]) -> Iterator[None]:
    """Writes the marks of a plan into its graph, which the backend owns; the graph or its parts are compiled inside."""
    marks = decided.marks() if _needs_backward(example_inputs) else _for_inference(decided.marks())
    for node, own in marks.items():
        node.meta.update(own)
    # The key of torch's cache of compiled graphs ignores metadata: without the tag, another plan would get stale code.
    config: Any = torch.compiler.config
    tagged = config.patch(cache_key_tag=f"{config.cache_key_tag}partita:{digest_of_marks(marks)}")
    with tagged, no_recompute_without_backward(decided.program.graph_module):
        yield


def _needs_backward(example_inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)


def _for_inference(marks: Mapping[Node, Mapping[str, object]]) -> dict[Node, dict[str, object]]:
    """The marks without those for a backward: torch 2.13 refuses to recompute RNG operators where there is none."""
    return {node: {key: own[key] for key in own if key not in _BACKWARD_KEYS} for node, own in marks.items()}


_BACKWARD_KEYS = ("recompute", "ac_graph_id")


def digest_of_marks(marks: Mapping[Node, Mapping[str, object]]) -> str:
    """A digest of the marks that is the same for equal plans in every process.

    Of the numbers of regions only the order counts, since numbering continues from plan to plan.
    """
    order: dict[object, int] = {}
    lines = []
    for node, own in marks.items():
        for key, value in own.items():
            shown = order.setdefault(value, len(order)) if isinstance(value, int) and key == "ac_graph_id" else value
            lines.append(f"{node.name} {key} {shown}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
