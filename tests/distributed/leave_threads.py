"""One rank of a whole run, for torchrun: prints the names of the threads that are left when it is over."""

from __future__ import annotations

import sys
from pathlib import Path

from evenspan.check.rules import check_file
from evenspan.config.environment import launch_env
from evenspan.train.launch import run


def main(config: str, logdir: str) -> None:
    env = launch_env()
    run(check_file(config, world_size=env.world_size).legal_config(), logdir=Path(logdir), env=env)
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    sys.stdout.write(f"left: {sorted(name for name in names if 'gloo' in name)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
