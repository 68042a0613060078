"""What was compiled for a forward and its backward, recorded by autograd without the wrappers of AOTAutograd.

AOTAutograd has an autograd function for each compiled graph, and around it wrappers that switch modes, replay mutations
and views, and check what they get; that takes fifty Python calls a piece and step. The function here is derived from
that one and does what remains where nothing of this is needed. It saves the same values in the same way, so that a
backward in which anything is unusual is left to the function of AOTAutograd.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from partita._torch.functorch import count_levels
from partita._torch.second_backward import refuse_backward_of
from partita.torch_compile._torch.backends import without_disabling
from partita.torch_compile._torch.direct_calls import Boxed, compiled_graph, inside_wrappers
from partita.torch_compile._torch.unused_gradients import HookedInputs, without_unused_gradients

log = logging.getLogger(__name__)

Function = Callable[..., Sequence[Any]]

#: The wrappers around the autograd function that are passed over; one that is not known is needed.
_WRAPPERS = frozenset(
    {
        "aot_module_simplified.<locals>.forward",
        "_create_runtime_wrapper.<locals>.runtime_wrapper",
        "make_boxed_func.<locals>.g",
        "SerializableCompiledFunction",
    }
)


@final
@dataclass(frozen=True, slots=True)
class TrainedFunction:
    """A function that was compiled for training, the autograd function of AOTAutograd in it, and what that returns."""

    function: Function
    wrapped: Any
    layout: Layout

    def direct(self) -> Function:
        """A function like it without wrappers.

        Its first call and first backward are those of the function: torch checks operators of users in them, and may
        compile the backward.
        """
        return _direct(self.function, self.wrapped, self.layout)

    def has_one_gradient(self) -> bool:
        """Whether its backward gets one gradient."""
        return len(self.layout.expected) == 1


def trained_directly(function: Function, *, input_count: int) -> TrainedFunction | None:
    """A function that was compiled for training, if the wrappers around it have nothing to do; None otherwise."""
    wrapped = _autograd_function(function)
    try:
        layout = "it is compiled in another way" if wrapped is None else _layout_of(wrapped, input_count)
    except AttributeError as error:
        layout = f"torch {torch.__version__} describes it in another way ({error})"
    if isinstance(layout, str):
        log.debug("a piece that trains is called with the wrappers of AOTAutograd: %s", layout)
        return None
    if len(layout.expected) == 1:
        function = without_unused_gradients(function, layout.links())
    return TrainedFunction(function, wrapped, layout)


def refuse_second_backward(function: Any) -> None:
    """Makes what was compiled for training refuse a backward of its backward in our words, where it can be found."""
    wrapped = _autograd_function(without_disabling(function))
    if wrapped is not None:
        refuse_backward_of(wrapped)


def _autograd_function(function: Any) -> Any:
    """The autograd function of AOTAutograd inside of wrappers that can be passed over."""
    owner = getattr(inside_wrappers(function, _WRAPPERS), "__self__", None)
    is_function = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    return owner if is_function and hasattr(owner, "compiled_fw") else None


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Which outputs of a compiled forward are results, and which are saved; what its backward expects."""

    input_count: int
    #: The inputs that the backward computes gradients of.
    requiring: frozenset[int]
    results: slice
    saved: slice
    numbers: slice
    #: Results that are made new tensors, since they are views of what the forward has computed.
    unsafe_views: tuple[int, ...]
    non_differentiable: tuple[int, ...]
    #: Of the gradients that the backward gets.
    expected: tuple[Expected, ...]

    def links(self) -> tuple[frozenset[int], ...]:
        """The places of the inputs that each result depends on, if one has a gradient."""
        (only,) = self.expected
        return tuple(self.requiring if place == only.place else frozenset() for place in range(self.results.stop))


@final
@dataclass(frozen=True, slots=True)
class Expected:
    """The result whose gradient a compiled backward gets, and the layout that it expects of it."""

    place: int
    size: Sequence[int] | None
    stride: Sequence[int] | None
    memory_format: torch.memory_format | None

    def accepts(self, gradient: Any) -> bool:
        if type(gradient) is not Tensor:
            return False
        if self.memory_format is not None:
            return gradient.is_contiguous(memory_format=self.memory_format)
        return gradient.shape == self.size and gradient.stride() == self.stride

    def laid_out(self, gradient: Any) -> Any:
        """The gradient in this layout; a tensor of another class is left to AOTAutograd."""
        if type(gradient) is not Tensor or self.accepts(gradient):
            return gradient
        if self.memory_format is not None:
            return gradient.contiguous(memory_format=self.memory_format)
        assert self.size is not None
        assert self.stride is not None
        return gradient.new_empty_strided(self.size, self.stride).copy_(gradient)


def _layout_of(wrapped: Any, input_count: int) -> Layout | str:
    """The layout of what AOTAutograd has compiled, or why its wrappers are needed."""
    known = wrapped.metadata
    if code_of(wrapped.compiled_fw) is None:
        return "its forward does not take a list"
    reason = next((reason for reason, is_so in _reasons(wrapped, known, input_count) if is_so), None)
    if reason is not None:
        return reason
    outputs = known.output_info
    differentiable = [place for place, info in enumerate(outputs) if has_gradient(info)]
    tensors = [place for place, info in enumerate(outputs) if issubclass(info.raw_type, Tensor)]
    kinds = [kind.memory_format for kind in known.subclass_tangent_meta]
    if len(kinds) != len(differentiable) or None in kinds or not set(differentiable) <= set(tensors):
        return "its gradients are not plain tensors"
    pairs = zip(differentiable, kinds, strict=True)
    return Layout(
        input_count,
        frozenset(place for place, info in enumerate(known.input_info) if info.requires_grad),
        slice(0, known.num_forward_returns),
        known.tensors_saved_for_backwards_with_vc_check_slice,
        known.symints_saved_for_backwards_slice,
        tuple(known.unsafe_view_out_indices),
        tuple(place for place in tensors if not outputs[place].requires_grad),
        tuple(Expected(place, kind.size, kind.stride, kind.memory_format) for place, kind in pairs),
    )


def has_gradient(info: Any) -> bool:
    # Before torch 2.13 there is one field, which is the same for results that are no views.
    return bool(getattr(info, "requires_grad_for_backward", info.requires_grad))


def _reasons(wrapped: Any, known: Any, input_count: int) -> Iterator[tuple[str, bool]]:
    yield "it has state of its own", len(known.input_info) != input_count
    yield "it mutates inputs", bool(known.mutated_inp_runtime_indices or known.mutated_graph_handled_indices)
    yield "its backward mutates inputs", bool(known.indices_of_inputs_that_requires_grad_with_mutations_in_bw)
    yield "it returns views", bool(known.num_outputs_aliased or known.num_intermediate_bases)
    yield "it switches the grad mode", known.grad_enabled_mutation is not None
    yield "its tensors are of other classes", wrapped.maybe_subclass_metadata is not None
    yield "its random state is an input", bool(known.is_rng_op_functionalized or known.num_graphsafe_rng_states)
    yield "it has ordered effects", bool(known.tokens or known.num_backward_tokens)
    unchecked = known.num_tensors_saved_with_no_vc_check or known.num_opaque_objects_saved_for_bw
    yield "it saves values that autograd does not check", bool(unchecked)


def _direct(function: Function, wrapped: Any, layout: Layout) -> Function:
    """Calls the compiled function, and from the second call on what is inside of it."""
    is_recording = torch.is_grad_enabled
    apply: Function | None = None

    def call(*args: Any) -> Sequence[Any]:
        nonlocal apply
        if apply is None:
            outputs = function(*args)
            apply = _applied(wrapped, layout, HookedInputs.of(args, layout.requiring))
            return outputs
        if count_levels() or not is_recording():
            return function(*args)
        return apply(*args)

    return call


def _applied(wrapped: Any, layout: Layout, hooked: HookedInputs) -> Function:
    """What is called to run the compiled forward and to record its backward."""
    methods = {
        "forward": staticmethod(_forward(wrapped, layout, hooked)),
        "backward": staticmethod(_backward(wrapped, layout, hooked)),
    }
    # torch shows the name of an autograd function.
    derived = type(wrapped.__name__, (wrapped,), methods)
    # The method of torch.autograd.Function looks at every argument once more, for what torch.func leaves behind.
    apply: Function = super(torch.autograd.Function, derived).apply  # type: ignore[misc]
    return apply


def _forward(wrapped: Any, layout: Layout, hooked: HookedInputs) -> Callable[..., Any]:
    run = code_of(wrapped.compiled_fw)
    assert run is not None
    is_in_autocast, without_autocast = torch._C._is_any_autocast_enabled, torch._C._DisableAutocast
    results, saved, numbers = layout.results, layout.saved, layout.numbers
    is_alone = len(layout.expected) == 1

    def forward(ctx: Any, *args: Any) -> Any:
        if is_in_autocast():
            with without_autocast():
                outputs = run(list(args))
        else:
            outputs = run(list(args))
        # A view would keep its base alive, and what has computed it.
        ctx.save_for_backward(*[value.detach() if value._is_view() else value for value in outputs[saved]])
        # The backward of torch reads all of them, the last before 2.13.
        ctx.symints, ctx.opaque_objects, ctx._tensors_no_vc_check = outputs[numbers], (), ()
        if is_alone:
            ctx.set_materialize_grads(False)
            ctx.held = hooked.hold(args)
        found = list(outputs[results])
        for place in layout.unsafe_views:
            found[place] = unsafe_view(found[place])
        if layout.non_differentiable:
            ctx.mark_non_differentiable(*[found[place] for place in layout.non_differentiable])
            ctx._materialize_non_diff_grads = False
        return tuple(found)

    return forward


def unsafe_view(value: Tensor) -> Tensor:
    """The same values as a tensor that is no view."""
    made: Tensor = torch.ops.aten._unsafe_view.default(value, value.shape)
    return made


def _backward(wrapped: Any, layout: Layout, hooked: HookedInputs) -> Callable[..., Any]:
    inherited, is_boxed = wrapped.backward, getattr(wrapped, "boxed_grads_call", False)
    is_unusual = is_unusual_backward()
    is_alone = len(layout.expected) == 1
    run: Boxed | None = None

    def backward(ctx: Any, *received: Any) -> Any:
        nonlocal run
        gradients: Any = received[0] if is_boxed else received
        used = [gradients[one.place] for one in layout.expected]
        if is_alone and used[0] is None:
            return hooked.gradients_of_nothing(ctx, ctx.held)
        if run is None or is_unusual() or not all(map(Expected.accepts, layout.expected, used)):
            computed = inherited(ctx, *received)
            run = code_of(wrapped.compiled_bw)
            return computed
        args = [*ctx.symints, *ctx.saved_tensors, *used]
        ctx.maybe_clear_saved_tensors()
        if is_boxed:
            gradients.clear()
        del used
        return in_context_of_backward(run, args)

    # A backward may run while a compiled frame does.
    disabled: Callable[..., Any] = torch.compiler.disable(backward)
    return disabled


def is_unusual_backward() -> Callable[[], bool]:
    """Whether a backward needs what is around the compiled code: checks, errors, switched modes."""
    is_recorded, is_deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
    is_kept = torch._C._autograd._get_current_graph_task_keep_graph
    is_in_autocast = torch._C._is_any_autocast_enabled

    def is_unusual() -> bool:
        return is_recorded() or is_kept() or is_deterministic() or is_in_autocast() or bool(count_levels())

    return is_unusual


def code_of(compiled: Any) -> Boxed | None:
    """What runs a compiled graph, of Inductor without what is around it; None if it does not take a list."""
    graph = compiled_graph(without_disabling(compiled))
    takes_list = graph is not None or getattr(compiled, "_boxed_call", False)
    found: Boxed | None = None if not takes_list else compiled if graph is None else graph.current_callable
    return found


def in_context_of_backward(run: Callable[..., Any], *args: Any) -> Any:
    """What `run` returns, with the context variables of the caller of the backward, where torch keeps them (2.13).

    The engine may run it in a thread of its own.
    """
    try:
        context = torch._C._get_obj_in_tls("context")
    except RuntimeError:  # C++ has called the engine.
        context = None
    return run(*args) if context is None else context.run(run, *args)
