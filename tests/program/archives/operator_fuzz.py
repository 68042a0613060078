"""Every operator that a file may name, dry run with odd arguments in a process with limits of time and memory.

`main(first, count)` makes so many calls, of one operator after the other, and prints the number of each before it is
made, so that whoever started the process knows which one killed it. What takes memory is said in a line that begins
with `broken`.
"""

from __future__ import annotations

import logging
import math
import random
import re
import resource
import signal
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from partita._torch.dry_runs import Allowance, refusal_of_call
from partita._torch.fake_tensors import FakeCopies
from partita.program._torch.saved_tensors import (
    OperatorMonitor,
    allocated_tensors,
    flops_until_saved,
    intercept_saved_tensors,
    isolated_from_caller,
)
from partita.program.archives._torch.operators import NAMESPACES, operator_of
from partita.program.archives.data import Data, RefusedError

SECONDS_EACH = 5
BYTES_MORE = 4 << 30
_MOST_KILOBYTES = 300_000


def operators() -> list[OpOverload]:
    """The operators of torch that a file may name."""
    found: dict[str, OpOverload] = {}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space in NAMESPACES:
            try:
                target = operator_of(Data(f"torch.ops.{space}.{base}.{overload or 'default'}"), ())
            except RefusedError:
                continue
            if isinstance(target, OpOverload):
                found[str(target)] = target
    return list(found.values())


_SIZES = (
    (0, 1, 2, 3, 4, 4, 8),
    (0, 0, 1, 2, 3, 4, 5, 7, 16, 1000, 2**20),
    (0, 1, 2, 3, 2**20, 2**31, 2**31 - 1, 2**40, 2**62, 2**63 - 1),
)
_NUMBERS = (
    (0, 1, 2, 3, 4, -1, -2),
    (0, 0, 1, 2, 3, -1, -2, -3, 4, 8, 64, 100, 1000, 2**20),
    (0, 1, -1, 64, 2**20, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)),
)
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-300, 1e308, math.inf, -math.inf, math.nan)
_DTYPES = [torch.float32] * 4 + [torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8]
_WORDS = (
    *("none", "mean", "sum", "zeros", "bilinear", "constant", "reflect", "fro", "nuc", "L"),
    *("U", "floor", "trunc", "tanh", "ij", "same", "valid", "ij,jk->ik", "...", "left"),
)
_OTHERS: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "str": _WORDS,
    "ScalarType": tuple(_DTYPES),
    "Layout": (torch.strided, torch.sparse_coo),
    "MemoryFormat": (torch.contiguous_format, torch.channels_last, torch.preserve_format),
    "Device": (torch.device("cpu"), torch.device("meta")),
    "Generator": (None,),
}
_TYPE = re.compile(r"(Optional\[)?(List\[)?(Optional\[)?(\w+)\]*")


class Arguments:
    """Odd arguments for one call: usual numbers, rare ones, or extreme ones; most tensors have one shape."""

    def __init__(self, seed: str) -> None:
        self._dice = random.Random(seed)
        self._level = self._dice.choice((0, 0, 1, 2))
        self._shape = [self._dice.choice(_SIZES[self._level]) for _ in range(self._dice.randrange(7))]
        self._dtype = self._dice.choice(_DTYPES)

    def of(self, target: OpOverload) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs, is_in_order = list[Any](), dict[str, Any](), True
        for argument in target._schema.arguments:
            if argument.has_default_value() and self._dice.random() < 0.35:
                is_in_order = False
                continue
            is_in_order = is_in_order and not argument.kwarg_only
            if is_in_order:
                args.append(self._argument(argument))
            else:
                kwargs[argument.name] = self._argument(argument)
        return tuple(args), kwargs

    def _argument(self, argument: Any) -> Any:
        match = _TYPE.fullmatch(str(argument.real_type))
        if match is None or (match[1] and self._dice.random() < 0.3):
            return None
        if not match[2]:
            return self._value(match[4])
        usual = argument.N or self._dice.choice((0, 1, 2, 3, len(self._shape)))
        return [self._value(match[4]) for _ in range(self._dice.choice((usual, usual, 1)))]

    def _value(self, kind: str) -> Any:
        if kind in _OTHERS:
            return self._dice.choice(_OTHERS[kind])
        if kind == "Tensor" and self._dice.random() < 0.95:
            return self._tensor()
        number = self._dice.choice(_NUMBERS[self._level])
        return number if kind == "int" else self._dice.choice((number, self._dice.choice(_FLOATS), True, 1 + 2j))

    def _tensor(self) -> torch.Tensor:
        shape, dtype = list(self._shape), self._dice.choice((self._dtype, self._dtype, self._dice.choice(_DTYPES)))
        if self._dice.random() < 0.3:
            shape = [self._dice.choice(_SIZES[self._level]) for _ in range(self._dice.randrange(7))]
        strides = [self._dice.choice((0, 1, 7, 2**20)) for _ in shape]
        try:
            if self._dice.random() < 0.15:
                return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            return torch.empty(shape, dtype=dtype, device="meta")
        except RuntimeError:  # More elements than there are numbers.
            return torch.empty([min(size, 4) for size in shape], dtype=dtype, device="meta")


def dry_run(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Makes the call in the ways in which analyses do; what it raises is its own affair."""
    if refusal_of_call(target, args, kwargs) is not None:
        return
    with suppress(Exception):
        flops_until_saved("call_function", target, args, kwargs, allowance=Allowance(2_000))
    fakes = FakeCopies()
    try:
        args, kwargs = fakes.value((args, kwargs))
        monitor = OperatorMonitor(lambda *_, **__: None, Allowance(2_000))
        with isolated_from_caller(grad=False), intercept_saved_tensors(lambda _: None), fakes.mode, monitor:
            target(*args, **kwargs)
    except Exception:
        return
    allocated_tensors(target, args, kwargs, allowance=Allowance(2_000))


def main(first: int, count: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    known = operators()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES_MORE, used + BYTES_MORE))
    for number in range(first, first + count):
        target = known[number % len(known)]
        args, kwargs = Arguments(f"{target} {number}").of(target)
        print(number, target, flush=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
        dry_run(target, args, kwargs)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > _MOST_KILOBYTES:
            print(f"broken: call {number} of {target} took memory", flush=True)
    print("done", flush=True)
