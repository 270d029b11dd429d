"""What runs and fits make: readouts, and certificates of cascades."""
