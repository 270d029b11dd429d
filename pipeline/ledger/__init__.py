"""What is stored and what is missing."""
