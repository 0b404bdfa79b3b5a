"""Benchmarks of long prompts, and of many prompts at once without a server."""
