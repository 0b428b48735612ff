"""What ranks run for the tests of the content guard."""

import torch.distributed as dist

from evenspan.comm.fingerprint import compare_fingerprints
from evenspan.errors import CommError
from evenspan.topology.degrees import Axis, Degrees
from evenspan.topology.mesh import build_topology


def compare(ctx, digests, sample_ids):
    """None, or the error of this rank, when the context groups {0, 1}, {2, 3} compare what each rank read."""
    topology = build_topology(Degrees(shard=2, context=2), device=ctx.device)
    try:
        compare_fingerprints(
            digests[ctx.rank], group=topology.group(Axis.CONTEXT), sample_ids=sample_ids[ctx.rank]
        )
    except CommError as error:
        return error.code, str(error)
    finally:
        dist.barrier()
    return None
