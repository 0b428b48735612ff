"""A small transformer with the children evenspan looks for, and its one-process reference."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from evenspan.attention.core import attention_core
from evenspan.attention.patterns import teacher_forcing

HEADS, KV_HEADS, DIM = 8, 4, 4
WIDTH = HEADS * DIM
BLOCKS, FRAMES, FRAME_PER_BLOCK, TOKENS_PER_FRAME = 2, 8, 2, 2


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.to_k = nn.Linear(WIDTH, KV_HEADS * DIM, bias=False)  # its gradient would be exactly 0
        self.to_v = nn.Linear(WIDTH, KV_HEADS * DIM)
        self.to_out = nn.Linear(WIDTH, WIDTH)
        self.core = attention_core("segments")

    def forward(self, x_BTE, table):
        q, k, v = (f(x_BTE).unflatten(2, (-1, DIM)) for f in (self.to_q, self.to_k, self.to_v))
        return self.to_out(self.core(q, k, v, table).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attn1 = SelfAttention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTE, *, table):
        x_BTE = x_BTE + self.attn1(self.norm1(x_BTE), table)
        return x_BTE + self.down(functional.gelu(self.up(self.norm2(x_BTE))))


class Toy(nn.Module):
    """Tokens [clean | noisy] of some frames, their global positions, and a table over all ranks' tokens."""

    def __init__(self):
        super().__init__()
        self.position = nn.Embedding(FRAMES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTE, positions_T, table):
        x_BTE = x_BTE.to(self.head.weight.dtype) + self.position(positions_T)
        for block in self.blocks:
            x_BTE = block(x_BTE, table=table)
        return self.head(x_BTE)


def toy(dtype=torch.float64):
    """The same weights on every rank and in every process."""
    torch.manual_seed(7)
    return Toy().to(dtype)


def batch(sample, *, count=2):
    """Clean and noisy tokens [B, F*n, E] of sample number `sample`, and their targets."""
    generator = torch.Generator().manual_seed(100 + sample)
    shape = (3, count, FRAMES * TOKENS_PER_FRAME, WIDTH)
    clean, noisy, target = torch.randn(shape, dtype=torch.float64, generator=generator)
    return clean, noisy, target


def share(whole_BTE, rank, ranks):
    """The tokens of one rank's frames."""
    return whole_BTE.chunk(ranks, dim=1)[rank]


def loss_sum(model, sample, *, rank=0, ranks=1, local_positions=False):
    """The summed squared error of one rank's noisy tokens (all of them at ranks=1), its input, its output."""
    local = FRAMES // ranks
    shares = [(r * local, (r + 1) * local) for r in range(ranks)]
    table = teacher_forcing(shares, frame_per_block=FRAME_PER_BLOCK).scaled(TOKENS_PER_FRAME)
    clean, noisy, target = (share(x, rank, ranks) for x in batch(sample))
    frames = torch.arange(local) + (0 if local_positions else rank * local)
    positions = frames.repeat_interleave(TOKENS_PER_FRAME).repeat(2)
    x = torch.cat([clean, noisy], dim=1).requires_grad_()
    out = model(x, positions, table)[:, clean.shape[1] :]
    return (out - target).square().sum(), x, out


def reference(samples, *, count):
    """Loss and every parameter gradient of one process: the sum over samples divided by `count`."""
    model = toy()
    total = sum(loss_sum(model, sample)[0] for sample in samples) / count
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters()}
