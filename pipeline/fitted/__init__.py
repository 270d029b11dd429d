"""Values fitted to gold labels: readouts, and the thresholds of cascades."""
