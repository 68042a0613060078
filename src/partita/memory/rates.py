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
    size = 4096 if device.type == "cuda" else 512
    heads, tokens = (16, 2048) if device.type == "cuda" else (4, 256)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        square = torch.zeros(size, size, device=device, dtype=dtype)
        small = torch.zeros(1, device=device, dtype=dtype)
        queries = torch.zeros(1, heads, tokens, 64, device=device, dtype=dtype)
        attend = torch.nn.functional.scaled_dot_product_attention
        call = _best(lambda: small + small, device)
        product = _best(lambda: square @ square, device)
        attention = _best(lambda: attend(queries, queries, queries), device)
        copy = _best(lambda: square + square, device)
    return Rates(
        matmul_flops=2 * size**3 / product,
        attention_flops=4 * heads * tokens * tokens * 64 / attention,
        bytes=3 * square.numel() * square.element_size() / copy,
        call=call,
    )


def _best(run: Callable[[], Tensor], device: torch.device) -> float:
    """The least time of several runs."""
    times = []
    for _ in range(8):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-7)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
