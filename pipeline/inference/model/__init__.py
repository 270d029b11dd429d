"""A loaded model and its weights."""
