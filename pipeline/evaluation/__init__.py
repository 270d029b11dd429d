"""How good answers are: figures, thresholds, gates. Numbers in, numbers out."""
