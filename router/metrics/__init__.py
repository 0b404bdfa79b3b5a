"""Counters and histograms of a router, and their text for Prometheus."""
