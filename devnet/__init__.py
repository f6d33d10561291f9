"""The whole network on one machine: chain, contracts, orchestrator, nodes honest and lying,
validator, relay, trainer, each its own process, started by the commands an operator would type."""
