"""Keeping only the shard of a gathered activation for backward, and gathering it again there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from evenspan.comm.collectives import gathered
from evenspan.comm.meter import active_meter, counting_into


class Regathered:
    """A gathered tensor that autograd saves as its shard; its readers share one new gather in backward."""

    def __init__(self, shard: Tensor, whole: Tensor, *, dim: int, group: dist.ProcessGroup) -> None:
        self._shard = shard.detach()
        self._whole: Tensor | None = whole
        self._version = whole._version
        self._length = whole.shape[dim]
        self._dim = dim
        self._group = group
        self._meter = active_meter()
        self._again: Tensor | None = None
        if whole.requires_grad and whole.grad_fn is not None:
            # The gradient of the whole tensor arrives after all that read it are done with their backward.
            whole.register_hook(self._release)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, views of all of the whole tensor are saved as its shard.

        The whole tensor is held until the end, so that no other tensor can be given its memory meanwhile.
        """
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._whole = None

    def _pack(self, x: Tensor) -> object:
        return _Saved(tuple(x.shape)) if self._is_whole(x) else x

    def _is_whole(self, x: Tensor) -> bool:
        whole = self._whole
        return (
            whole is not None
            and x.data_ptr() == whole.data_ptr()
            and x.numel() == whole.numel()
            and x.dtype is whole.dtype
            and x.is_contiguous()
            and whole.is_contiguous()
            and whole._version == self._version  # written to since, it is no longer what was gathered
        )

    def _unpack(self, packed: object) -> Tensor:
        if not isinstance(packed, _Saved):
            assert isinstance(packed, torch.Tensor)
            return packed
        if self._again is None:
            with counting_into(self._meter):
                self._again = gathered(self._shard, self._dim, self._group, length=self._length)
        return self._again.view(packed.shape)

    def _release(self, grad: Tensor) -> None:
        del grad
        self._again = None


@dataclass(frozen=True, slots=True)
class _Saved:
    shape: tuple[int, ...]
