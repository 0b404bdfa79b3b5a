"""Dashboard at ``/``: a live page about the mesh for browsers.

Plain files and one stream of JSON.
"""
