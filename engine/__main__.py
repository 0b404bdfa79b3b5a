"""``python -m engine``: one headless instance (:mod:`engine.lifecycle.instance`)."""

from __future__ import annotations

import logging
import sys

from coordinator.addresses import AddressError
from coordinator.process import process
from coordinator.rpc.rpc import PortInUse
from coordinator.settings.flags import parse
from engine.config import InstanceConfig
from engine.executor_contract import CannotStart, WorkerLost
from engine.host import deferred
from engine.host.device_errors import device_error
from engine.host.memory import is_out_of_memory
from engine.lifecycle.ended import InstanceEnded
from engine.lifecycle.instance import InstanceProcess
from engine.model.checkpoint import CheckpointError

logger = logging.getLogger("engine")


def main(argv: list[str] | None = None) -> int:
    config = parse(
        InstanceConfig,
        sys.argv[1:] if argv is None else argv,
        prog="python -m engine",
        description="One headless instance of a Lockstep mesh.",
    )
    rank = config.mesh.data_parallel_start_rank
    process.set_up(
        "Engine" if rank is None else f"Engine_{rank}", config.log_level, config.mesh.observability.log_format
    )
    keys = process.member_keys(config.mesh, "python -m engine")
    process.warn_if_open(config.mesh)
    try:
        InstanceProcess(config, keys).run()
    except InstanceEnded as ended:
        was_asked_to = ended.status in (0, process.EXIT_INTERRUPTED)
        logger.log(logging.INFO if was_asked_to else logging.ERROR, "%s", ended)
        return ended.status
    except WorkerLost as error:
        logger.error("lost a worker while starting: %s", error)
        return process.EXIT_WORKER_LOST
    except (CheckpointError, CannotStart, PortInUse, AddressError) as error:
        logger.error("%s", error)
        return process.EXIT_FAILED
    except ImportError as error:
        logger.error(
            "a library cannot be loaded: %s%s; lockstep doctor looks at the installation",
            error, f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else "",
        )  # fmt: skip
        return process.EXIT_FAILED
    except Exception as error:
        if reason := device_error(error):
            logger.error("the GPU cannot be used: %s; nvidia-smi and lockstep doctor look at it", reason)
            return process.EXIT_FAILED
        if not is_out_of_memory(error):
            raise
        logger.error(
            "out of memory (%s): leave less room for the KV cache, lower --max-num-batched-tokens, or run "
            "fewer instances here", str(error).strip().partition("\n")[0] or "no details",
        )  # fmt: skip
        return process.EXIT_FAILED
    logger.info("the instance ends")
    return 0


if __name__ == "__main__":
    deferred.trim()
    process.finish(main())
