"""What a user writes: the schema, parsing, prompts and fingerprints."""
