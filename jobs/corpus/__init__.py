"""The demo corpus, its gold labels, and the script that builds both."""
