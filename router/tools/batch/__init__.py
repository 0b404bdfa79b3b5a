"""``lockstep batch``: a file of requests, answered by a mesh of its own."""
