"""Triton kernels for GPUs other than attention, and the choice of operators."""
