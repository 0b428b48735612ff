"""What happens before and after the forward of a module at a boundary of the tensor-parallel region.

Hooks, so that no method is rebound: `before` may change the call, `after` the output. `finish` runs even when
the forward raised.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from evenspan.comm.collectives import divide_gradient
from evenspan.errors import PlanError
from evenspan.parallel.arguments import Call, argument_names, lay_out_arguments, on_first
from evenspan.parallel.plan import Mode
from evenspan.parallel.region import Region
from evenspan.parallel.resolve import PlannedModule
from evenspan.parallel.saved import Regathered


class Behaviour:
    """The hooks of one planned module."""

    def __init__(self, planned: PlannedModule, region: Region) -> None:
        self.module = planned.module
        self.rule = planned.rule
        self.region = region
        self.at = planned.path or type(planned.module).__name__
        self.covered = planned.covered
        self.dims = planned.split_dims()
        self.dim = planned.rule.sequence_dim
        self.names = argument_names(planned.module, planned.rule, self.at)

    def before(self, call: Call) -> None:
        """Change the arguments."""

    def after(self, output: Any) -> Any:
        """The output that the caller gets."""
        return output

    def finish(self) -> None:
        """Undo what must not outlive the call."""

    def install(self) -> None:
        """Register the hooks."""
        self.module.register_forward_pre_hook(self._before, with_kwargs=True)
        self.module.register_forward_hook(self._after)
        self.module.register_forward_hook(self._finish, always_call=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        call = Call.of(args, kwargs)
        if self.rule.arguments or self.rule.mode in (Mode.GATHER, Mode.SEQUENCE):
            lay_out_arguments(call, self.rule, self.region, self.names, self.at)
        self.before(call)
        return tuple(call.args), call.kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        return self.after(output)

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self.finish()


class Sequence(Behaviour):
    """Works on shards."""

    def before(self, call: Call) -> None:
        """Refuse anything but a shard."""
        self.region.expect_shard(call.hidden_state(self.at), self.dim, self.at)


class Enter(Behaviour):
    """Cuts its input."""

    def before(self, call: Call) -> None:
        """Cut the hidden state."""
        x = call.hidden_state(self.at)
        assert call.hidden is not None
        call[call.hidden] = self.region.split(x, self.dim, self.at)
        enter_region(self.region)


class Split(Behaviour):
    """Cuts its output."""

    def after(self, output: Any) -> Any:
        """Cut the output."""
        shard = on_first(output, lambda x: self.region.split(x, self.dim, self.at), self.at)
        enter_region(self.region)
        return shard


class GatherOutput(Behaviour):
    """Joins its output."""

    def after(self, output: Any) -> Any:
        """Join the output."""
        whole = on_first(output, lambda x: self.region.gather(x, self.dim, self.at, repeated=True), self.at)
        leave_region(self.region)
        return whole


class Gather(Behaviour):
    """Gathers its input once for all below; the work below is on this rank's features."""

    _saving: AbstractContextManager[Any] | None = None
    _streaming = False

    def before(self, call: Call) -> None:
        """Gather the hidden state, or copy it without sequence parallelism."""
        x = call.hidden_state(self.at)
        assert call.hidden is not None
        whole = self.region.gather_once(x, self.dim, self.at)
        call[call.hidden] = whole
        if self.rule.save_shard and self.region.sequence_parallel:
            self._saving = Regathered(x, whole, dim=self.dim, group=self.region.group).saving()
            self._saving.__enter__()
        if not self.region.sequence_parallel and self.module.training:
            self.region.enter_rank_stream()
            self._streaming = True

    def finish(self) -> None:
        """Back to what autograd saves and what generators draw outside."""
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None
        if self._streaming:
            self.region.leave_rank_stream()
            self._streaming = False


class Replicated(Behaviour):
    """The same work on every rank; below a gather its input's gradient counts once, not once a rank."""

    _stream: AbstractContextManager[None] | None = None

    def before(self, call: Call) -> None:
        """Draw as all ranks do, and divide the gradient where it will be summed."""
        x = call.hidden_state(self.at)
        assert call.hidden is not None
        if self.covered:
            call[call.hidden] = divide_gradient(x, ranks=self.region.ranks)
        elif self.region.is_inside():
            raise PlanError(
                "P116",
                f"{self.at} is planned as replicated, but got a shard: {list(x.shape)}",
                hint='plan it as "sequence", or below a module that gathers its input',
            )
        self._stream = self.region.common_stream()
        self._stream.__enter__()

    def finish(self) -> None:
        """Back to the stream of before."""
        if self._stream is not None:
            self._stream.__exit__(None, None, None)
            self._stream = None


def enter_region(region: Region) -> None:
    """From here on tensors are shards, and each rank draws random numbers of its own."""
    if region.running and not region.inside:
        region.enter()


def leave_region(region: Region) -> None:
    """From here on every rank does the same work."""
    if region.running and region.inside:
        region.leave()
