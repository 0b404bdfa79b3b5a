"""Membership of the mesh and its epochs.

Also holds what every process of the mesh stands on: typed messages over ZeroMQ (:mod:`coordinator.rpc.rpc`),
flags made from config structs (:mod:`coordinator.settings.flags`), logging and life cycle
(:mod:`coordinator.process.process`). Nothing here loads torch.
"""
