"""Native kernels for CPUs: a whole step of a decoder in one call.

torch's own operators are the fallback. ``library`` compiles and loads, ``packing`` lays out weights,
``decoder`` recognises a model whose layers are of the usual kind, ``program`` runs it, ``experts`` computes
spread experts.
"""
