"""A page on which people label documents of a corpus; it needs no model."""
