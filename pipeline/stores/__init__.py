"""Object stores with create-only writes."""
