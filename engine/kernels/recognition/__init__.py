"""Finds out what the modules of a model do: by their parts, and by what they give for made-up inputs."""
