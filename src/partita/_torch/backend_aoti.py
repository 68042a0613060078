"""AOTInductor: a body and fake inputs into a package of native code, and a package into a function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch.fx import GraphModule

from partita._torch.backend_fakes import compiling

__all__ = ["function_of_package", "package_of"]


def package_of(body: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    """The package that AOTInductor makes of `body`, which takes and gives nothing but tensors."""
    from torch._export.utils import _compiling_state_context
    from torch._inductor.compile_fx import compile_fx_aot
    from torch._inductor.package.package import package_aoti

    patches = {**options, "aot_inductor.package": True}
    with compiling(inputs), _compiling_state_context():
        files: Any = compile_fx_aot(body, list(inputs), config_patches=patches)
    package = BytesIO()
    package_aoti(package, files)
    return package.getvalue()


def function_of_package(package: bytes) -> Callable[..., Sequence[Any]]:
    """The function in a package; it loads native code, so give it nothing that you do not trust."""
    with NamedTemporaryFile(suffix=".pt2") as file:
        file.write(package)
        file.flush()
        # What `torch._inductor.aoti_load_package` does, less a look at the machine that takes a compiler in torch 2.11.
        loader = torch._C._aoti.AOTIModelPackageLoader(file.name, "model", False, 1, -1)
    run: Callable[[list[Any]], Sequence[Any]] = loader.run
    return lambda *tensors: run(list(tensors))
