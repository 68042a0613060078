"""TrainEval: two variants of one model, captured in training and in evaluation mode, as one module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita.errors import OptionError
from partita.program.exported import FOLDED
from partita.program.program import Program

_TRAINING, _EVALUATION = "training_variant", "evaluation_variant"


@final
class TrainEval(nn.Module):
    """Runs `train` in training mode and `evaluation` in evaluation mode: `.train()` and `.eval()` switch.

    Both are programs or modules made from one model, captured once after `model.train()` and once after
    `model.eval()`, and may be treated differently. They share parameters and buffers, also when the module is moved,
    converted, copied, pickled or loaded, or when state is replaced (`torch.func.functional_call`); the state dict has
    the names of `train`. Moved and converted, they are still those of the model.
    """

    def __init__(self, train: Program | nn.Module, evaluation: Program | nn.Module) -> None:
        super().__init__()
        variants = []
        for one, name in ((train, "train"), (evaluation, "evaluation")):
            module = one.module() if isinstance(one, Program) else one
            if not isinstance(module, nn.Module):
                raise OptionError(f"{name} is a program or a module, not {type(one).__name__}")
            _check_unfolded(module, name)
            variants.append(module)
        self.training_variant, self.evaluation_variant = variants
        own = {id(slot.tensor) for slot in _slots(self.training_variant)}
        for slot in _slots(self.evaluation_variant):
            if id(slot.tensor) not in own and (isinstance(slot.tensor, nn.Parameter) or slot.is_persistent):
                raise OptionError(
                    f"{slot.name!r} of the evaluation variant is not a tensor of the training variant; capture both "
                    "from one model, after model.train() and after model.eval()"
                )
        names = {id(slot.tensor): slot.name for slot in reversed(list(_slots(self.training_variant)))}
        slots = _slots(self.evaluation_variant)
        #: The names of the tensors of the evaluation variant, each with the name that it has in the training variant.
        self._tied = tuple((slot.name, names[id(slot.tensor)]) for slot in slots if id(slot.tensor) in names)
        # Set for both already; a captured variant refuses another flag than its own.
        self.training_variant.train()
        self.evaluation_variant.eval()
        self.register_state_dict_post_hook(_names_of_training)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_names_of_variants)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_report_each_once)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> TrainEval:  # noqa: FBT001, FBT002  The signature is torch's.
        """Switches to the training variant, or to the evaluation variant."""
        self.training = mode
        self._share()
        return self

    def __getattr__(self, name: str) -> Any:
        """Also the modules and parameters of the training variant, by whose names the state is known."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            table = self._table_of_training(name)
            if table is None:
                raise
            return table[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Also replaces parameters and buffers of the training variant, as `torch.func.functional_call` does."""
        table = self._table_of_training(name) if isinstance(value, Tensor) else None
        if table is None:
            super().__setattr__(name, value)
        else:
            table[name] = value

    def _table_of_training(self, name: str) -> dict[str, Any] | None:
        """The table of the training variant that holds this module, parameter or buffer; None if none does."""
        variant = self.__dict__.get("_modules", {}).get(_TRAINING)
        tables = () if variant is None else (variant._modules, variant._parameters, variant._buffers)
        return next((table for table in tables if name in table), None)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, by their names in the state dict."""
        return self.training_variant.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers, by their names in the state dict; then those that only the evaluation variant has."""
        yield from (own := list(self.training_variant.named_buffers(*args, **kwargs)))
        known = {id(buffer) for _, buffer in own}
        others = self.evaluation_variant.named_buffers(*args, **kwargs)
        yield from ((f"{_EVALUATION}.{name}", buffer) for name, buffer in others if id(buffer) not in known)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return self.training_variant(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self.evaluation_variant(*args, **kwargs)
        with self._replaced():
            return self.evaluation_variant(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; `assign=True` too sets the tensors of both variants."""
        result = super().load_state_dict(*args, **kwargs)
        self._share()
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TrainEval:  # noqa: FBT001, FBT002
        buffers = [slot for slot in _slots(self) if slot.table is not slot.owner._parameters]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._share()
        _keep_tensors(buffers)
        return self

    def _share(self) -> None:
        """Gives the evaluation variant the parameters and buffers of the training variant."""
        for tie in self._ties():
            if (tensor := tie.source.get(tie.source_key)) is not None:
                tie.table[tie.key] = tensor

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Inside, the evaluation variant also has what was put in the place of state of the training variant."""
        replaced = []
        for tie in self._ties():
            before = tie.table.get(tie.key)
            if tie.source.get(tie.source_key) is not before:
                replaced.append((tie, before))
                # A tensor that a parametrization computes is in no table.
                tie.table[tie.key] = getattr(tie.owner, tie.source_key)
        try:
            yield
        finally:
            for tie, before in replaced:
                tie.table[tie.key] = before

    def _ties(self) -> list[_Tie]:
        found: list[_Tie] | None = self.__dict__.get("_found_ties")
        if found is None:
            found = [self._tie(*names) for names in self._tied]
            self.__dict__["_found_ties"] = found
        return found

    def _tie(self, name: str, source_name: str) -> _Tie:
        path, _, key = name.rpartition(".")
        source_path, _, source_key = source_name.rpartition(".")
        owner, source = self.evaluation_variant.get_submodule(path), self.training_variant.get_submodule(source_path)
        return _Tie(_table(owner, key), key, source, _table(source, source_key), source_key)

    def __getstate__(self) -> dict[str, Any]:
        """Without the ties, which a copy finds by their names in its own variants."""
        return {name: value for name, value in self.__dict__.items() if name != "_found_ties"}


class _Tie(NamedTuple):
    """A place of the evaluation variant, and that of the training variant which holds the same tensor."""

    table: dict[str, Any]
    key: str
    owner: nn.Module
    source: dict[str, Any]
    source_key: str


def _table(owner: nn.Module, key: str) -> dict[str, Any]:
    return owner._parameters if key in owner._parameters else owner._buffers


class _Slot(NamedTuple):
    """A place in a module that holds a parameter or a buffer."""

    owner: nn.Module
    table: dict[str, Any]
    key: str
    name: str
    tensor: Tensor
    is_persistent: bool


def _slots(module: nn.Module) -> Iterator[_Slot]:
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for table in (part._parameters, part._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    persistent = table is part._parameters or key not in part._non_persistent_buffers_set
                    yield _Slot(part, table, key, prefix + key, tensor, persistent)


def _keep_tensors(buffers: list[_Slot]) -> None:
    """Puts what a conversion made of each buffer into the tensor that it was, which the model has, too.

    torch does so with parameters, but replaces buffers (2.13).
    """
    made = {id(slot.tensor): (slot.tensor, slot.table[slot.key]) for slot in buffers}
    kept = {}
    for tensor, new in made.values():
        if new is not tensor and new is not None:
            try:
                tensor.data = new
            except RuntimeError:  # It has another implementation there, as on some devices: a new tensor for both.
                continue
            kept[id(tensor)] = tensor
    for slot in buffers:
        if id(slot.tensor) in kept:
            slot.table[slot.key] = slot.tensor


def _names_of_training(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Gives the state, and the versions of its modules, the names that they have in the training variant."""
    for key in [key for key in state if key.startswith(prefix)]:
        variant, _, name = key.removeprefix(prefix).partition(".")
        if variant in (_TRAINING, _EVALUATION):
            value = state.pop(key)
            if variant == _TRAINING:
                state[prefix + name] = value
    # Those by the paths here stay: inside of another module, torch hands out no versions that a hook could rename.
    versions = getattr(state, "_metadata", {})
    own = f"{prefix}{_TRAINING}."
    versions.update({prefix + path.removeprefix(own): versions[path] for path in versions if path.startswith(own)})


def _names_of_variants(module: Any, state: dict[str, Any], prefix: str, *report: Any) -> None:
    """Adds the names that both variants have for a state with the names of the training variant."""
    places: dict[int, list[str]] = {}
    for slot in filter(_is_persistent, _slots(module.evaluation_variant)):
        places.setdefault(id(slot.tensor), []).append(slot.name)
    for slot in filter(_is_persistent, _slots(module.training_variant)):
        if prefix + slot.name in state:
            value = state.pop(prefix + slot.name)
            state[f"{prefix}{_TRAINING}.{slot.name}"] = value
            for name in places.get(id(slot.tensor), ()):
                state[f"{prefix}{_EVALUATION}.{name}"] = value
    _add_versions(module, getattr(state, "_metadata", None) or {}, prefix)
    module.being_loaded = _Loading(prefix, errors=report[-1])


def _add_versions(module: Any, versions: dict[str, Any], prefix: str) -> None:
    """Adds the versions of modules by the paths that they have here: modules look for theirs by its current path."""
    own = {id(part): path for path, part in module.training_variant.named_modules()}
    for name, variant in ((_TRAINING, module.training_variant), (_EVALUATION, module.evaluation_variant)):
        for path, part in variant.named_modules(remove_duplicate=False):
            known = versions.get(prefix + own.get(id(part), path))
            if path and known is not None:
                versions.setdefault(f"{prefix}{name}.{path}", known)


def _is_persistent(slot: _Slot) -> bool:
    return slot.is_persistent


def _check_unfolded(module: nn.Module, name: str) -> None:
    """Raises where a delegate holds weights, which training would not change."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
            if node.meta.get(FOLDED):
                raise OptionError(
                    f"{name}: the weights of {node.name!r} are inside of a delegate, and training does not change them "
                    "there; compile the region with Lower"
                )


class _Loading(NamedTuple):
    """Where a module is in what is loaded, and the errors found so far."""

    prefix: str
    errors: list[str]


def _report_each_once(module: Any, keys: Any) -> None:
    """Names what is missing or does not fit once, by the names of the state dict."""
    (prefix, errors), module.being_loaded = module.being_loaded, None
    ours, theirs = f"{prefix}{_TRAINING}.", f"{prefix}{_EVALUATION}."
    # All that the evaluation variant has is in the training variant, too. What is found later has other prefixes.
    for found in (keys.missing_keys, errors):
        found[:] = [text.replace(ours, prefix) for text in found if theirs not in text]
