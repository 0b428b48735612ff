"""Keeping only the shard of a gathered activation for backward, and gathering it again there."""

from __future__ import annotations

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
        self._address = whole.data_ptr()
        self._shape = whole.shape
        self._dim = dim
        self._group = group
        self._meter = active_meter()
        self._again: Tensor | None = None
        if whole.requires_grad and whole.grad_fn is not None:
            # The gradient of the whole tensor arrives after all that read it are done with their backward.
            whole.register_hook(self._release)

    def hooks(self) -> saved_tensors_hooks:
        """A context that saves views of all of the whole tensor as its shard."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> object:
        same = x.data_ptr() == self._address and x.numel() == self._shape.numel() and x.is_contiguous()
        return _Saved(tuple(x.shape)) if same else x

    def _unpack(self, packed: object) -> Tensor:
        if not isinstance(packed, _Saved):
            assert isinstance(packed, torch.Tensor)
            return packed
        if self._again is None:
            with counting_into(self._meter):
                self._again = gathered(
                    self._shard, self._dim, self._group, length=self._shape[self._dim]
                ).contiguous()
        return self._again.view(packed.shape)

    def _release(self, grad: Tensor) -> None:
        del grad
        self._again = None


@dataclass(frozen=True, slots=True)
class _Saved:
    shape: tuple[int, ...]
