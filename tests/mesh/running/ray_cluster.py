"""A Ray cluster on this machine, with a node for each number of CPUs.

``python -m tests.mesh.running.ray_cluster CPUS...`` prints the cluster's address. It runs until its input ends, so no
longer than the process that started it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile


def main() -> None:
    directory = tempfile.mkdtemp(prefix="lsr-")  # short, for the sockets in it
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_TMPDIR"] = directory  # also for the address, which Ray writes where it thinks is default
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for cpus in map(int, sys.argv[1:]):
            cluster.add_node(
                num_cpus=cpus,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=80 << 20,
            )
        print(json.dumps(cluster.address), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
