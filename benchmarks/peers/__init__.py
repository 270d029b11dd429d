"""Other inference engines measured beside assay. Entry point: `python -m benchmarks.peers`."""
