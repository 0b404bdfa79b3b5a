"""What only GPUs compute: Triton kernels beside attention, and the choice of operators."""
