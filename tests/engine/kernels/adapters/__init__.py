"""Tests of low-rank adapters beside native products."""
