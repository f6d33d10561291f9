"""Types, messages and helpers shared by all programs; imports neither torch nor web3."""
