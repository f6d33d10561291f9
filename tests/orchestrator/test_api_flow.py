"""From a grant to a receipt, over HTTP."""

from __future__ import annotations

from orchestrator_world import World


def test_a_member_takes_a_lease_and_hands_in_its_file(world: World) -> None:
    node = world.member(1)
    digest = world.hand_in(node)
    info = world.http.get(f"/v1/submissions/{digest}").json()
    assert info["status"] == "submitted"
    assert info["node"] == node.account.address


def test_openapi_names_every_body(world: World) -> None:
    document = world.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path in document["paths"].values():
        for operation in path.values():
            if name := operation.get("x-body-model"):
                assert name in schemas
    assert "/v1/leases/{digest}/upload" in document["paths"]
