"""How fast a device is: seconds for floating-point operations, for bytes moved, and for each call of a kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import final

import torch
from torch import Tensor

from partita.errors import OptionError
from partita.program._torch.saved_tensors import isolated_from_caller


@final
@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of a device, by which the time of recomputation is predicted; measured ones: `measure_rates`."""

    #: Floating-point operations of matrix products and convolutions a second.
    matmul_flops: float
    #: Floating-point operations of attention kernels a second.
    attention_flops: float
    #: Bytes that an elementwise kernel reads and writes a second.
    bytes: float
    #: Seconds for each call of a kernel.
    call: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "call" else 1
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
                raise OptionError(f"the rate {field.name!r} is a number of at least {least}, not {value!r}")

    def seconds(self, flops: int, moved_bytes: int, *, is_attention: bool = False) -> float:
        """The time that an operator takes, by its work."""
        if not flops and not moved_bytes:
            return 0.0
        rate = self.attention_flops if is_attention else self.matmul_flops
        return max(flops / rate, moved_bytes / self.bytes) + self.call


def two_digits(number: float) -> str:
    """A predicted number of milliseconds or percent in two digits, since measured rates have no more."""
    rounded = float(f"{number:.2g}")
    if abs(rounded) >= 10:
        return f"{rounded:,.0f}"
    return f"{rounded:.1f}" if abs(rounded) >= 1 else f"{rounded:.2g}"


def shown_milliseconds(seconds: float) -> str:
    """Predicted seconds, to print."""
    return f"{two_digits(1e3 * seconds)} ms"


@cache
def measure_rates(device: torch.device, dtype: torch.dtype = torch.float32) -> Rates:
    """The rates of a device, measured in a tenth of a second; once in a process for each device and dtype.

    Kernels take turns, and the least time of each counts, so that another process that runs for a part of the time does
    not slow down one of them. It takes up to half a second where times still improve, as on a loaded machine.
    """
    is_gpu = device.type == "cuda"
    size, repeats = (8192, 10) if is_gpu else (512, 1)
    shape = (4, 16, 2048, 128) if is_gpu else (1, 4, 256, 64)
    with isolated_from_caller(grad=False):  # A tracer or compiler may be active.
        square = torch.zeros(size, size, device=device, dtype=dtype)
        small = torch.zeros(1, device=device, dtype=dtype)
        queries = torch.zeros(shape, device=device, dtype=dtype)
        attend = torch.nn.functional.scaled_dot_product_attention
        kernels = (
            lambda: small + small,
            lambda: square @ square,
            lambda: attend(queries, queries, queries),
            lambda: square + square,
        )
        call, product, attention, copy = _least_seconds(kernels, device, repeats)
    batch, heads, tokens, width = shape
    return Rates(
        matmul_flops=2 * size**3 / product,
        attention_flops=4 * batch * heads * tokens * tokens * width / attention,
        bytes=3 * square.numel() * square.element_size() / copy,
        call=call,
    )


def _least_seconds(kernels: Sequence[Callable[[], Tensor]], device: torch.device, repeats: int) -> list[float]:
    """The least time of a call of each kernel, of many rounds in which they take turns.

    It goes on until no round has been faster for a while, since a loaded machine slows most of them down.
    """
    least = [float("inf")] * len(kernels)
    without_gain, start = 0, time.perf_counter()
    for at in range(_MOST_ROUNDS):
        times = [_seconds(kernel, device, repeats) for kernel in kernels]
        if at:  # The first calls allocate memory and choose kernels.
            is_faster = any(now < known * (1 - _GAIN) for now, known in zip(times, least, strict=True))
            least = [min(pair) for pair in zip(times, least, strict=True)]
            without_gain = 0 if is_faster else without_gain + 1
        is_late = time.perf_counter() - start > _LONGEST_SECONDS
        if at >= _FEWEST_ROUNDS and (without_gain >= _ROUNDS_WITHOUT_GAIN or is_late):
            break
    return [max(one, 1e-7) for one in least]


_FEWEST_ROUNDS, _MOST_ROUNDS, _ROUNDS_WITHOUT_GAIN = 7, 200, 7
_GAIN, _LONGEST_SECONDS = 0.03, 0.5


def _seconds(run: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """The time of a call, over so many calls."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
