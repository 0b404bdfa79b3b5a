"""Planted bugs by area, each of which a named test must find."""
