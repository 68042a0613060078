"""`partita doctor`: what works here, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from partita_cli.options import AsJson, examples
from partita_cli.output import say, say_json, table, title, working

EPILOG = examples("partita doctor", "partita doctor --json")
_OLDEST_TORCH = (2, 11)
#: Packages that some parts use, the extra that brings each, and what for.
_OPTIONAL = (
    ("transformers", "models", "models of the transformers library in the demo and the examples"),
    ("matplotlib", "pictures", "timelines of memory as PNG"),
    ("onnx", "interop", "export to ONNX"),
    ("onnxscript", "interop", "export to ONNX"),
    ("onnxruntime", "interop", "running ONNX, and the example backend"),
    ("openvino", "interop", "running programs in OpenVINO"),
    ("hypothesis", "testing", "partita.testing, check-backend and the fuzz"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: whether it is fine, what was found, and what to do if it is not."""

    name: str
    fine: bool
    found: str
    advice: str = ""
    is_needed: bool = False


def command(json: AsJson = False) -> int:
    """Look at versions, compilers, devices and optional packages. The status is 1 if Partita cannot run here."""
    with working("looking"):
        checks = list(_checks())
    if json:
        say_json([asdict(check) for check in checks])
    else:
        _print(checks)
    return 0 if all(check.fine for check in checks if check.is_needed) else 1


def _checks() -> Iterator[Check]:
    yield Check("python", sys.version_info >= (3, 11), platform.python_version(), "Partita needs 3.11", is_needed=True)
    yield Check("system", True, f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs")
    yield _torch()
    yield _partita()
    yield _cxx()
    yield _triton()
    yield from _devices()
    yield from _backends()
    for name, extra, purpose in _OPTIONAL:
        found = _version(name)
        advice = "" if found else f"for {purpose}: pip install 'partita[{extra}]'"
        yield Check(name, found is not None, found or "not installed", advice)


def _version(package: str) -> str | None:
    try:
        return version(package) if find_spec(package) is not None else None
    except PackageNotFoundError:
        return "version unknown"


def _torch() -> Check:
    advice = "Partita needs torch 2.11 or newer: pip install -U torch"
    try:
        import torch
    except Exception as error:  # A broken installation raises anything.
        return Check("torch", False, f"cannot be imported: {type(error).__name__}: {error}", advice, is_needed=True)
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return Check("torch", numbers >= _OLDEST_TORCH, torch.__version__, advice, is_needed=True)


def _partita() -> Check:
    try:
        import partita
    except Exception as error:
        return Check("partita", False, f"cannot be imported: {type(error).__name__}: {error}", is_needed=True)
    return Check("partita", True, f"{partita.__version__}, {os.path.dirname(partita.__file__)}", is_needed=True)


def _cxx() -> Check:
    wanted = os.environ.get("CXX")
    found = next(
        (path for name in (wanted, "g++", "clang++", "c++", "cl") if name and (path := shutil.which(name))), None
    )
    advice = "inductor and aot_inductor compile for a CPU with it: install g++ or clang, or set CXX"
    return Check("C++ compiler", found is not None, found or "none", advice)


def _triton() -> Check:
    found = _version("triton")
    advice = "inductor compiles for a GPU with it; it comes with the CUDA builds of torch"
    return Check("triton", found is not None, found or "not installed", advice)


def _devices() -> Iterator[Check]:
    try:
        import torch
    except Exception:
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for at in range(count):
        properties = torch.cuda.get_device_properties(at)
        yield Check(f"cuda:{at}", True, f"{properties.name}, {properties.total_memory / 10**9:.1f} GB")
    if not count:
        built = torch.version.cuda or torch.version.hip
        advice = "the driver finds no GPU" if built else "this build of torch is for CPUs; pytorch.org has others"
        yield Check("GPU", False, "none", f"{advice}. All but CUDA graphs works without")


def _backends() -> Iterator[Check]:
    try:
        from partita.backends import backend_names, find_backend
    except Exception:
        return
    for name in backend_names():
        try:
            find_backend(name)
        except Exception as error:
            yield Check(f"backend {name}", False, "cannot be loaded", str(error))
        else:
            yield Check(f"backend {name}", True, "found")


def _print(checks: list[Check]) -> None:
    fine = [check for check in checks if check.fine]
    missing = [check for check in checks if not check.fine]
    title("works")
    table([(check.name, check.found) for check in fine], indent="  ")
    if missing:
        title("\nmissing")
        table([(check.name, f"{check.found}; {check.advice}") for check in missing], indent="  ")
    needed = [check.name for check in missing if check.is_needed]
    say(f"\nPartita cannot run here: {', '.join(needed)}" if needed else "\nPartita runs here.")
