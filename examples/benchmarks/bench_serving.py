#!/usr/bin/env python3
"""``lockstep bench serve``, from a checkout: measures any OpenAI-compatible server.

python examples/benchmarks/bench_serving.py --base-url http://127.0.0.1:8000 --ignore-eos --max-concurrency 8
python examples/benchmarks/bench_serving.py --serve "-dp 2" --ignore-eos --concurrency 1 8 32
"""

from __future__ import annotations

import sys

from router.tools.bench.command import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
