"""One part of a body that is kept: noted operator by operator when it first runs, and given back when it runs again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.checkpoint_keep_casts import AutocastCasts, may_be_autocast, was_remembered
from partita._torch.checkpoint_keep_draws import KeptDraws
from partita._torch.checkpoint_keep_entries import Entry, cast_by, gives_new, tensors_in, written_by
from partita._torch.checkpoint_keep_writes import WriteCopies
from partita.errors import RecomputeError

__all__ = ["KeptPart"]

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@final
class KeptPart:
    """What one part of a body gave in its first run, until it is let go of.

    From then on it is computed again, from the same random numbers: a backward that does not retain its graph must not
    hold what it has used, and another one may still come, from another result of the body.
    """

    def __init__(self) -> None:
        self._entries: Sequence[Entry] | None = ()
        self._draws = KeptDraws()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While the part runs for the first time."""
        self._entries = None  # Where it raises there is nothing to give back, and it will raise again.
        noting = _Noting(self._draws)
        with noting:
            yield
        self._entries = noting.closed()

    @contextmanager
    def returning(self) -> Iterator[None]:
        """While it runs again."""
        if self._entries is None:
            self._draws.make_again()
            yield
            return
        with _Returning(self._entries):
            yield
        self._draws.pass_over()

    def drawn_on(self) -> Iterable[torch.device]:
        """The devices whose generators the part has moved."""
        return self._draws.devices()

    def let_go(self) -> None:
        """What was kept is held no more."""
        self._entries = None


class _Keeping(TorchDispatchMode):
    """Sees each operator of a part that is kept, in both runs the same."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo is told of these files itself; torch would do so at each operator.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Autograd takes composite operators apart, and inference tensors pass it by; copies of them do not.
        if _is_composite(func) and any(tensor.is_inference() for tensor in tensors_in((args, kwargs))):
            with self:  # By torch's own kernel: decompositions in Python draw other random numbers.
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        return self.meet(func, args, kwargs)

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Noting(_Keeping):
    def __init__(self, draws: KeptDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._copies, self._casts = draws, WriteCopies(), AutocastCasts()
        self._entries: list[Entry] = []

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = written_by(func, args, kwargs)
        if written:
            _check_foreach(func, written)
            self._casts.before_writes(written)
        result = self._draws.noted(func, args, kwargs)
        if not gives_new(func):
            self._copies.note_reader()
            return result
        self._casts.next_operator()
        entry = Entry(func, args, result, self._copies.of(written))
        self._entries.append(entry)
        self._copies.note(entry, written)
        if may_be_autocast(entry.cast):
            self._casts.note(entry, args[0], partial(func, *args, **kwargs))
            self._copies.note_reader()
        else:
            self._copies.note_kept(entry)
        return result

    def closed(self) -> Sequence[Entry]:
        """What is kept, when the part is over."""
        for entry in self._entries:
            entry.close()
        return self._entries


class _Returning(_Keeping):
    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries = entries
        self._next = 0

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        entry = self._entry_for(func, args) if gives_new(func) else None
        if entry is None:
            return func(*args, **kwargs)
        return entry.given_back(written_by(func, args, kwargs))

    def _entry_for(self, func: Any, args: Any) -> Entry | None:
        """The entry of an operator, the next one; None where the operator runs again."""
        cast, entry = cast_by(func, args), self._peek()
        while cast is None and entry is not None and entry.is_made_again:
            self._next += 1  # Autocast remembers the cast in this run.
            entry = self._peek()
        if was_remembered(cast, entry):
            return None
        if entry is None or entry.operator is not func:
            raise RecomputeError(
                f"recomputation met {func} where the first run did not: the kept part of a body must do the same each "
                "time it runs"
            )
        self._next += 1
        return None if entry.is_made_again else entry

    def _peek(self) -> Entry | None:
        return self._entries[self._next] if self._next < len(self._entries) else None


def _check_foreach(func: Any, written: Iterable[Tensor]) -> None:
    """Raises where torch would lose gradients: in front of a mode, views do not learn that a foreach has written."""
    if "_foreach_" in str(func) and any(tensor._is_view() and tensor.requires_grad for tensor in written):
        raise RecomputeError(
            f"{func} writes to a view inside of what is kept, and torch loses its gradients there; do not keep it, or "
            "write to the tensors one by one"
        )


@cache
def _is_composite(func: Any) -> bool:
    if not isinstance(func, OpOverload) or not torch._C._dispatch_has_kernel(func.name()):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
