"""``lockstep autoscale``: follows the load of a mesh and changes its number of instances."""
