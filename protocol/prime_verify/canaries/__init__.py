"""Files that lie on purpose: what planted nodes hand in."""
