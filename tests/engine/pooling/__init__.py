"""Tests of engine/pooling."""
