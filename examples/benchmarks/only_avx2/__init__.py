"""Folder for PYTHONPATH: a hook that keeps vLLM to AVX2."""
