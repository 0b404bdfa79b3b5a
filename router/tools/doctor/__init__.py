"""``lockstep doctor``: checks an installation, its host, a mesh and the network between hosts.

It reports what to fix. The files named after what they check (``packages``, ``machine``, ``ports``,
``network``, ``mesh``, ``links``) return findings; ``report`` shows them, ``command`` is the command.
"""
