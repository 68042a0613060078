"""Effects of the modules of torch.nn; any other leaf module is unknown."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from partita._torch.nn_modules import hooks_of
from partita.analysis.effects.terms import ALIASING, EVERY, FIRST, PURE, UNKNOWN, Effects, merged


def effects_of_module(module: nn.Module, pure: Container[object] = frozenset()) -> Effects:
    """The effects of a call of `module`, children included; `pure` may hold modules or their classes."""
    if module in pure or type(module) in pure:
        return replace(ALIASING, shares_state=True)
    if is_check(module):
        return Effects(impure=True)
    parts = list(module.modules())
    if not all(map(_is_torch_own, parts)):
        return UNKNOWN
    effects = merged(map(_of_one, parts))
    return effects if len(parts) == 1 else replace(effects, aliases=(EVERY,), shares_state=True)


def is_check(module: nn.Module) -> bool:
    """Whether a module only checks the inputs of an exported program."""
    kind = type(module)
    return getattr(kind, "only_checks_inputs", False) or (kind.__module__, kind.__name__) == _TORCH_CHECK


def may_use_rng(module: nn.Module) -> bool:
    """Whether a call of `module` may use the RNG, now or in training mode."""
    return any(not _is_torch_own(part) or isinstance(part, _USES_RNG) for part in module.modules())


def _is_torch_own(module: nn.Module) -> bool:
    """Whether only torch's own code runs when `module` is called."""
    if not type(module).__module__.startswith("torch.nn.modules.") or "forward" in vars(module):
        return False
    if any(hooks_of(module)) or getattr(module, "parametrizations", None):
        return False
    activation = vars(module).get("activation")
    return activation is None or activation in (functional.relu, functional.gelu) or isinstance(activation, str)


def _of_one(module: nn.Module) -> Effects:
    """The effects of `module` itself, without its children."""
    own = _mutated_state(module)
    in_place = bool(getattr(module, "inplace", False))
    return Effects(
        mutates=(FIRST,) if in_place else (),
        aliases=(FIRST,) if in_place else _aliases(module),
        uses_rng=_uses_rng(module),
        communicates=isinstance(module, nn.SyncBatchNorm) and module.training,
        mutated_state=tuple(tensor for tensor in own if tensor is not None),
    )


def _aliases(module: nn.Module) -> tuple[tuple[int, str], ...]:
    file = type(module).__module__.rpartition(".")[2]
    if file in _FRESH and not isinstance(module, nn.Identity):
        return PURE.aliases
    return ALIASING.aliases


def _mutated_state(module: Any) -> tuple[Tensor | None, ...]:
    if isinstance(module, _INSTANCE_NORMS):
        updates = module.training or not module.track_running_stats
        return (module.running_mean, module.running_var) if updates else ()
    if isinstance(module, _BATCH_NORMS):
        updates = module.training and module.track_running_stats
        return (module.running_mean, module.running_var, module.num_batches_tracked) if updates else ()
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return (module.weight,)
    return ()


def _uses_rng(module: Any) -> bool:
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return True
    if not module.training:
        return False
    if isinstance(module, _DROPOUTS):
        return bool(module.p != 0)
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout != 0) and module.num_layers > 1
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout != 0)
    return isinstance(module, nn.RReLU)


#: The module with which torch checks the inputs of an exported program; ours is marked.
_TORCH_CHECK = ("torch.export._unlift", "GuardsFn")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_USES_RNG = (
    *_DROPOUTS,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)

#: Files of torch.nn.modules whose modules always return new tensors (unless in-place).
_FRESH = frozenset(
    ("activation", "batchnorm", "conv", "distance", "instancenorm", "linear", "loss", "normalization", "padding")
) | {"pooling", "rnn", "sparse"}
