"""The reasons for which compilers that trace with fake tensors refuse a node."""

from __future__ import annotations

__all__ = [
    "AUTOGRAD",
    "CPLUSPLUS_OBJECT",
    "DROPOUT",
    "FOREACH_ADDITION",
    "FUSED_ADAM",
    "GENERATOR",
    "HOOK",
    "INSIDE_TRANSFORM",
    "IN_PLACE_COLLECTIVE",
    "LEAVES_TORCH",
    "LSTM",
    "MKLDNN",
    "NESTED",
    "NO_META_KERNEL",
    "QUANTIZED",
    "RANDPERM",
    "RESHAPES",
    "SHARES_MEMORY",
    "SIDE_EFFECT",
    "SIZE_DEPENDS_ON_DATA",
    "SPARSE",
    "TRANSFORM",
    "UNKNOWN_FUNCTION",
    "UNKNOWN_METHOD",
    "UNKNOWN_MODULE",
    "VALUE_DEPENDS_ON_DATA",
    "WRITES_TWICE",
]

NO_META_KERNEL = "no meta kernel"
SIZE_DEPENDS_ON_DATA = "size depends on data"
VALUE_DEPENDS_ON_DATA = "value depends on data"
LEAVES_TORCH = "gives data to Python"

# A trace keeps what these computed, and forgets what else they did.
SIDE_EFFECT = "side effect"
UNKNOWN_FUNCTION = "unknown Python function"
UNKNOWN_METHOD = "unknown method"
UNKNOWN_MODULE = "unknown module"

SPARSE = "sparse tensor"
QUANTIZED = "quantized tensor"
MKLDNN = "mkldnn tensor"
NESTED = "nested tensor"
CPLUSPLUS_OBJECT = "object of a C++ class"

AUTOGRAD = "autograd inside the graph"
HOOK = "hook, which gets the sum of all gradients of its tensor"
TRANSFORM = "torch.func transform"
INSIDE_TRANSFORM = "inside a torch.func transform"
GENERATOR = "draws from a generator of its own"
IN_PLACE_COLLECTIVE = "collective that writes in place"

# Decompositions (torch 2.13) leave out what recurrent networks drop between layers.
DROPOUT = "dropout that a trace loses"
# AOTAutograd (torch 2.13) keeps a None for the backward of oneDNN's kernel, and then refuses to run it.
LSTM = "lstm: its backward fails when traced"

FUSED_ADAM = "fused adam is not supported yet"
FOREACH_ADDITION = "scalar foreach addition is not supported yet"
# A pattern of torch 2.13 for `x[torch.randperm(n)[:k]]` raises where nothing is sliced off.
RANDPERM = "randperm: Inductor fails where it is an index"
WRITES_TWICE = "an in-place foreach whose tensors may share memory: a trace would write it once"
SHARES_MEMORY = "its results share memory, which a trace does not see"
RESHAPES = "changes the shape of a tensor in place"
