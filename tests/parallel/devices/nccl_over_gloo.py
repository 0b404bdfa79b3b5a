"""The communicator of devices, with gloo in NCCL's place and tensors of the CPU."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

import msgspec
import torch
from torch.distributed import ProcessGroupGloo

from parallel.communicators.base import CollectiveError
from parallel.communicators.gloo import MeetingStore
from parallel.communicators.nccl import FOREVER, NcclCommunicator, NcclWire
from parallel.communicators.process_group import first_line, local_processes
from parallel.links.meeting_contract import Meeting
from parallel.links.rendezvous import exchange
from parallel.rounds.segments import this_host


def nccl_over_gloo(meeting: Meeting, rank: int, size: int, timeout: float) -> NcclCommunicator:
    """One member; gloo itself waits for ever, so that deadlines are those of the communicator."""
    cpu = torch.device("cpu")
    if size == 1:
        return NcclCommunicator(0, 1, timeout=timeout, wire=None, device=cpu, processes={})
    said = exchange(meeting, rank, size, msgspec.json.encode((this_host(), os.getpid())), timeout=timeout)
    processes = local_processes([msgspec.json.decode(each, type=tuple[str, int]) for each in said])
    del processes[rank]
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=10.0)
    options._threads = 1
    try:
        group = ProcessGroupGloo(MeetingStore(meeting, timeout), rank, size, options)
    except RuntimeError as error:
        raise CollectiveError(first_line(error)) from error
    group._set_default_timeout(FOREVER)

    def end() -> None:
        """gloo closes everything when a receive is out of time."""
        for peer in set(range(size)) - {rank}:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, 1).wait(timedelta(milliseconds=1))

    wire = NcclWire(group, processes=processes, end=end, shut_down=end, device=None)
    made = NcclCommunicator(rank, size, timeout=timeout, wire=wire, device=cpu, processes=processes)
    made.all_gather_ints([rank])  # after this, nobody needs the meeting place
    return made
