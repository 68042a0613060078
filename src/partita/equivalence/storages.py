"""Storages: which memory a tensor lives in, so that sharing can be seen and memory put back."""

from __future__ import annotations

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from partita._torch.wrapper_tensors import plain_tensors

__all__ = ["storage_key", "storage_of"]


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """The memory of a tensor; None where it has none of its own to read (sparse, fake, meta, some subclasses).

    That of a wrapper, such as a DTensor, is the memory of the first tensor inside it.
    """
    try:
        storage = plain_tensors(tensor)[0].untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return None if storage.device.type == "meta" else storage


def storage_key(tensor: Tensor) -> int | None:
    """A number that two living tensors have in common exactly when they share memory."""
    storage = storage_of(tensor)
    # The address of the data will not do: all empty storages have address 0.
    return None if storage is None else int(StorageWeakRef(storage).cdata)
