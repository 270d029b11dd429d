"""The model side: tree attention and what feeds it. Never Ray, files or logging."""
