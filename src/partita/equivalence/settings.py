"""Torch's settings that a program may change: one table, by which they are read, compared and restored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import backends
from torch.autograd import forward_ad

from partita._torch.modes import in_forward_mode
from partita._torch.stacks import (
    active_saved_tensor_hooks,
    dispatch_modes,
    function_modes,
    restore_modes,
    restore_saved_tensor_hooks,
)


def _itself(value: Any) -> Any:
    return value


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name, how it is read and written, and what of its value two programs must agree on."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    compared: Callable[[Any], object] = _itself

    def value(self) -> Any:
        """The current value."""
        try:
            return self.read()
        except RuntimeError:  # As for an older name of a setting, where a newer one says what the older cannot.
            return _UNREADABLE

    def restore(self, value: Any) -> None:
        """Sets an earlier value, if it is another one."""
        if value is not _UNREADABLE and self.value() != value:
            self.write(value)


class _Unreadable:
    def __repr__(self) -> str:
        return "not readable"


_UNREADABLE = _Unreadable()


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """The values of all settings at one moment."""

    values: tuple[tuple[Setting, Any], ...]

    def restore(self, settings: Iterable[Setting] | None = None) -> None:
        """Restores all settings that were changed, or those of `settings`."""
        chosen = None if settings is None else set(settings)
        for setting, value in self.values:
            if chosen is None or setting in chosen:
                setting.restore(value)

    def differing(self, other: Settings) -> Iterator[tuple[str, str]]:
        """The names of the settings that differ in `other`, each with both values as text."""
        for (setting, mine), (_, theirs) in zip(self.values, other.values, strict=True):
            one, another = (value if value is _UNREADABLE else setting.compared(value) for value in (mine, theirs))
            if one != another:
                yield setting.name, f"{one} != {another}"


def read_settings() -> Settings:
    """The settings now."""
    return Settings(tuple((setting, setting.value()) for setting in SETTINGS))


def _attribute(name: str, owner: object, attribute: str) -> Iterator[Setting]:
    """The setting that an attribute is; none where this version of torch does not have it."""
    setting = Setting(name, partial(getattr, owner, attribute), partial(setattr, owner, attribute))
    with suppress(AttributeError):
        setting.value()
        yield setting


def _library(name: str, function: Callable[..., Any]) -> Setting:
    """The setting of a function that returns its value, and sets it where it is given one."""
    return Setting(name, function, function)


def _set_deterministic(value: tuple[bool, bool]) -> None:
    mode, warn_only = value
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def _set_default_device(device: torch.device) -> None:
    # None is the CPU without a DeviceContext, a mode that every factory function would go through.
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _flushes_denormals() -> bool:
    """Whether this thread's numbers below the smallest normal one become zero, as `torch.set_flush_denormal` says."""
    return sys.float_info.min / 2 == 0.0


def _set_sparse_checks(enabled: bool) -> None:  # noqa: FBT001
    sparse: Any = torch.sparse.check_sparse_tensor_invariants
    (sparse.enable if enabled else sparse.disable)()


def _set_anomaly_detection(value: tuple[bool, bool]) -> None:
    enabled, check_nan = value
    torch.autograd.set_detect_anomaly(enabled, check_nan)


def _read_einsum() -> tuple[bool, str | None]:
    module: Any = backends.opt_einsum
    return module.enabled, module.strategy


def _set_einsum(value: tuple[bool, str | None]) -> None:
    """Sets both at once: a strategy is refused while there is no optimization."""
    enabled, strategy = value
    module: Any = backends.opt_einsum
    if module.strategy != strategy:
        module.enabled = True
        module.strategy = strategy
    module.enabled = enabled


def _close_dual_levels(is_open: bool) -> None:  # noqa: FBT001
    if not is_open:
        forward_ad.exit_dual_level()


def _stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_available() else None


def _cuda_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _precisions() -> Iterator[Setting]:
    """How exact products, convolutions and recurrent networks of single precision are.

    The older names come first: they set the newer ones, too, and cannot be read where these say something else. Then
    come those from which others take their value.
    """
    cuda: Any = backends.cuda
    cudnn: Any = backends.cudnn
    mkldnn: Any = backends.mkldnn
    yield Setting("matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    yield from _attribute("cudnn allow tf32", cudnn, "allow_tf32")
    yield from _attribute("mkldnn allow tf32", mkldnn, "allow_tf32")
    yield from _attribute("fp32 precision", backends, "fp32_precision")
    yield from _attribute("cudnn fp32 precision", cudnn, "fp32_precision")
    if hasattr(mkldnn, "fp32_precision"):
        # Assigned to (torch 2.13), it would be the precision of all backends that is set.
        yield Setting(
            "mkldnn fp32 precision",
            lambda: mkldnn.fp32_precision,
            lambda value: mkldnn.set_flags(_fp32_precision=value),
        )
    for name, owner in (("cuda matmul", cuda.matmul), *_kinds("cudnn", cudnn), *_kinds("mkldnn", mkldnn)):
        yield from _attribute(f"{name} fp32 precision", owner, "fp32_precision")


def _kinds(name: str, backend: object) -> Iterator[tuple[str, object]]:
    for kind in ("matmul", "conv", "rnn"):
        if hasattr(backend, kind):
            yield f"{name} {kind}", getattr(backend, kind)


def _attention() -> Iterator[Setting]:
    """Which kernels scaled_dot_product_attention may choose."""
    cuda: Any = backends.cuda
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        read, write = getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")
        yield Setting(f"{name.replace('_', ' ')} attention", read, write)
    yield Setting(
        "reduced precision in math attention",
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
    )
    yield Setting(
        "fast path of attention modules", backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled
    )


def _libraries() -> Iterator[Setting]:
    """What cuDNN, cuBLAS, oneDNN and their kin may do."""
    cuda: Any = backends.cuda
    yield from _attribute("cudnn", backends.cudnn, "enabled")
    yield from _attribute("cudnn deterministic", backends.cudnn, "deterministic")
    yield from _attribute("cudnn benchmark", backends.cudnn, "benchmark")
    yield from _attribute("cudnn benchmark limit", backends.cudnn, "benchmark_limit")
    yield from _attribute("cudnn depthwise kernel", backends.cudnn, "depthwise_kernel")
    yield _reduction("fp16")
    yield _reduction("bf16")
    yield from _attribute("fp16 accumulation in matmul", cuda.matmul, "allow_fp16_accumulation")
    yield _library("preferred linear algebra library", cuda.preferred_linalg_library)
    yield _library("preferred BLAS library", cuda.preferred_blas_library)
    yield from _attribute("mkldnn", backends.mkldnn, "enabled")
    yield from _attribute("mkldnn deterministic", backends.mkldnn, "deterministic")
    yield from _attribute("quantized engine", backends.quantized, "engine")
    yield Setting("opt_einsum", _read_einsum, _set_einsum)


def _reduction(dtype: str) -> Setting:
    """Whether products in half precision may sum in half precision, and in several parts that are summed at the end."""
    matmul: Any = backends.cuda.matmul
    name = f"allow_{dtype}_reduced_precision_reduction"

    def read() -> tuple[bool, bool]:
        return getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)

    def write(value: tuple[bool, bool]) -> None:
        reduced, splits = value
        # Only where the parts are forbidden must the version of torch know them.
        setattr(matmul, name, reduced if splits else value)

    return Setting(f"{dtype} reduced precision reduction", read, write)


def _general() -> Iterator[Setting]:
    """What is read by all operators, or by autograd."""
    yield Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Setting("default device", torch.get_default_device, _set_default_device)
    yield Setting("flush denormal", _flushes_denormals, torch.set_flush_denormal)
    yield Setting(
        "deterministic",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    )
    yield from _attribute("fills uninitialized memory", torch.utils.deterministic, "fill_uninitialized_memory")
    yield Setting("number of threads", torch.get_num_threads, torch.set_num_threads)
    yield Setting("warn always", torch.is_warn_always_enabled, torch.set_warn_always)
    yield Setting(
        "checks of sparse tensors", torch.sparse.check_sparse_tensor_invariants.is_enabled, _set_sparse_checks
    )
    future: Any = torch.__future__
    for name in ("overwrite", "swap"):
        rest = "module_params_on_conversion"
        read, write = getattr(future, f"get_{name}_{rest}"), getattr(future, f"set_{name}_{rest}")
        yield Setting(f"{name} parameters on conversion", read, write)
    yield Setting("CUDA device", _cuda_device, torch.cuda.set_device)
    yield Setting("CUDA stream", _stream, torch.cuda.set_stream)
    autograd: Any = torch.autograd
    yield Setting("multithreading of backward", autograd.is_multithreading_enabled, autograd.set_multithreading_enabled)
    yield Setting(
        "detects anomalies",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        _set_anomaly_detection,
    )
    yield Setting("forward-mode AD", in_forward_mode, _close_dual_levels)


def _kinds_of(modes: Iterable[object]) -> tuple[str, ...]:
    return tuple(type(mode).__qualname__ for mode in modes)


def _names_of(hooks: tuple[Callable[..., Any], ...] | None) -> tuple[str, ...] | None:
    return None if hooks is None else tuple(getattr(hook, "__name__", type(hook).__name__) for hook in hooks)


#: What a call may leave on the stacks of its thread; all that is run afterwards would go through it.
STACKS = (
    Setting("function modes", function_modes, partial(restore_modes, function_modes), _kinds_of),
    Setting("dispatch modes", dispatch_modes, partial(restore_modes, dispatch_modes), _kinds_of),
    Setting("hooks on saved tensors", active_saved_tensor_hooks, restore_saved_tensor_hooks, _names_of),
)
#: All settings, in the order in which they are restored.
SETTINGS = (*_general(), *_precisions(), *_attention(), *_libraries(), *STACKS)
