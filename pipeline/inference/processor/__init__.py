"""Kernels of our own for processors with AVX-512: attention, and the rounding of 8-bit products."""
