"""AOTAutograd without a compiler behind it: forward and backward as graphs of core operators, run as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from partita._torch.backend_fakes import compiling

__all__ = ["compile_ahead", "nothing_is_donated"]


def compile_ahead(body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A function that runs the graphs which AOTAutograd makes of `body`.

    No value is computed again in the backward, so that a random draw stays one.
    """
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import default_partition

    def as_it_is(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        nothing_is_donated()
        return make_boxed_func(gm.forward)

    with compiling(inputs):
        made: Callable[..., Any] = aot_module_simplified(
            body, list(inputs), as_it_is, as_it_is, default_partition, keep_inference_input_mutations=True
        )
    return made


def nothing_is_donated() -> None:
    """Tells the graph that is being compiled that its backward leaves what the forward kept as it is.

    Else a backward overwrites it, and a second one, after `retain_graph=True`, has to be refused. With donation
    switched off, torch 2.13 does not overwrite, but refuses all the same: it takes "not looked for" for "found".
    """
    from torch._guards import TracingContext

    metadata = TracingContext.get().fw_metadata
    if metadata is not None and getattr(metadata, "bw_donated_idxs", ()) is None:
        metadata.bw_donated_idxs = []
