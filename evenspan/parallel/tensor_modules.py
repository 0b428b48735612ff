"""What happens before and after the forward of a module whose weights are split over the tensor axis."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from evenspan.comm.collectives import Loss, all_reduce_sum, gather_tokens
from evenspan.errors import PlanError
from evenspan.parallel.arguments import Call
from evenspan.parallel.plan import Mode
from evenspan.parallel.resolve import is_transposed
from evenspan.parallel.saved import Regathered
from evenspan.parallel.sharded import hide_local, local_weight, show_local, take_bias
from evenspan.parallel.tensor_hooks import Behaviour, enter_region, leave_region


class Column(Behaviour):
    """A linear with this rank's output features."""

    _saving: AbstractContextManager[Any] | None = None

    def before(self, call: Call) -> None:
        """Show the local weight, and gather where nothing above has."""
        show_local(self.module, self.dims)
        if self.covered:
            return
        x = call.hidden_state(self.at)
        assert call.hidden is not None
        if self.region.sequence_parallel and not self.region.is_inside() and self.rule.mode is not Mode.COL:
            call[call.hidden] = self.region.copy(x)  # a head behind the region's exit
            return
        whole = self.region.gather_once(x, self.dim, self.at)
        call[call.hidden] = whole
        if self.rule.save_shard and self.region.sequence_parallel:
            self._saving = Regathered(x, whole, dim=self.dim, group=self.region.group).saving()
            self._saving.__enter__()

    def finish(self) -> None:
        """Show the whole weight again."""
        hide_local(self.module)
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None


class LossParallel(Column):
    """A head whose logits stay split over the vocabulary; it ends the region."""

    def after(self, output: Any) -> Any:
        """The logits of this rank's part of the vocabulary."""
        leave_region(self.region)
        return output


class ColumnGather(Column):
    """A head whose logits are joined."""

    def after(self, output: Any) -> Any:
        """All logits."""
        leave_region(self.region)
        return gather_tokens(output, dim=output.dim() - 1, group=self.region.group, loss=Loss.REPEATED)


class Row(Behaviour):
    """A linear with this rank's input features; its bias is added once, after the sum."""

    def before(self, call: Call) -> None:
        """Show the local weight without the bias. Raises P111 for an input of another width."""
        show_local(self.module, self.dims)
        take_bias(self.module)
        x = call.hidden_state(self.at)
        width = local_weight(self.module).shape[0 if is_transposed(self.module) else 1]
        if x.shape[-1] != width:
            kind = "all features" if x.shape[-1] == width * self.region.ranks else "another width"
            raise PlanError(
                "P111",
                f"{self.at} expects this rank's {width} features and got {kind}: {list(x.shape)}",
                hint='its input comes from modules planned as "col"; plan all of them or none',
            )

    def after(self, output: Any) -> Any:
        """The sum of all ranks' outputs, with the bias."""
        total = self.region.reduce(output, self.dim, self.at)
        bias = self.module._parameters.get("bias")
        return total if bias is None else total + bias

    def finish(self) -> None:
        """Show the whole weight again."""
        hide_local(self.module)


class Vocabulary(Behaviour):
    """An embedding of this rank's part of the vocabulary; other tokens give zeros, and the sum is whole."""

    _foreign: Tensor | None = None
    _padding: int | None = None

    def before(self, call: Call) -> None:
        """Turn global token ids into local ones; foreign ones look up row 0 for now."""
        show_local(self.module, self.dims)
        ids = call.hidden_state(self.at)
        assert call.hidden is not None
        rows = local_weight(self.module).shape[0]
        local_ids = ids - rows * self.region.group.rank()
        self._foreign = (local_ids < 0) | (local_ids >= rows)
        call[call.hidden] = local_ids.masked_fill(self._foreign, 0)
        self._padding = self.module.padding_idx  # type: ignore[assignment]
        if self._padding is not None:
            own = self._padding - rows * self.region.group.rank()
            self.module.padding_idx = own if 0 <= own < rows else None  # type: ignore[assignment]

    def after(self, output: Any) -> Any:
        """The sum of all ranks' outputs, where a foreign token counts as zeros."""
        assert self._foreign is not None
        part = output.masked_fill(self._foreign[..., None], 0.0)
        if self.rule.mode is Mode.VOCAB_SEQUENCE:
            shard = self.region.reduce(part, self.dim, self.at)
            enter_region(self.region)
            return shard
        return all_reduce_sum(part, group=self.region.group, loss=Loss.REPEATED)

    def finish(self) -> None:
        """Show the whole weight again."""
        hide_local(self.module)
        if self._foreign is not None:
            self.module.padding_idx = self._padding  # type: ignore[assignment]
            self._foreign = None


class WidthNorm(Behaviour):
    """An RMS norm that sees part of the width: its output is rescaled to the whole's mean square."""

    _input: Tensor | None = None

    def before(self, call: Call) -> None:
        """Show the local weight and keep the input for its mean square."""
        show_local(self.module, self.dims)
        self._input = call.hidden_state(self.at)

    def after(self, output: Any) -> Any:
        """The output for the mean square over the whole width."""
        assert self._input is not None
        x = self._input.to(torch.promote_types(self._input.dtype, torch.float32))
        fields = vars(self.module)
        eps = fields.get("eps", fields.get("variance_epsilon"))
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        own = x.square().mean(-1, keepdim=True)
        whole = all_reduce_sum(own, group=self.region.group) / self.region.ranks
        return (output * torch.sqrt((own + eps) / (whole + eps))).to(output.dtype)

    def finish(self) -> None:
        """Show the whole weight again."""
        hide_local(self.module)
        self._input = None
