"""Functions for ranks to run, for the tests of the pool itself."""

import time

import torch
import torch.distributed as dist


def ranks_add_up(context, number):
    total = torch.tensor([context.rank + number])
    dist.all_reduce(total)
    return context.world_size, int(total)


def raise_on(context, culprit):
    if context.rank == culprit:
        raise ValueError(f"rank {culprit} says no")
    return context.rank


def raise_while_others_wait(context, culprit):
    if context.rank == culprit:
        raise ValueError(f"rank {culprit} says no")
    dist.barrier()


def sleep(context, seconds):
    time.sleep(seconds)
