"""The code inside the container: fulfils one lease after another. It has no key and no network."""
