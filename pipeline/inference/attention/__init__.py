"""Attention over the prompt tree."""
