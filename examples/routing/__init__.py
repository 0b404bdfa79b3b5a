"""Parts of ``examples/bench_routing.py``: policies compared on a mesh whose clock is virtual and whose
schedulers, block pools, prefix index and chooser are Lockstep's own."""
