"""A trainer's side of a process group, made as training libraries make it.

``python trainer.py GROUP WORLD_SIZE [COUNT ...] [--die-after N]`` prints its port, then sends tensors.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

TIMEOUT = timedelta(seconds=120)


def tensor(index: int, count: int) -> torch.Tensor:
    """The numbers that the trainer sends as its tensor of an index."""
    return (index + 1) * torch.arange(1.0, count + 1)


def store(world_size: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, world_size, True, TIMEOUT, wait_for_workers=False)


def group(place: dist.TCPStore, name: str, world_size: int) -> Any:
    """The trainer's membership, as slime's and SGLang's trainers make it."""
    made, _ = distributed_c10d._new_process_group_helper(
        world_size, 0, [], "gloo", dist.PrefixStore(name, place), group_name=name, timeout=TIMEOUT
    )
    return made


def send(made: Any, counts: list[int], *, packed: bool = False, die_after: int = -1) -> None:
    """Send tensors of these sizes; a death is that of the process."""
    tensors = [tensor(index, count) for index, count in enumerate(counts)]
    if packed:
        tensors = [torch.cat([each.view(torch.uint8) for each in tensors])]
    broadcast(made, tensors, die_after=die_after)


def broadcast(made: Any, tensors: list[torch.Tensor], *, die_after: int = -1) -> None:
    for index, each in enumerate(tensors):
        if index == die_after:
            os._exit(1)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        made.broadcast([each], options).wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("group")
    parser.add_argument("world_size", type=int)
    parser.add_argument("counts", type=int, nargs="*")
    parser.add_argument("--die-after", type=int, default=-1)
    args = parser.parse_args()
    place = store(args.world_size)
    print(place.port, flush=True)
    send(group(place, args.group, args.world_size), args.counts, die_after=args.die_after)
    sys.stdin.read()  # the store stays until the other side is done


if __name__ == "__main__":
    main()
