"""The fused and the staged schedule."""
