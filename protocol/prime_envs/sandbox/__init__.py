"""Runs code that nobody trusts: a program in, what it printed or returned out. See `client`."""
