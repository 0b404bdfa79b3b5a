"""The KV cache as the kernels read and write it."""
