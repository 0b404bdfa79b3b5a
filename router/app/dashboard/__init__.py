"""The page at ``/``: the mesh, live, in a browser.

Plain files and one stream of JSON.
"""
