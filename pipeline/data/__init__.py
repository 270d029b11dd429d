"""The data side: storage, shards, the ledger and the Ray graph. Never torch in the driver."""
