"""Measurements that are not part of the library."""
