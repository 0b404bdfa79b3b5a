"""``lockstep doctor``: looks at an installation, its host, a running mesh and the network between hosts, and
says what to fix. The files named after what they look at (``packages``, ``machine``, ``ports``, ``network``,
``mesh``, ``links``) return findings; ``report`` shows them, ``command`` is the command.
"""
