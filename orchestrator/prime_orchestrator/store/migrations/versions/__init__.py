"""One file per revision, starting with 0001."""
