"""The HTTP door of the mesh, the choice of an instance, and the command line on top of all.

Nothing here loads torch when imported.
"""
