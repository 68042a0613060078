"""AOTAutograd without a compiler behind it: forward and backward as graphs of core operators, run as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from partita._torch.backend_fakes import compiling
from partita._torch.joint_partitioners import drop_forward_effects, plain_partition

__all__ = ["compile_ahead", "nothing_is_donated"]


def compile_ahead(body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A function that runs the graphs which AOTAutograd makes of `body`.

    Nothing of the forward runs again in the backward, so that random numbers are drawn once.
    """
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    def as_it_is(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        nothing_is_donated()
        return make_boxed_func(gm.forward)

    def backward_alone(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        drop_forward_effects(gm)
        return as_it_is(gm, example_inputs)

    with compiling(inputs):
        made: Callable[..., Any] = aot_module_simplified(
            body, list(inputs), as_it_is, backward_alone, plain_partition, keep_inference_input_mutations=True
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
