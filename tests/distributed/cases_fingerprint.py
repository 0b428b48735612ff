"""What ranks run for the tests of the content guards."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from evenspan.comm.fingerprint import IdentityGuard, compare_fingerprints
from evenspan.data.content import content_fingerprint
from evenspan.data.slots import DataSlots
from evenspan.errors import CommError
from evenspan.topology.degrees import Axis, Degrees
from evenspan.topology.mesh import build_topology


def compare(ctx, degrees, digests, sample_ids):
    """None, or the error of this rank and the seconds it took, over the context and tensor groups."""
    topology = build_topology(Degrees(**degrees), device=ctx.device)
    groups = [topology.group(axis) for axis in (Axis.CONTEXT, Axis.TENSOR)]
    started = time.monotonic()
    try:
        compare_fingerprints(digests[ctx.rank], groups=groups, sample_ids=sample_ids[ctx.rank])
    except CommError as error:
        return error.code, str(error), time.monotonic() - started
    finally:
        dist.barrier()
    return None


def own_loader(ctx, degrees, mistake=None):
    """Sample ids by step that an own DataLoader reads on this rank, or the code and text of a guard."""
    mesh = build_topology(Degrees(**degrees), device=ctx.device).mesh
    slots, guard = DataSlots(mesh), IdentityGuard(mesh)
    if mistake == "global rank":
        slots.rank, slots.degree = ctx.rank, ctx.world_size
    if mistake == "no rank":
        slots.rank, slots.degree = 0, 1
    content = torch.arange(23) * 10
    if mistake == "other content" and ctx.rank == 3:
        content = content + 1
    sampler = slots.sampler(23, seed=4, batch_size=2, batches=9)
    read = []
    try:
        for ids in DataLoader(range(23), batch_size=2, sampler=sampler):
            guard.same(content_fingerprint({"tokens": content[ids]}), sample_ids=ids.tolist())
            if len(read) < 5:  # of 23 samples, 5 global batches of 4 lie in the first epoch
                guard.disjoint(ids.tolist())
            read.append(tuple(ids.tolist()))
    except CommError as error:
        return error.code, str(error)
    finally:
        dist.barrier()
    return read
