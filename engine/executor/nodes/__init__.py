"""Workers of one instance on several hosts, without Ray: ``--nnodes``.

The engine on the host with node rank 0 listens (:mod:`engine.executor.nodes.driver`). On each other host one
process (``python -m engine.executor.nodes``) asks to join, starts that host's workers, and passes on what the
engine and they say to each other. Tensors do not come this way: workers meet in torch.distributed on the
hosts' own addresses.
"""
