"""Share of its host's cores that an instance computes with, as others come and go."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.executor_contract import Executor
from engine.host.cores import Share, share_of_cores, tell_threads


class ComputeShare:
    """Cores and threads of one instance, by the number of instances on its host."""

    def __init__(self, config: EngineConfig, instances_here: int) -> None:
        """``instances_here``: those that will start on this host; some may not have registered yet."""
        self._config = config
        self._instances_here = instances_here
        self.now = Share()

    def __repr__(self) -> str:
        return f"<ComputeShare {self.now}>"

    def neighbours(self, registered: int, *, is_ready: bool) -> int:
        """Instances on this host, this one included, of which so many have registered."""
        if is_ready or not self._config.num_local_workers:
            return registered
        return max(registered, self._instances_here)

    def update(self, sharers: int, executor: Executor | None) -> None:
        """Take as many cores and threads as are this instance's among so many sharers."""
        config = self._config
        if not config.num_local_workers:
            return  # Ray's nodes have cores of their own
        share = share_of_cores(config.num_local_workers, config.device.cpu_threads, sharers)
        if share == self.now:
            return
        if share.threads != self.now.threads:
            tell_threads(config, share, sharers)
        self.now = share
        if executor is not None:
            executor.set_threads(*share)
