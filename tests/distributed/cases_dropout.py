"""What ranks run for the tests of dropout on the tensor axis: which masks are drawn, where, and once more."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evenspan.parallel.checkpointing import apply_activation_checkpointing
from evenspan.parallel.tensor import apply_tensor_plan, complete_gradients
from tests.distributed.cases_kinds import mesh_of
from tests.distributed.cases_tensor import full
from tests.distributed.toy_decoder import WIDTH

PLACES = ("before", "shards", "features", "replicated", "after")


class Mask(nn.Module):
    """Dropout that remembers its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = functional.dropout(torch.ones_like(x), 0.5, training=self.training)
        self.masks.append(mask.detach().clone())
        return x * mask


class Site(nn.Module):
    """Gathered input; dropout on this rank's features, and on a number that every rank computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.features, self.replicated = Mask(), Mask()

    def forward(self, x: Tensor) -> Tensor:
        number = self.replicated(x).square().mean()
        return self.down(self.features(torch.tanh(self.up(x)))) * (1 + 0 * number.detach())


class DropBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shards, self.site = Mask(), Site()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.site(self.shards(x))


class Dropping(nn.Module):
    TP_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
        "Site": {"up": "col", "down": "row", "replicated": "replicated"},
    }
    SEQUENCE_PARALLEL_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
        "Dropping": {"entry": "split", "exit": "gather_output"},
    }

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Identity(), nn.Identity()
        self.before, self.after = Mask(), Mask()
        self.blocks = nn.ModuleList([DropBlock() for _ in range(2)])
        self.torch_checkpoint = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(self.before(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.torch_checkpoint else block(x)
        return self.after(self.exit(x))

    def masks(self) -> dict[str, list[list[Tensor]]]:
        """Every module's masks, by place."""
        found: dict[str, list[list[Tensor]]] = {place: [] for place in PLACES}
        for name, module in self.named_modules():
            if isinstance(module, Mask):
                found[name.rpartition(".")[2]].append(module.masks)
        return found


def dropping(ctx, sequence_parallel: bool, checkpointing: str, order: str) -> dict[str, Any]:
    """Masks, gradients and the random state after two forwards and two backwards in some order."""
    torch.manual_seed(3)
    model = Dropping().double()
    model.torch_checkpoint = checkpointing == "torch"
    if not model.torch_checkpoint:
        apply_activation_checkpointing(model.blocks, mode=checkpointing)
    apply_tensor_plan(model, mesh_of(ctx), sequence_parallel=sequence_parallel)
    torch.manual_seed(4)
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    if order == "in turns":
        for _ in range(2):
            model(x).square().sum().backward()
    else:
        first, second = (model(x).square().sum() for _ in range(2))
        if order == "an evaluation between":
            model.eval()
            with torch.no_grad():
                model(x[:, :4])
            model.train()
        (first + second if order == "together" else first).backward()
        if order != "together":
            second.backward()
    complete_gradients(model)
    return {
        "masks": {
            place: [[mask.numpy() for mask in masks] for masks in modules]
            for place, modules in model.masks().items()
        },
        "gradients": {name: full(parameter.grad).numpy() for name, parameter in model.named_parameters()},
        "random": torch.get_rng_state().numpy(),
    }
