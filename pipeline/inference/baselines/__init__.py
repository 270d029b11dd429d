"""Slow oracles and the alternatives that the tree is measured against."""
