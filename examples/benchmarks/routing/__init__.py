"""Parts of ``examples/benchmarks/bench_routing.py``: policies compared on a mesh with a virtual clock.

Schedulers, block pools, prefix index and chooser are Lockstep's own.
"""
