"""The page at ``/``: the mesh, live, in a browser; plain files and one stream of JSON."""
