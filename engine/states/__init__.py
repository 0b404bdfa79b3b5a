"""Layers with a recurrent state, computed on a grid of positions.

A layer's state is kept at multiples of :data:`engine.states.grid.GRID` only, together with the layer's inputs
since then. Every step computes the open part of the grid again from the last boundary. So what a token gets
depends on the tokens before it, and not on chunks, neighbours, runs again or refused drafts.
"""
