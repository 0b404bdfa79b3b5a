"""The class ``LLM``: a mesh inside a Python program."""
