"""How fast a device is: seconds for floating-point operations, for bytes moved, and for each call of a kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
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


@cache
def measure_rates(device: torch.device, dtype: torch.dtype = torch.float32) -> Rates:
    """The rates of a device, measured in about a tenth of a second; once in a process for each device and dtype."""
    is_gpu = device.type == "cuda"
    size, repeats = (8192, 10) if is_gpu else (512, 1)
    shape = (4, 16, 2048, 128) if is_gpu else (1, 4, 256, 64)
    with isolated_from_caller(grad=False):  # A tracer or compiler may be active.
        square = torch.zeros(size, size, device=device, dtype=dtype)
        small = torch.zeros(1, device=device, dtype=dtype)
        queries = torch.zeros(shape, device=device, dtype=dtype)
        attend = torch.nn.functional.scaled_dot_product_attention
        call = _seconds(lambda: small + small, device, repeats)
        product = _seconds(lambda: square @ square, device, repeats)
        attention = _seconds(lambda: attend(queries, queries, queries), device, repeats)
        copy = _seconds(lambda: square + square, device, repeats)
    batch, heads, tokens, width = shape
    return Rates(
        matmul_flops=2 * size**3 / product,
        attention_flops=4 * batch * heads * tokens * tokens * width / attention,
        bytes=3 * square.numel() * square.element_size() / copy,
        call=call,
    )


def _seconds(run: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """The least time of a call, of several tries of so many calls each."""
    times = []
    for _ in range(8):
        _wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        _wait(device)
        times.append((time.perf_counter() - start) / repeats)
    return max(min(times[1:]), 1e-7)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
