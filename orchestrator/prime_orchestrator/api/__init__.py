"""The HTTP service: routes, sessions, leases, intake, status."""
