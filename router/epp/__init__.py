"""Endpoint picker of the Gateway API Inference Extension: ``lockstep epp``.

A gateway such as Envoy asks it, over gRPC, where each request goes. The answer is a router of the mesh, and
the instance that this router should use.
"""
