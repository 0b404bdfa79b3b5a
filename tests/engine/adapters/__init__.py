"""Tests of adapters: their files, and what they compute."""
