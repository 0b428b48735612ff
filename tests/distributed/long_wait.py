"""One rank, for torchrun: rank 0 works for longer than a collective waits, the others wait for it."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch.distributed as dist

from evenspan.config.environment import launch_env
from evenspan.topology.mesh import init_distributed, leave_distributed, wait_for_rank_0

COLLECTIVE_S, WORK_S = 4, 8


def main(how: str) -> None:
    init_distributed(launch_env(), backend="gloo", timeout=timedelta(seconds=COLLECTIVE_S))
    dist.barrier()
    started = time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(WORK_S)
    if how == "barrier":
        dist.barrier()
    else:
        wait_for_rank_0("the work")
    sys.stdout.write(f"waited: {time.monotonic() - started >= WORK_S - 0.5}\n")
    leave_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
