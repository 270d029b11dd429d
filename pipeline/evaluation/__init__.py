"""Evaluation: what answers are worth, and how they are put right."""
