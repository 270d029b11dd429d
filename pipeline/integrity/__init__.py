"""Verify, compare and clean an output."""
