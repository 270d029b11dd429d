"""Gold labels."""
