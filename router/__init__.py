"""The HTTP endpoint of the mesh, the routing of requests, and the command line.

Nothing here loads torch when imported.
"""
