"""What native code depends on in the processor: the vectors that it is written for, and the instructions it may use."""

from __future__ import annotations

import re
from typing import Any

import torch

__all__ = ["instructions", "vectors"]


def vectors() -> str:
    """The kind of vectors that torch and Inductor use here; `ATEN_CPU_CAPABILITY` can choose a lesser one."""
    return torch.backends.cpu.get_cpu_capability()


def instructions() -> list[str]:
    """The instructions that the processor has beyond those of its family, any of which a C++ compiler may use."""
    cpu: Any = torch.cpu
    if hasattr(cpu, "get_capabilities"):
        return sorted(name for name, found in cpu.get_capabilities().items() if found is True)
    # Older versions of torch have one question for each of those that Inductor asks about.
    questions = [name for name in dir(cpu) if re.fullmatch(r"_is_\w+_supported", name)]
    return sorted(name[4:-10] for name in questions if getattr(cpu, name)())
