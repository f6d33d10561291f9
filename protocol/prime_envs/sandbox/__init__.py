"""Runs untrusted code: takes a program, returns what it printed or returned. See `client`."""
