"""Tests of the kernels for ARM64, on any machine: cross-compiled, and run under QEMU."""
