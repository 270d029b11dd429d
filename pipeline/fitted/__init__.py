"""Files that fits and runs make: readouts, and certificates of cascades."""
