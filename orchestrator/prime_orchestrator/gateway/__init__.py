"""`orchestrator gateway`: answers tool calls that need a network, signed for one call of one row.

    upstreams.py   one bounded request to a site or server that the operator allows
    service.py     who may call, the first call of a place is final, the signature; HTTP

See docs/gateway.md, docs/adr/0013 and prime_core/gateway.py.
"""
