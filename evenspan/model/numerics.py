"""The dtype rule of the model: some arithmetic is never below fp32, and a double is never narrowed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` itself in fp32 or fp64, else a copy in fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class WideLinear(nn.Linear):
    """A linear layer computed in at least fp32 even where mixed precision narrowed its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = at_least_fp32(self.weight), at_least_fp32(self.bias)
        return functional.linear(x.to(weight.dtype), weight, bias)


class WideLayerNorm(nn.LayerNorm):
    """Layer norm in at least fp32; the output keeps that dtype, so that modulation is not rounded twice."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else at_least_fp32(self.weight)
        bias = None if self.bias is None else at_least_fp32(self.bias)
        return functional.layer_norm(at_least_fp32(x), self.normalized_shape, weight, bias, self.eps)


class WideRMSNorm(nn.RMSNorm):
    """RMS norm with gain, in at least fp32, returned in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        wide = functional.rms_norm(
            at_least_fp32(x), self.normalized_shape, at_least_fp32(self.weight), self.eps
        )
        return wide.to(x.dtype)
