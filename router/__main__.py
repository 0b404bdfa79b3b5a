"""``python -m router``: the OpenAI-compatible endpoint of a mesh."""

from __future__ import annotations

import sys

import uvloop

from coordinator.process import process
from coordinator.settings.flags import parse
from router.config import RouterConfig
from router.http.tls import tls_problem
from router.launcher.preflight import defaults_problem, template_problem


def main(argv: list[str] | None = None) -> int:
    config = parse(
        RouterConfig,
        sys.argv[1:] if argv is None else argv,
        prog="python -m router",
        description="The OpenAI-compatible endpoint of a Lockstep mesh.",
    )
    process.set_up("Router", config.log_level, config.mesh.observability.log_format)
    problem = tls_problem(config.http) or template_problem(config.http)
    if problem is None and config.http.generation_config != "auto":  # else it is known with the model
        problem = defaults_problem(config.http, "")
    if problem is not None:
        print(f"python -m router: error: {problem}", file=sys.stderr)
        return process.EXIT_USAGE
    keys = process.member_keys(config.mesh, "python -m router")
    from router.server import serve  # after the flags: --help needs no HTTP server

    return uvloop.run(serve(config, keys))


if __name__ == "__main__":
    sys.exit(main())
