"""Every setting of the table is compared after a call, and restored between the programs and afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, backends, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partita import compare, verify
from partita.equivalence.settings import SETTINGS, read_settings

CUDA: Any = backends.cuda
CUDNN: Any = backends.cudnn
MKLDNN: Any = backends.mkldnn
ALL: Any = backends


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class Passes(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _set(owner: Any, name: str, value: object) -> Callable[[], object]:
    return lambda: setattr(owner, name, value)


def _use_another_engine() -> None:
    engines: Any = backends.quantized
    engines.engine = next(name for name in engines.supported_engines if name not in ("none", engines.engine))


#: What a call does, by the name of the setting that it leaves changed.
LEAKS: dict[str, Callable[[], object]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "flush denormal": lambda: torch.set_flush_denormal(True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fills uninitialized memory": _set(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "warn always": lambda: torch.set_warn_always(True),
    "checks of sparse tensors": torch.sparse.check_sparse_tensor_invariants.enable,
    "overwrite parameters on conversion": lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
    "swap parameters on conversion": lambda: torch.__future__.set_swap_module_params_on_conversion(True),
    "multithreading of backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "detects anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "forward-mode AD": forward_ad.enter_dual_level,
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "cudnn allow tf32": _set(CUDNN, "allow_tf32", False),
    "fp32 precision": _set(ALL, "fp32_precision", "ieee"),
    "cudnn fp32 precision": _set(CUDNN, "fp32_precision", "ieee"),
    "mkldnn fp32 precision": lambda: MKLDNN.set_flags(_fp32_precision="bf16"),
    "cuda matmul fp32 precision": _set(CUDA.matmul, "fp32_precision", "tf32"),
    "cudnn conv fp32 precision": lambda: setattr(CUDNN.conv, "fp32_precision", "ieee"),
    "mkldnn matmul fp32 precision": lambda: setattr(MKLDNN.matmul, "fp32_precision", "bf16"),
    "flash attention": lambda: CUDA.enable_flash_sdp(False),
    "mem efficient attention": lambda: CUDA.enable_mem_efficient_sdp(False),
    "math attention": lambda: CUDA.enable_math_sdp(False),
    "cudnn attention": lambda: CUDA.enable_cudnn_sdp(False),
    "reduced precision in math attention": lambda: CUDA.allow_fp16_bf16_reduction_math_sdp(True),
    "fast path of attention modules": lambda: backends.mha.set_fastpath_enabled(False),
    "cudnn": _set(CUDNN, "enabled", False),
    "cudnn deterministic": _set(CUDNN, "deterministic", True),
    "cudnn benchmark": _set(CUDNN, "benchmark", True),
    "fp16 reduced precision reduction": _set(CUDA.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reduced precision reduction": _set(CUDA.matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16 accumulation in matmul": _set(CUDA.matmul, "allow_fp16_accumulation", True),
    "mkldnn": _set(MKLDNN, "enabled", False),
    "mkldnn deterministic": _set(MKLDNN, "deterministic", True),
    "quantized engine": _use_another_engine,
    "function modes": lambda: Doubles().__enter__(),
    "dispatch modes": lambda: Passes().__enter__(),
    "hooks on saved tensors": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor).__enter__(),
}
#: What is not available on every machine: a library or a device.
ELSEWHERE = {
    *("CUDA device", "CUDA stream", "preferred linear algebra library", "preferred BLAS library", "opt_einsum"),
    *("cudnn benchmark limit", "cudnn depthwise kernel", "mkldnn allow tf32", "cudnn rnn fp32 precision"),
    *("mkldnn conv fp32 precision", "mkldnn rnn fp32 precision"),
}


@pytest.fixture(autouse=True)
def _settings_as_they_were() -> Iterator[None]:
    before = read_settings()
    yield
    before.restore()


def doubled(x: Tensor) -> Tensor:
    return x * 2


def leaking(leak: Callable[[], object]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        y = x * 2
        leak()
        return y

    return call


def test_each_setting_of_the_table_has_a_test_here() -> None:
    assert {setting.name for setting in SETTINGS} <= LEAKS.keys() | ELSEWHERE


@pytest.mark.parametrize("name", [setting.name for setting in SETTINGS if setting.name in LEAKS])
def test_settings_that_are_left_changed_are_seen_and_put_back(name: str) -> None:
    before = read_settings()
    for original, other in ((doubled, leaking(LEAKS[name])), (leaking(LEAKS[name]), doubled)):
        found = compare(original, other, (torch.randn(3),)).differences
        assert ("setting", f"{name} after the call") in {(one.kind, one.where) for one in found}
        assert {one.kind for one in found} <= {"setting", "exception"}
        assert list(before.differing(read_settings())) == []


@pytest.mark.parametrize("name", [setting.name for setting in SETTINGS if setting.name in LEAKS])
def test_settings_that_both_leave_changed_do_not_differ(name: str) -> None:
    verify(leaking(LEAKS[name]), leaking(LEAKS[name]), (torch.randn(3),), gradients=name != "default device")


def test_the_settings_of_the_caller_are_those_of_both_programs() -> None:
    def setting(x: Tensor) -> tuple[Tensor, bool, bool, int]:
        return x * 2, CUDA.flash_sdp_enabled(), sys.float_info.min / 2 == 0.0, torch.get_num_threads()

    CUDA.enable_flash_sdp(False)
    torch.set_flush_denormal(True)
    torch.set_num_threads(3)
    seen: list[Any] = []

    def watched(x: Tensor) -> Any:
        seen.append(setting(x)[1:])
        return setting(x)

    assert verify(watched, setting, (torch.randn(3),)).equal
    assert set(seen) == {(False, True, 3)}
    assert (CUDA.flash_sdp_enabled(), torch.get_num_threads()) == (False, 3)
    assert float(torch.tensor(1e-40) * 1) == 0.0


def test_precision_that_was_set_by_the_newer_names_can_be_compared() -> None:
    """Torch then refuses to read it by the older ones."""
    CUDA.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    model = nn.Linear(3, 3)
    assert verify(model, model, (torch.randn(2, 3),)).equal
    found = compare(doubled, leaking(_set(CUDA.matmul, "fp32_precision", "ieee")), (torch.randn(3),)).differences
    assert "cuda matmul fp32 precision after the call" in {one.where for one in found}
    assert CUDA.matmul.fp32_precision == "tf32"


def test_a_mode_that_is_left_on_changes_nothing_that_is_recorded() -> None:
    found = compare(torch.sin, lambda x: (x.sin(), Doubles().__enter__())[0], (torch.randn(3),)).differences
    assert {one.where for one in found} == {"function modes after the call"}
    assert [one.detail for one in found] == ["() != ('Doubles',)"]


def test_modes_and_hooks_of_the_caller_stay_on_when_a_call_leaves_them() -> None:
    mode, hooks = Passes(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

    def leaves(x: Tensor) -> Tensor:
        mode.__exit__(None, None, None)
        return x * 2

    def removes(x: Tensor) -> Tensor:
        hooks.__exit__()
        return x * 2

    with mode, hooks:
        before = read_settings()
        for call, name in ((leaves, "dispatch modes"), (removes, "hooks on saved tensors")):
            found = compare(doubled, call, (torch.randn(3),)).differences
            assert {one.where for one in found} == {f"{name} after the call"}
            assert list(before.differing(read_settings())) == []


def test_settings_of_another_thread_are_not_touched() -> None:
    """Whether denormal numbers are flushed belongs to the thread."""
    seen: list[bool] = []

    def other() -> None:
        torch.set_flush_denormal(True)
        verify(doubled, doubled, (torch.randn(3),))
        seen.append(sys.float_info.min / 2 == 0.0)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [True]
    assert sys.float_info.min / 2 != 0.0


def test_a_program_may_restore_the_settings_of_a_mode_that_an_exception_leaves_open() -> None:
    def leaves_open(x: Tensor) -> Tensor:
        handle = torch.autograd.grad_mode._enter_inference_mode(True)
        raise ValueError(f"in the block of {type(handle).__name__}"[:12])

    def restores(x: Tensor) -> Tensor:
        with torch.inference_mode():
            raise ValueError("in the block")

    assert compare(leaves_open, restores, (torch.ones(2),)).equal
