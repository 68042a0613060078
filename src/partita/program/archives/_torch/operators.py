"""Operators that a saved program may name: those that compute on tensors and numbers, and nothing else."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection
from functools import cache
from keyword import iskeyword
from typing import Any

import torch
from torch._functorch import predispatch
from torch._ops import HigherOrderOperator, OpOverload

from partita.program.archives.data import Data


def operator_of(data: Data, allowed: Collection[str]) -> Callable[..., Any]:
    """The operator that a name in a file denotes; `allowed` are more namespaces, or operators `space::name`.

    torch itself resolves such a name from `torch` on to any callable, even `torch.os.system`.
    """
    name = data.text()
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    match = _OF_TORCH_OPS.fullmatch(name)
    if match is None:
        data.refuse(f"{name[:200]!r} is no operator")
    space, base, overload = match.groups()
    base = _WITH_CHECKS.get(base, base) if space == "aten" else base
    if overload is not None and iskeyword(overload):
        data.refuse(f"{name!r} cannot be written in Python")
    is_allowed = space in allowed or f"{space}::{base}" in allowed
    if space == "higher_order":
        if base not in _BODIES and base not in _OPERATORS:
            data.refuse(f"{name!r} runs more than graphs of the file")
    elif space not in NAMESPACES and not is_allowed:
        is_code = f"{space}::{base}" == "partita::delegate"
        what = "code that a backend has compiled" if is_code else "an operator of another library"
        library = "" if is_code else f"operators=[{space!r}] or "
        data.refuse(
            f"{name!r} is {what}; if you know what it does, load the file with {library}operators=['{space}::{base}']"
        )
    found = getattr(getattr(torch.ops, space), base, None)
    found = found if isinstance(found, HigherOrderOperator) else getattr(found, overload or "default", None)
    if not isinstance(found, OpOverload | HigherOrderOperator):
        data.malformed(f"no operator {name!r} is registered; import the library that defines it first")
    if isinstance(found, OpOverload) and not is_allowed and not _computes(found):
        data.refuse(f"{name!r} does more than compute on tensors and numbers")
    return found


def is_retraced(target: Callable[..., Any]) -> bool:
    """Whether torch traces the graphs of an operator several times, at each level of a nest, when it compiles it."""
    return isinstance(target, HigherOrderOperator) and target.name() in _RETRACED


def returns_results_of_body(target: Any) -> bool:
    """Whether an operator returns what the graph that it runs returns; loops return more, or stack it."""
    loops = ("associative_scan", "map_impl", "scan", "while_loop", "while_loop_stack_output")
    return isinstance(target, HigherOrderOperator) and target.name() in _BODIES and target.name() not in loops


def called_by(target: Callable[..., Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The positions of the arguments that an operator runs as graphs, and of those that it calls as operators."""
    name = target.name() if isinstance(target, HigherOrderOperator) else ""
    return _BODIES.get(name, ()), _OPERATORS.get(name, ())


@cache
def _computes(found: OpOverload) -> bool:
    """Whether it takes tensors, numbers and names of variants, and computes or checks tensors or numbers."""
    schema = found._schema
    # The gradients of other processes come in a dict.
    if not all(_PLAIN_RESULT.fullmatch(str(part.type)) for part in schema.returns):
        return False
    types = [str(part.type) for part in (*schema.arguments, *schema.returns)]
    computes = any("Tensor" in kind for kind in types) or schema.name in _ON_NUMBERS
    return computes and _is_of_programs(found) and all(map(_is_plain, schema.arguments))


def _is_of_programs(found: OpOverload) -> bool:
    """Whether programs name it: of the kernels behind torch's functions, only those that torch.export writes."""
    name = found._schema.name.partition("::")[2]
    return name.startswith(tuple(_INTERNAL)) if name.startswith("_") else not name.startswith(_OF_ONE_LIBRARY)


def _is_plain(argument: Any) -> bool:
    kind = str(argument.type)
    if argument.is_out and kind != "Tensor":  # torch does not check the length of such a list.
        return False
    is_variant = kind in ("str", "Optional[str]") and argument.name in _NAMES_OF_VARIANTS
    return is_variant or _PLAIN_TYPE.fullmatch(kind) is not None


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OF_TORCH_OPS = re.compile(r"torch\.ops\.([A-Za-z]\w*)\.(\w+)(?:\.(\w+))?", re.ASCII)
NAMESPACES = frozenset(("aten", "prims", "quantized_decomposed"))
_PLAIN_TYPE = re.compile(
    r"(Optional\[|List\[)*(Tensor|number|int|float|bool|complex|Device|Generator|ScalarType|Layout|MemoryFormat)\]*"
)
_PLAIN_RESULT = re.compile(rf"{_PLAIN_TYPE.pattern}|QScheme")
#: The arguments in which a string selects a variant of a computation; none of them is a file name.
_NAMES_OF_VARIANTS = _words(
    """
    UPLO activation algorithm api_name approximate assert_msg driver equation indexing interpolation mode msg norm ord p
    pad_mode padding padding_mode padding_side reduce reduction rounding_mode side
    """
)
_ON_NUMBERS = _words("aten::_assert_scalar aten::sym_constrain_range aten::sym_constrain_range_for_size")
#: How the names of the internal operators begin that torch.export or a decomposition writes. The others are kernels
#: behind checks that a direct call avoids: torch crashes where sizes or lists do not match (2.13).
_INTERNAL = _words(
    """
    __and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__
    _adaptive_avg_pool _add_relu _addmm_ _aminmax _assert_ _autocast_to_ _batch_norm_no_ _batch_norm_with_ _cast_
    _cdist_ _choose_qparams_ _chunk_cat _conj _convolution _ctc_loss _dim_arange _dirichlet_grad _efficientzerotensor
    _embedding_bag _euclidean_dist _fake_quantize_ _fft_ _functional_ _fused_dropout _fused_moving_avg_obs_fq_helper
    _fused_rms_norm _fw_primal _grouped_mm _histogramdd_ _index_put_impl _int_mm _is_all_true _is_any_true _jagged_to_
    _linalg_ _local_scalar_dense _log_softmax _logcumsumexp _lu_with_info _make_dual _masked_s _native_ _neg_view
    _pack_padded_sequence _pad_circular _pad_enum _pad_packed_sequence _padded_dense_ _pdist_ _prelu_kernel
    _reshape_copy _safe_softmax _sample_dirichlet _scaled_ _shape_as_tensor _softmax _standard_gamma _to_copy _transform
    _trilinear _unique _unpack_dual _unsafe_masked_index _unsafe_view _upsample_ _weight_
    """
)
_OF_ONE_LIBRARY = ("fbgemm_", "inductor_", "miopen_", "mkldnn_", "mps_", "quantized_", "sparse_")
#: Operators that a compiler takes without a check of the bounds, and the same with one.
_WITH_CHECKS = {"_unsafe_index": "index", "_unsafe_index_put": "index_put"}
#: Operators that run graphs of the file, with the positions of these arguments.
_BODIES = {
    **dict.fromkeys(_words("associative_scan hints_wrapper invoke_subgraph map_impl scan strict_mode"), (0,)),
    **dict.fromkeys(_words("tag_activation_checkpoint wrap wrap_activation_checkpoint"), (0,)),
    **dict.fromkeys(_words("partita_call partita_keep partita_wrap partita_wrap_activation_checkpoint"), (0,)),
    "partita_tag_activation_checkpoint": (0,),
    **dict.fromkeys(_words("while_loop while_loop_stack_output"), (0, 1)),
    **dict.fromkeys(_words("partita_inference_mode partita_set_grad_enabled wrap_with_set_grad_enabled"), (1,)),
    **dict.fromkeys(_words("partita_autocast wrap_with_autocast"), (4,)),
    "cond": (1, 2),
}
_RETRACED = _words(
    "associative_scan cond hints_wrapper invoke_subgraph map_impl scan strict_mode while_loop while_loop_stack_output"
)
#: Operators that call an operator, with the position of that argument.
_OPERATORS = {"auto_functionalized": (0,), "auto_functionalized_v2": (0,), "out_dtype": (0,), "with_effects": (1,)}


def _functions(owner: Any, prefix: str, names: str) -> dict[str, Callable[..., Any]]:
    return {f"{prefix}.{name}": getattr(owner, name) for name in sorted(_words(names)) if hasattr(owner, name)}


#: Arithmetic on sizes.
SCALAR_FUNCTIONS = {
    **_functions(operator, "_operator", "eq ne le ge lt gt neg pos mul add sub floordiv mod pow truediv and_ or_"),
    **_functions(operator, "_operator", "lshift rshift"),
    **_functions(math, "math", "trunc floor ceil"),
    **_functions(torch, "torch", "sym_not sym_int sym_float sym_ite sym_max sym_min sym_sqrt _sym_sqrt _sym_log2"),
}
#: Functions inside levels of vmap and jvp, as pre-dispatch exports have them.
_IN_LEVELS = "_add_batch_dim _remove_batch_dim _make_dual _unpack_dual _unwrap_for_grad lazy_load_decompositions"
#: The functions that enter a level, and those that exit it.
LEVELS = {
    "_vmap_increment_nesting": "_vmap_decrement_nesting",
    "_jvp_increment_nesting": "_jvp_decrement_nesting",
    "_enter_dual_level": "_exit_dual_level",
}
_FUNCTIONS = {
    **SCALAR_FUNCTIONS,
    **_functions(operator, "_operator", "getitem"),
    **_functions(predispatch, "torch._functorch.predispatch", " ".join((_IN_LEVELS, *LEVELS, *LEVELS.values()))),
}
