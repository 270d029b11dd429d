"""From tokens of labels to label probabilities."""
