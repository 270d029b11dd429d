"""Keep and drop documents by a rule."""
