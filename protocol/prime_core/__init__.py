"""The words the three programs share: no I/O, no clock, no randomness, no torch, no web3."""
