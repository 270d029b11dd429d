"""Submission to a Ray cluster."""
