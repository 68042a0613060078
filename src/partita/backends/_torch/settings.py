"""What compiled code depends on beside its graph: settings of torch and Inductor, the processor, our own source."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch


def vectors() -> str:
    """The vector extension that torch and Inductor use here; `ATEN_CPU_CAPABILITY` can choose a lesser one."""
    return torch.backends.cpu.get_cpu_capability()


def instructions() -> list[str]:
    """The instruction set extensions of the processor, any of which a C++ compiler may use."""
    cpu: Any = torch.cpu
    if hasattr(cpu, "get_capabilities"):
        return sorted(name for name, found in cpu.get_capabilities().items() if found is True)
    # Older versions of torch have one function for each of those that Inductor checks.
    queries = [name for name in dir(cpu) if re.fullmatch(r"_is_\w+_supported", name)]
    return sorted(name[4:-10] for name in queries if getattr(cpu, name)())


def vectors_of_inductor(options: Mapping[str, Any]) -> str:
    """The vector extension that Inductor's source text is written for with these options; it is wrong for others."""
    bits = {**inductor_options(), **options}["cpp.simdlen"]
    return vectors() if bits is None else f"{vectors()}, {bits} bits"


def tested_instructions() -> str | None:
    """The vector instructions that Inductor has found to work here; None if it has not looked for them."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    return ", ".join(map(str, valid_vec_isa_list())) if valid_vec_isa_list.cache_info().currsize else None


def skip_tests_of(instructions: str | None) -> None:
    """Lets Inductor do without compiling and running a test program, if it would find these vector instructions.

    That takes longer than loading the functions of a model. The processor must have all that was used to build them.
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    if instructions is None or valid_vec_isa_list.cache_info().currsize:
        return
    with config.patch({"cpp.vec_isa_ok": True}):
        valid_vec_isa_list()
    if tested_instructions() != instructions:
        valid_vec_isa_list.cache_clear()


@cache
def digest_of_partita() -> str:
    """A digest of the source text of Partita, by which compiled code may change between two versions."""
    root = Path(__file__).resolve().parents[2]
    found = sorted(root.rglob("*.py"))
    texts = [f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes() for path in found]
    return blake2b(b"\n".join(texts), digest_size=16).hexdigest()


def inductor_options() -> dict[str, Any]:
    """Inductor's options and their current values."""
    from torch._inductor import config

    found: dict[str, Any] = config.get_config_copy()
    return found


def compiler_settings() -> str:
    """The settings of Inductor and AOTAutograd, and those of torch that they read, as text."""
    from functorch.compile import config

    settings: list[tuple[str, Any]] = [*inductor_options().items(), *config.get_config_copy().items()]
    settings += [(name, _value(read)) for name, read in _SETTINGS_OF_TORCH.items()]
    # How many processes compile has no effect on what they make.
    return repr(sorted((name, repr(value)) for name, value in settings if name not in ("compile_threads", "debug")))


def _value(read: Callable[[], object]) -> object:
    try:
        return read()
    except RuntimeError as error:  # Some cannot be read where they were set by a newer name.
        return str(error)


#: Beside what a call is specialized on. How many threads there are is compiled into loops, and which attention kernels
#: are allowed decides the operators of a graph.
_SETTINGS_OF_TORCH: dict[str, Callable[[], object]] = {
    "threads": torch.get_num_threads,
    "fp32 matmul": torch.get_float32_matmul_precision,
    "tf32": lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    "reduced fp16": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "reduced bf16": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
    "cudnn": lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
    "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled,
    "mkldnn": lambda: torch.backends.mkldnn.enabled,
    "fill": lambda: getattr(torch.utils.deterministic, "fill_uninitialized_memory", None),
}


def own_cache_keys() -> AbstractContextManager[None]:
    """Cache keys that differ from those of torch.compile for an equal graph, and between processors.

    Inductor's caches (torch 2.13) hold source text for vectors of one length, which is not part of their keys: where
    they are shared, a processor with shorter vectors computes only a part of each result.
    """
    import torch.compiler.config as known

    settings: Any = known
    tag = " ".join((settings.cache_key_tag, _CACHE_TAG, vectors(), *instructions())).strip()
    patched: AbstractContextManager[None] = settings.patch(cache_key_tag=tag)
    return patched


#: The version of our changes to graphs before Inductor gets them, which its cache keys do not contain.
_CACHE_TAG = "partita 2"


@contextmanager
def kernels_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Makes Inductor build its kernels in a folder, and look for them there; by default that is a temporary one."""
    # Triton's folder is one inside of it; torch sets the variable to the first such folder, for good.
    before = {name: os.environ.get(name) for name in (_KERNELS, "TRITON_CACHE_DIR")}
    os.environ[_KERNELS] = os.fspath(folder)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def own_kernels() -> str | None:
    """The folder that the user has named for kernels of Inductor."""
    return os.environ.get(_KERNELS) or None


_KERNELS = "TORCHINDUCTOR_CACHE_DIR"
