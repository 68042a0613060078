"""Dry runs: what an analysis may call on fake or meta tensors, and how often, so that its cost is bounded."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from partita._torch.operator_schemas import is_composite
from partita._torch.pytrees import leaves_of
from partita._torch.symbolic_shapes import hint_of

#: The operators that torch itself defines, and that compute on tensors.
_NAMESPACES = frozenset(("aten", "prims", "quantized_decomposed", "torch_nn"))


class DryRunError(Exception):
    """A call that a dry run does not make."""


def is_torchs(target: Any) -> bool:
    """Whether a dry run may call it: a function or operator of torch or Python, except for levels of torch.func."""
    if isinstance(target, HigherOrderOperator) or is_of_level(target):
        return False
    if isinstance(target, OpOverload):
        return target.namespace in _NAMESPACES
    if isinstance(target, OpOverloadPacket):
        return str(target).partition(".")[0] in _NAMESPACES
    module = _module_of(target)
    return module in ("torch", operator.add.__module__) or module.startswith("torch.")


def is_of_level(target: Any) -> bool:
    """Whether a function enters or leaves a level of torch.func, or only works inside one."""
    if isinstance(target, OpOverload):
        return target.name() in _OF_LEVELS
    return _module_of(target).startswith(("torch._functorch", "torch._C._functorch"))


def is_loop(target: Any) -> bool:
    """Whether a higher-order operator runs its body for each item of a tensor, also on fake ones."""
    return isinstance(target, HigherOrderOperator) and target.name() in _LOOPS


def has_kernel_for_fakes(target: Any) -> bool:
    """Whether a call on fake tensors runs no code of another library but its fake or meta kernel."""
    if not isinstance(target, OpOverload) or target.namespace in _NAMESPACES:
        return True
    # A fake function is registered as a Meta kernel, too.
    return not is_composite(target) and target.has_kernel_for_dispatch_key(torch.DispatchKey.Meta)


def _module_of(target: Any) -> str:
    return str(getattr(target, "__module__", None) or "")


_OF_LEVELS = frozenset(("aten::_add_batch_dim", "aten::_remove_batch_dim", "aten::_make_dual", "aten::_unpack_dual"))


class Allowance:
    """A budget of operator calls for dry runs: one node can run any number of operators."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def add(self, calls: int) -> None:
        """Raises the budget."""
        self._left += calls

    def spend(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Counts one call and each tensor in a list that it returns; raises when the budget is exceeded."""
        self._left -= 1 + _further_results(func, args, kwargs)
        if self._left < 0:
            raise DryRunError("it runs more operators than a dry run may call")


def on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a call on meta tensors; one that names a device gets the meta device in its place.

    An operator that moves a tensor, or makes one like it elsewhere, would allocate real memory of that size.
    """
    place = _place_of_device(func)
    if place is None:
        return tuple(args), kwargs
    if place < len(args):
        return (*args[:place], torch.device("meta"), *args[place + 1 :]), kwargs
    return tuple(args), {**kwargs, "device": torch.device("meta")}


def views_added(target: Any) -> int | None:
    """How many views a call adds to those that its arguments are views of, at most; None if its result is no view.

    That is what the operator says and not what was traced: values from a file have storages of their own.
    """
    if not isinstance(target, OpOverload):
        return 0 if target is operator.getitem else None
    if target._schema.is_mutable or target._schema.name in _RETURNS_ARGUMENT:
        return 0
    if any(value.alias_info is not None for value in target._schema.returns):
        return 1
    # Composite operators may return views that their schemas do not declare.
    return 1 if is_composite(target) and target._schema.name not in _NEVER_VIEWS else None


def may_return_operand(target: Any) -> bool:
    """Whether a higher-order operator may return an operand that its bodies do not return."""
    return is_loop(target) or (isinstance(target, HigherOrderOperator) and target.name() == "while_loop")


#: Composite operators that return an argument itself or else a new tensor.
_RETURNS_ARGUMENT = frozenset(
    f"aten::{name}" for name in ("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout", "type_as")
)
#: Composite operators whose results are new tensors, or views of some, whatever their arguments are (torch 2.13).
_NEW_TENSORS = """
    _batch_norm_impl_index _convolution _convolution_mode _fused_rms_norm _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm absolute
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d arccos arccosh arcsin arcsinh arctan
    arctan2 arctanh avg_pool1d batch_norm bilinear cdist clip column_stack concat concatenate conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d cosine_embedding_loss cosine_similarity cross cross_entropy_loss
    ctc_loss divide dstack embedding_bag fake_quantize_per_channel_affine fake_quantize_per_tensor_affine fft_fft
    fft_ifft fft_irfft fft_rfft fix float_power frobenius_norm greater greater_equal grid_sampler group_norm gru_cell
    hinge_embedding_loss hstack inner instance_norm inverse isclose isfinite kl_div kron l1_loss layer_norm less
    less_equal linalg_inv linalg_matmul linalg_norm linalg_solve linalg_vecdot linear log_sigmoid log_softmax lstm_cell
    margin_ranking_loss matmul max max_pool1d max_pool1d_with_indices max_pool2d max_pool3d min multilabel_margin_loss
    multiply nanmean negative nll_loss nll_loss2d nll_loss_nd not_equal one_hot outer pad pairwise_distance
    poisson_nll_loss prelu relu6 rms_norm rnn_relu_cell rnn_tanh_cell row_stack rrelu scaled_dot_product_attention selu
    softmax special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit special_expm1
    special_gammaln special_i0 special_log1p special_log_softmax special_logit special_logsumexp special_ndtr
    special_sinc special_softmax special_xlogy square std std_mean subtract take_along_dim tensordot tile
    triplet_margin_loss true_divide upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d var var_mean vstack where
"""
_NEVER_VIEWS = frozenset(f"aten::{name}" for name in _NEW_TENSORS.split())


def refusal_of_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call is rejected: torch does not check such arguments and would read past their end; None if it is not."""
    if not isinstance(target, OpOverload):
        return None
    tensors, given = 0, dict[str, Any]()
    for place, argument in enumerate(target._schema.arguments):
        value = args[place] if place < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        given[argument.name] = value
        why = None if value is None else _why_rejected(target, argument, value) or _why_long(target, argument, value)
        if why is not None:
            return f"{argument.name} is {why}"
        tensors += len(value) if isinstance(value, tuple | list) else 1
    if (ends := _ENDS_PROCESS.get(target._schema.name)) is not None and ends(given):
        return "torch does not check its numbers against each other, and would end the process"
    most = _MOST_COMBINED if target._schema.name in _COMBINES else _MOST_VALUES
    return f"it reads {tensors} values" if tensors > most and is_composite(target) else None


#: The most values that a composite operator may take; those of lists may be combined in pairs.
_MOST_VALUES = 2_000
#: Operators that look for the best order of a product, in time that is cubic in the number of factors.
_COMBINES, _MOST_COMBINED = frozenset(("aten::chain_matmul", "aten::einsum", "aten::linalg_multi_dot")), 100
#: The largest numbers that some arguments may be: how many tensors a list has, how many axes a result, how many digits.
_MOST = {"chunks": 2**16, "sections": 2**16, "r": 20, "decimals": 400}
#: The arguments whose length is the number of axes of a result, of which torch supports 64 in most operators.
_SHAPES, _MOST_AXES = frozenset(("size", "shape", "repeats", "dims", "output_size", "stride", "expanded_size")), 64
_KINDS: Mapping[str, type] = {"ScalarType": torch.dtype, "MemoryFormat": torch.memory_format, "Layout": torch.layout}


def _why_rejected(target: OpOverload, argument: Any, value: Any) -> str | None:
    kind = _KINDS.get(str(argument.real_type).removeprefix("Optional[").removesuffix("]"))
    if kind is not None and not isinstance(value, kind):
        return f"no {kind.__name__}"
    if isinstance(value, int | torch.SymInt) and abs(hint_of(value)) > _MOST.get(argument.name, math.inf):
        return str(hint_of(value))
    if argument.name in _SHAPES and isinstance(value, tuple | list) and len(value) > _MOST_AXES:
        return f"a list of {len(value)}"
    # N = 1 only says that a number may replace a list.
    if (argument.N or 1) > 1 and isinstance(value, tuple | list) and len(value) != argument.N:
        # Kernels expand a single number; those of derivatives need not.
        is_single = len(value) == 1 and not target._schema.name.endswith("backward")
        if not is_single and not (argument.has_default_value() and list(value) == argument.default_value):
            return f"a list of {len(value)} and not of {argument.N}"
    return None


def _why_long(target: OpOverload, argument: Any, value: Any) -> str | None:
    """Why a kernel runs for long, also on tensors without memory: it loops over an axis."""
    axes = _LOOP_AXES.get((target._schema.name, argument.name))
    if axes is None or not isinstance(value, Tensor):
        return None
    longest = max(map(hint_of, value.shape[axes]), default=0)
    return f"a tensor with an axis of {longest}, over which it loops" if longest > _MOST_LOOPED else None


#: The axes over which kernels loop without a call that would be counted, by operator and argument (torch 2.13).
_LOOP_AXES: Mapping[tuple[str, str], slice] = {
    ("aten::histogramdd", "self"): slice(-1, None),
    **{(f"aten::{name}", "weight"): slice(1) for name in ("bilinear", "conv_tbc", "conv_tbc_backward")},
    **{("aten::_trilinear", name): slice(None) for name in ("i1", "i2", "i3")},
}
_MOST_LOOPED = 2**12


def _divides_by_no_heads(given: Mapping[str, Any]) -> bool:
    """Whether attention repeats the heads of a key or value that has none."""
    pair = [one for one in (given["key"], given["value"]) if isinstance(one, Tensor)]
    return bool(given.get("enable_gqa")) and any(
        hint_of(one.shape[-3]) == 0 for one in pair if one.dim() >= _AXES_WITH_HEADS
    )


def _divides_by_no_step(given: Mapping[str, Any]) -> bool:
    """Whether the step of a range is zero as an integer, or a bound is so large that their distance overflows."""
    start, end, step = (hint_of(given.get(name) or 0) for name in ("start", "end", "step"))
    is_small = all(isinstance(bound, int | float) and abs(bound) < _LARGEST_BOUND for bound in (start, end))
    return not is_small or (given.get("step") is not None and not 1 <= abs(step) < _LARGEST_BOUND)


def _lacks_parameters(gates: int, given: Mapping[str, Any]) -> bool:
    """Whether a recurrent network has other numbers of weights, states or rows than its layers read."""
    if "batch_sizes" in given:  # Its values are read, which a fake tensor does not have.
        return True
    count = hint_of(given["num_layers"])
    layers = count * (1 + bool(given["bidirectional"])) if isinstance(count, int) else 0
    each = 2 + 2 * bool(given["has_biases"])
    states = given["hx"] if isinstance(given["hx"], tuple | list) else (given["hx"],)
    if layers < 1 or not all(_rows(one) == layers for one in states) or not isinstance(given["params"], tuple | list):
        return True
    per_layer, rest = divmod(len(given["params"]), layers)
    # An LSTM with a projection has one more weight per layer, which is not divided into gates.
    weights = [one for place, one in enumerate(given["params"]) if place % max(per_layer, 1) < each]
    return rest > 0 or per_layer not in (each, each + 1) or not all(_has_gates(one, gates) for one in weights)


def _lacks_gates(gates: int, given: Mapping[str, Any]) -> bool:
    return not all(_has_gates(given[name], gates) for name in ("w_ih", "w_hh"))


def _has_gates(weight: Any, gates: int) -> bool:
    """Whether its rows divide into so many gates: kernels read all of them."""
    rows = _rows(weight)
    return rows is not None and rows % gates == 0


def _rows(value: Any) -> int | None:
    """The size of the first axis; None if it has none, as a number that torch converts to a tensor."""
    return int(hint_of(value.shape[0])) if isinstance(value, Tensor) and value.dim() > 0 else None


_GATES = {"gru": 3, "lstm": 4, "rnn_relu": 1, "rnn_tanh": 1}
#: Whether a call ends the process, by the operator: numbers that torch divides by or counts with (torch 2.13).
_ENDS_PROCESS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "aten::_scaled_dot_product_attention_math": _divides_by_no_heads,
    "aten::scaled_dot_product_attention": _divides_by_no_heads,
    "aten::range": _divides_by_no_step,
    **{f"aten::{name}": partial(_lacks_parameters, gates) for name, gates in _GATES.items()},
    **{f"aten::{name}_cell": partial(_lacks_gates, gates) for name, gates in _GATES.items()},
}
_LARGEST_BOUND = 2**53
_AXES_WITH_HEADS = 3


def refusal_of_device(values: Any) -> str | None:
    """Why autograd cannot run on tensors on such devices: torch would end the process; None if it can."""
    for value in leaves_of(values):
        device = value.device if isinstance(value, Tensor) else value
        if isinstance(device, torch.device) and not _has_device(device.type):
            return f"it is on {device.type}, which this build of torch does not support"
    return None


@cache
def _has_device(kind: str) -> bool:
    try:
        torch.Stream(device=kind)
    except RuntimeError as error:  # Without a driver it raises, too, but autograd runs.
        return "not linked with support" not in str(error)
    return True


@cache
def _place_of_device(func: Any) -> int | None:
    """Where an operator takes a device; None if it takes none."""
    arguments = func._schema.arguments if isinstance(func, OpOverload) else ()
    return next((place for place, argument in enumerate(arguments) if argument.name == "device"), None)


def _further_results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many tensors an operator returns that splits one, or how many nodes a loop runs."""
    if isinstance(func, HigherOrderOperator):
        return _loop_calls(args) if is_loop(func) else 0
    if (
        not isinstance(func, OpOverload)
        or func._schema.name not in _SPLITS
        or not args
        or not isinstance(args[0], Tensor)
    ):
        return 0
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    dimension, size = values.get("dim", 0), values.get("split_size", 1)
    if not -args[0].dim() <= dimension < args[0].dim() or not isinstance(size, int):
        return 0
    return int(hint_of(args[0].shape[dimension])) // max(size, 1)


_SPLITS = frozenset(f"aten::{name}" for name in ("split", "split_copy", "unbind", "unbind_copy", "unsafe_split"))
#: Higher-order operators that run a body for each item of a tensor, also on tensors without memory.
_LOOPS = frozenset(("associative_scan", "map_impl", "scan"))


def _loop_calls(args: Sequence[Any]) -> int:
    """An upper bound: the largest size of an operand, for each node of the bodies."""
    operands = [one for value in args for one in (value if isinstance(value, tuple | list) else (value,))]
    sizes = (int(hint_of(size)) for one in operands if isinstance(one, Tensor) for size in one.shape)
    nodes = sum(len(body.graph.nodes) for body in args if isinstance(body, torch.fx.GraphModule))
    return max(sizes, default=0) * max(nodes, 1)
