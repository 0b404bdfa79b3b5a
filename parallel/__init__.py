"""Library for cutting a model into shards, and for communication between its ranks.

A library: it knows nothing of serving, of requests or of HTTP, and imports no other package of
Lockstep. Modules named *pure* in their docstring load no torch, so that processes which never load
it (coordinator, router) may use them.
"""
