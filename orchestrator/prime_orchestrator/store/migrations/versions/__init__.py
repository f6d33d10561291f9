"""One file a revision, oldest 0001."""
