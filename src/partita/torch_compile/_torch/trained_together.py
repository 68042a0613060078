"""Several compiled regions that train, recorded by autograd as one node, as torch records a whole compiled graph.

The node runs the compiled forwards in their order and the compiled backwards in the reverse one. It sums the gradients
of a value that several regions read in the order in which the engine of autograd does, so that the bits are the same
unless something that runs after the regions reads the value as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from partita._torch.functorch import count_levels
from partita.torch_compile._torch.direct_calls import Boxed
from partita.torch_compile._torch.direct_training import (
    Expected,
    Function,
    TrainedFunction,
    code_of,
    has_gradient,
    in_context_of_backward,
    is_unusual_backward,
    unsafe_view,
)
from partita.torch_compile._torch.unused_gradients import HookedInputs


@final
@dataclass(frozen=True, slots=True)
class RegionCall:
    """A call of a region that has one result with a gradient, and the places of its arguments.

    Places are among the inputs of all calls, which come first, and the results of one call after the other.
    """

    trained: TrainedFunction
    args: tuple[int, ...]


def recorded_together(calls: Sequence[RegionCall], *, input_count: int, returned: Sequence[int]) -> Function:
    """A function that runs these calls in order and returns the values at the places that are `returned`.

    The gradient of each of these, if it has one, must flow through every call. At first each call is recorded alone, as
    it stays where a parameter has a hook that uses up its gradient, which would be held longer. So it is, too, while
    hooks on saved tensors are set: one node has them packed after all forwards and unpacked before all backwards, and
    what they move to another device would be on this one at the same time.
    """
    is_recording = torch.is_grad_enabled
    hooks_on_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks
    run = _Run(tuple(calls), input_count, tuple(returned))
    direct = run.directly()
    apply: Function | None = None

    def call(*args: Any) -> Sequence[Any]:
        nonlocal apply
        if apply is None:
            outputs = run.call_each(*args)
            apply = direct.call_each if any(map(_frees_gradient, args)) else _applied(run, args)
            return outputs
        if count_levels() or not is_recording():
            return run.call_each(*args)
        if hooks_on_saved_tensors(False) is not None:
            return direct.call_each(*args)
        return apply(*args)

    return call


@final
@dataclass(frozen=True, slots=True)
class _Run:
    calls: tuple[RegionCall, ...]
    input_count: int
    returned: tuple[int, ...]

    def call_each(self, *args: Any) -> list[Any]:
        """The returned values, of calls that are recorded one by one."""
        values = list(args)
        for call in self.calls:
            values.extend(call.trained.function(*[values[place] for place in call.args]))
        return [values[place] for place in self.returned]

    def directly(self) -> _Run:
        """The same, with a function for each call that has no wrappers."""
        direct = {id(call.trained): call.trained.direct() for call in self.calls}
        calls = (replace(call, trained=replace(call.trained, function=direct[id(call.trained)])) for call in self.calls)
        return replace(self, calls=tuple(calls))

    def wrapped(self) -> list[Any]:
        """The autograd function of AOTAutograd for each call."""
        return [call.trained.wrapped for call in self.calls]

    def results(self) -> Iterator[range]:
        """The places of the results of each call."""
        begin = self.input_count
        for call in self.calls:
            end = begin + call.trained.layout.results.stop
            yield range(begin, end)
            begin = end

    def gradient_places(self) -> list[int]:
        """The place of the result of each call that has a gradient."""
        pairs = zip(self.calls, self.results(), strict=True)
        return [results[call.trained.layout.expected[0].place] for call, results in pairs]

    def requiring(self) -> frozenset[int]:
        """The places of the inputs that the backwards compute gradients of."""
        pairs = (
            pair for call in self.calls for pair in enumerate(call.args) if pair[0] in call.trained.layout.requiring
        )
        return frozenset(at for _, at in pairs if at < self.input_count)

    def received(self) -> list[int]:
        """The numbers of the returned values whose gradients the node gets."""
        places = self.gradient_places()
        return [number for number, place in enumerate(self.returned) if place in places]


def _frees_gradient(value: Any) -> bool:
    """Whether a parameter has a hook that runs when its gradient is there, such as a step of an optimizer."""
    return bool(getattr(value, "_post_accumulate_grad_hooks", None))


def _applied(run: _Run, args: Sequence[Any]) -> Function:
    """What is called, with values like `args`, to run the forwards and to record their backwards as one node."""
    first, hooked = run.calls[0].trained.wrapped, HookedInputs.of(args, run.requiring())
    methods = {
        "forward": staticmethod(_forward(run, hooked)),
        "backward": staticmethod(_backward(run, hooked)),
        "boxed_grads_call": getattr(first, "boxed_grads_call", False),
        **_for_compiled_autograd(run),
    }
    # torch shows the name of an autograd function.
    derived = type(first.__name__, (torch.autograd.Function,), methods)
    # The method of torch.autograd.Function looks at every argument once more, for what torch.func leaves behind.
    apply: Function = super(torch.autograd.Function, derived).apply  # type: ignore[misc]
    return apply


def _forward(run: _Run, hooked: HookedInputs) -> Callable[..., Any]:
    is_in_autocast, without_autocast = torch._C._is_any_autocast_enabled, torch._C._DisableAutocast
    steps, returned = tuple(_forward_steps(run)), _items(run.returned)
    non_differentiable = _non_differentiable(run)

    def forward(ctx: Any, *args: Any) -> Any:
        ctx.held = hooked.hold(args)
        values, kept, symbols, begins = list(args), list[Tensor](), list[Any](), list[tuple[int, int]]()
        for compiled, take, results, saved, numbers, views, unused in steps:
            if is_in_autocast():
                with without_autocast():
                    outputs = compiled(list(take(values)))
            else:
                outputs = compiled(list(take(values)))
            begins.append((len(kept), len(symbols)))
            # A view would keep its base alive, and what has computed it.
            kept += [value.detach() if value._is_view() else value for value in outputs[saved]]
            symbols += outputs[numbers]
            values += outputs[results]
            for place in views:
                values[place] = unsafe_view(values[place])
            for place in unused:
                values[place] = None
        ctx.save_for_backward(*kept)
        # The backward of torch reads all of them, the last before 2.13.
        ctx.symints, ctx.opaque_objects, ctx._tensors_no_vc_check = symbols, (), ()
        ctx.begins = begins
        ctx.set_materialize_grads(False)
        if non_differentiable:
            ctx.mark_non_differentiable(*[values[place] for place in non_differentiable])
        return returned(values)

    return forward


def _forward_steps(run: _Run) -> Iterator[tuple[Any, ...]]:
    """For each call: its code, what takes its arguments, the parts of its outputs, what is a view, what ends here."""
    last_read = {place: number for number, call in enumerate(run.calls) for place in call.args}
    ends: dict[int, list[int]] = {}
    for number, results in enumerate(run.results()):
        for place in results:
            if place not in run.returned:
                ends.setdefault(last_read.get(place, number), []).append(place)
    for number, (call, results) in enumerate(zip(run.calls, run.results(), strict=True)):
        layout = call.trained.layout
        views = tuple(results[place] for place in layout.unsafe_views)
        code = code_of(call.trained.wrapped.compiled_fw)
        yield code, _items(call.args), layout.results, layout.saved, layout.numbers, views, ends.get(number, ())


def _items(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the items at these places."""
    if len(places) > 1:
        found: Callable[[Sequence[Any]], tuple[Any, ...]] = operator.itemgetter(*places)
        return found
    return lambda values: tuple(values[place] for place in places)


def _non_differentiable(run: _Run) -> list[int]:
    pairs = zip(run.calls, run.results(), strict=True)
    found = {results[at] for call, results in pairs for at in call.trained.layout.non_differentiable}
    return [place for place in run.returned if place in found]


def _backward(run: _Run, hooked: HookedInputs) -> Callable[..., Any]:
    wrapped, plan, received = run.wrapped(), _BackwardPlan.of(run), run.received()
    is_boxed = getattr(wrapped[0], "boxed_grads_call", False)
    is_unusual = is_unusual_backward()
    codes: Sequence[Boxed | None] | None = None

    def backward(ctx: Any, *arguments: Any) -> Any:
        nonlocal codes
        given: Any = arguments[0] if is_boxed else arguments
        gradients = [given[number] for number in received]
        if is_boxed:
            given.clear()
        if all(one is None for one in gradients):
            return hooked.gradients_of_nothing(ctx, ctx.held)
        saved, symbols = list(ctx.saved_tensors), list(ctx.symints)
        ctx.maybe_clear_saved_tensors()
        is_plain = all(one is None or type(one) is Tensor for one in gradients)
        if codes is None or is_unusual() or not is_plain:
            computed = plan.run(_backwards_of_aotautograd(wrapped), gradients, saved, symbols, ctx.begins)
            made = [code_of(one.compiled_bw) for one in wrapped]
            codes = None if None in made else made
            return computed
        return in_context_of_backward(plan.run, codes, gradients, saved, symbols, ctx.begins)

    # A backward may run while a compiled frame does.
    disabled: Callable[..., Any] = torch.compiler.disable(backward)
    return disabled


@final
@dataclass(frozen=True, slots=True)
class _BackwardPlan:
    """Which gradients are passed to each backward, the last one first, and which belong to the inputs.

    They have numbers: first those that the node gets, then what one backward after the other returns.
    """

    #: For each backward: the numbers of gradients that it gets, which are summed, and their layout.
    steps: tuple[tuple[tuple[int, ...], Expected, tuple[None, ...]], ...]
    #: The numbers of gradients of each input that has several, which follow the others as sums.
    sums: tuple[tuple[int, ...], ...]
    inputs: Callable[[Sequence[Any]], tuple[Any, ...]]
    count: int

    @classmethod
    def of(cls, run: _Run) -> _BackwardPlan:
        numbers: dict[int, list[int]] = {}
        for number, at in enumerate(run.received()):
            numbers.setdefault(run.returned[at], []).append(number)
        steps, count = [], len(run.received())
        for call, place in zip(reversed(run.calls), reversed(run.gradient_places()), strict=True):
            steps.append((tuple(numbers.get(place, ())), call.trained.layout.expected[0], (None,) * len(call.args)))
            for at in call.args:
                numbers.setdefault(at, []).append(count)
                count += 1
        places = [numbers[place] for place in range(run.input_count)]
        sums = [tuple(several) for several in places if len(several) > 1]
        summed = iter(range(count, count + len(sums)))
        inputs = [next(summed) if len(several) > 1 else several[0] for several in places]
        return cls(tuple(steps), tuple(sums), _items(inputs), count)

    def run(
        self,
        backwards: Sequence[Any],
        found: list[Any],
        saved: list[Any],
        symbols: list[Any],
        begins: Sequence[tuple[int, int]],
    ) -> tuple[Any, ...]:
        """The gradients of the inputs; takes the lists apart, so that memory is freed while it runs."""
        for (sources, expected, nothing), backward, (begin, first) in zip(
            self.steps, reversed(backwards), reversed(begins), strict=True
        ):
            gradient = _taken(found, sources)
            args = [*symbols[first:], *saved[begin:], None if gradient is None else expected.laid_out(gradient)]
            del saved[begin:], symbols[first:]
            if gradient is None:
                found += nothing
            else:
                del gradient
                found += backward(args)
        assert len(found) == self.count
        for sources in self.sums:
            found.append(_taken(found, sources))
        return self.inputs(found)


def _taken(found: list[Any], numbers: Sequence[int]) -> Any:
    """The sum of the gradients with these numbers, in their order; they are no longer in the list."""
    total = None
    for number in numbers:
        one, found[number] = found[number], None
        total = one if total is None else total if one is None else total + one
    return total


def _backwards_of_aotautograd(wrapped: Sequence[Any]) -> list[Callable[[list[Any]], Sequence[Any]]]:
    """The backwards with what AOTAutograd does around them: checks, errors, switched modes, the first compilation."""

    def backward_of(function: Any) -> Callable[[list[Any]], Sequence[Any]]:
        count = function.num_symints_saved_for_bw

        def backward(args: list[Any]) -> Sequence[Any]:
            context = _Context(args[:count], tuple(args[count:-1]))
            gradients = [None] * len(function.metadata.output_info)
            place = next(at for at, info in enumerate(function.metadata.output_info) if has_gradient(info))
            gradients[place] = args[-1]
            args.clear()
            is_boxed = getattr(function, "boxed_grads_call", False)
            computed: Sequence[Any] = function.backward(context, *([gradients] if is_boxed else gradients))
            return computed

        return backward

    return [backward_of(one) for one in wrapped]


@final
class _Context:
    """What the backward of AOTAutograd reads of the context of a node."""

    opaque_objects: tuple[Any, ...] = ()
    _tensors_no_vc_check: tuple[Any, ...] = ()

    def __init__(self, symints: Sequence[Any], saved_tensors: Sequence[Any]) -> None:
        self.symints, self.saved_tensors = symints, saved_tensors

    def maybe_clear_saved_tensors(self) -> None:
        """They are taken from the node by now."""


def _for_compiled_autograd(run: _Run) -> dict[str, Any]:
    """The attributes by which compiled autograd traces the backward of a node of AOTAutograd."""
    from torch._functorch._aot_autograd.runtime_wrappers import CachedAutogradLazyBackwardCompileInfo

    calls, places, received = run.calls, run.gradient_places(), run.received()
    sources = [calls[places.index(run.returned[number])].trained for number in received]
    expected = [source.layout.expected[0] for source in sources]

    def prologue(saved: Sequence[Any], symbols: Sequence[Any], _opaque: Sequence[Any], gradients: Any) -> list[Any]:
        pairs = zip(received, expected, strict=True)
        used = [None if gradients[at] is None else one.laid_out(gradients[at]) for at, one in pairs]
        return [*symbols, *saved, *used]

    return {
        "_aot_id": calls[0].trained.wrapped._aot_id,
        "_lazy_backward_info": CachedAutogradLazyBackwardCompileInfo(lambda: _joined_backwards(run)),
        "metadata": _joined_metadata(dict(zip(received, sources, strict=True)), len(run.returned)),
        "maybe_subclass_metadata": None,
        "_bw_prologue_fn": staticmethod(prologue),
        "_bw_epilogue_fn": staticmethod(tuple),
        "_compiled_autograd_key": staticmethod(lambda ctx: (ctx._autograd_function_id, *ctx.symints)),
    }


def _joined_metadata(sources: Mapping[int, TrainedFunction], count: int) -> SimpleNamespace:
    """What compiled autograd reads about `count` results, of which those in `sources` receive gradients.

    Before torch 2.13 its own prologue and epilogue read it, and lay gradients out.
    """
    without = SimpleNamespace(output_type=None, requires_grad=False, requires_grad_for_backward=False)
    infos = {number: _info_of_result(source.wrapped) for number, source in sources.items()}
    return SimpleNamespace(
        output_info=[infos.get(number, without) for number in range(count)],
        num_outputs=count,
        subclass_tangent_meta=[source.wrapped.metadata.subclass_tangent_meta[0] for source in sources.values()],
        input_info=(),
        mutated_inp_runtime_indices=(),
        num_mutated_inp_runtime_indices=0,
        num_intermediate_bases=0,
        num_backward_tokens=0,
        is_rng_op_functionalized=False,
        deterministic=None,
    )


def _info_of_result(function: Any) -> Any:
    """What AOTAutograd knows of the only result of a region that has a gradient."""
    return next(info for info in function.metadata.output_info if has_gradient(info))


def _joined_backwards(run: _Run) -> GraphModule:
    """One graph with the traced backwards of all calls: symbols, saved tensors and gradients are its inputs."""
    from torch._dynamo.compiled_autograd import extract_bw_module

    modules: list[Any] = [extract_bw_module(one) for one in run.wrapped()]
    plan, graph, root = _BackwardPlan.of(run), Graph(), dict[str, Any]()
    inputs = [module.graph.find_nodes(op="placeholder") for module in modules]
    counts = [one.num_symints_saved_for_bw for one in run.wrapped()]
    symbols = [[graph.placeholder(f"symbol_{at}_{i}") for i in range(n)] for at, n in enumerate(counts)]
    saved = [
        [graph.placeholder(f"saved_{at}_{i}") for i in range(len(nodes) - 1 - counts[at])]
        for at, nodes in enumerate(inputs)
    ]
    found: list[Any] = [graph.placeholder(f"gradient_{number}") for number in run.received()]
    for at, (sources, _, _) in zip(reversed(range(len(modules))), plan.steps, strict=True):
        gradient = _sum_of_nodes(graph, [found[number] for number in sources])
        values = dict(zip(inputs[at], (*symbols[at], *saved[at], gradient), strict=True))
        found += _copied(modules[at], graph, values, root, prefix=f"call_{at}")
    found += [_sum_of_nodes(graph, [found[number] for number in sources]) for sources in plan.sums]
    graph.output(plan.inputs(found))
    return GraphModule(root, graph)


def _sum_of_nodes(graph: Graph, nodes: Sequence[Any]) -> Any:
    total = None
    for node in nodes:
        if node is not None:
            total = node if total is None else graph.call_function(torch.ops.aten.add.Tensor, (total, node))
    return total


def _copied(module: Any, graph: Graph, values: dict[Node, Any], root: dict[str, Any], *, prefix: str) -> Sequence[Any]:
    """Copies the nodes of a module behind its inputs, whose `values` are given, and returns what it returns."""
    for node in module.graph.nodes:
        if node.op == "output":
            return [values[one] if isinstance(one, Node) else one for one in node.args[0]]
        if node.op == "placeholder":
            continue
        values[node] = graph.node_copy(node, values.__getitem__)
        if node.op in ("get_attr", "call_module"):
            values[node].target = f"{prefix}_{str(node.target).replace('.', '_')}"
            root[values[node].target] = operator.attrgetter(str(node.target))(module)
    raise AssertionError("a graph has an output")
