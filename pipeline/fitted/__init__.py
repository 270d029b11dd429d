"""Values fitted to gold labels: readouts and calibrations."""
