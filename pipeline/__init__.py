"""The library behind `assay`: see README for the file map."""
