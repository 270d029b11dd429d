"""Find, cut and read input files."""
