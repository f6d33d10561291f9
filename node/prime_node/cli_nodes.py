"""`prime-node node | payout | dispute | appeal`: what an owner does about its nodes. Needs neither
torch nor docker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_core.command_line import Json, group
from prime_core.times import utc
from prime_node.cli_common import DryRun, configured, print_fields, print_json
from prime_node.cli_owner import (
    OwnerContext,
    node_account,
    of_no_pool,
    open_link,
    owner_account,
    send_calls,
)

if TYPE_CHECKING:
    from prime_chain.client import Call
    from prime_node.config import Settings

node_app = group("The owner's nodes.")
CONSENT_DAYS = 7

Node = Annotated[str | None, typer.Argument(help="Node's address; by default the wallet's.")]
Consent = Annotated[Path, typer.Argument(help="File that `node consent` wrote at the machine.")]


@node_app.command("consent")
@configured
def consent(
    settings: Settings,
    out: Annotated[Path | None, typer.Option(help="File to write; else it is printed.")] = None,
    days: Annotated[
        int, typer.Option(help="How many days it is valid.", min=1, max=3650)
    ] = CONSENT_DAYS,
) -> None:
    """At the node: sign that this machine belongs to --provider. For `node add` or `node move`."""
    from prime_core.errors import UserError
    from prime_core.given import write_given
    from prime_core.node import NodeConsent
    from prime_node.nodes import sign_consent
    from prime_node.wallet import named_provider, open_wallet

    provider = named_provider(settings)
    if provider is None:
        raise UserError("no owner is named", hint="add --provider ADDRESS")
    signer = open_wallet(settings)
    link = open_link(of_no_pool(settings))
    try:
        deadline = link.client.agreed_block("latest").time + days * 86_400
        domain = link.deployment.domain_of(NodeConsent)
        signed = sign_consent(signer, provider, domain, deadline)
    finally:
        link.close()
    text = signed.model_dump_json(indent=2)
    if out is None:
        typer.echo(text)
    else:
        write_given(out, f"{text}\n".encode())
        typer.echo(f"the consent is in {out}; at the owner: prime-node node add {out}")


@node_app.command("add")
@configured
def add(
    settings: Settings,
    file: Consent,
    stake: Annotated[
        str | None,
        typer.Option(help="PRIME to have at stake. With it, the pool may seat the node at once."),
    ] = None,
    multisig: Annotated[
        bool, typer.Option("--multisig", help="Send nothing; print one transaction for a Safe.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Add a node. Registers the wallet as a provider first if needed."""
    from prime_chain import flows
    from prime_chain.amounts import parse_amount
    from prime_node.nodes import check_owner, read_consent

    signed = read_consent(file)
    wei = parse_amount(stake) if stake is not None else 0

    def calls(context: OwnerContext) -> list[Call]:
        c, account = context.link.contracts, context.account
        check_owner(signed, account)
        found = flows.register_and_stake(c, account, account, wei)
        found += flows.add_node(c, signed.consent, signed.signature)
        if stake is not None:
            found += flows.allow(c, account, context.link.pool)
        return found

    where = of_no_pool(settings) if stake is None else settings
    send_calls(where, calls, dry_run=dry_run, as_json=as_json, multisig=multisig)


@node_app.command("move")
@configured
def move(
    settings: Settings,
    old: Annotated[str, typer.Argument(help="Address that the node had until now.")],
    file: Consent,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Give a node a new key, whose consent this is. Seats and history go with it.

    What it earned under the old key stays claimable there.
    """
    from prime_core import ids
    from prime_node.nodes import check_owner, move_calls, read_consent

    signed, target = read_consent(file), ids.address(old)

    def calls(context: OwnerContext) -> list[Call]:
        check_owner(signed, context.account)
        return move_calls(context.link, target, signed)

    send_calls(of_no_pool(settings), calls, dry_run=dry_run, as_json=as_json)


@node_app.command("remove")
@configured
def remove(
    settings: Settings, node: Node = None, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Remove a node from its owner. Its seats stay until it leaves, and the owner still answers
    for the work of these seats."""
    target = node_account(settings, node)
    send_calls(
        of_no_pool(settings),
        lambda context: [context.link.contracts.registry.remove_node(target)],
        dry_run=dry_run,
        as_json=as_json,
    )


@node_app.command("revoke")
@configured
def revoke(
    settings: Settings,
    node: Node = None,
    before: Annotated[
        int | None, typer.Option(help="Unix seconds; by default now: every session so far.", min=0)
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """End a node's sessions for good, on chain. A stolen session key is worth nothing then.
    Only the node or its owner may do this."""
    target = node_account(settings, node)

    def calls(context: OwnerContext) -> list[Call]:
        link = context.link
        at = link.client.agreed_block("latest").time if before is None else before
        return [link.contracts.registry.set_revoked_before(target, at)]

    send_calls(of_no_pool(settings), calls, dry_run=dry_run, as_json=as_json)


@node_app.command("allow")
@configured
def allow(
    settings: Settings,
    off: Annotated[
        bool, typer.Option("--off", help="Withdraw the consent; seats that are taken stay.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Allow --pool to seat this owner's nodes. Each seat commits stake."""
    send_calls(
        settings,
        lambda context: [context.link.contracts.pools.allow(context.link.pool, not off)],
        dry_run=dry_run,
        as_json=as_json,
    )


@node_app.command("show")
@configured
def show(settings: Settings, node: Node = None, as_json: Json = False) -> None:
    """Show a node's owner, payout address and pools on chain. Needs no password."""
    from prime_node.nodes import pools_of

    target = node_account(settings, node)
    link = open_link(of_no_pool(settings))
    try:
        registry = link.contracts.registry
        owner = registry.provider_of(target)
        revoked, places = registry.revoked_before(target), pools_of(link, target)
        found: dict[str, Any] = {
            "node": target,
            "provider": owner,
            "payout": registry.payout_of(owner) if owner is not None else None,
            "moved_to": registry.moved_to(target),
            "revoked_before": revoked,
            "pools": places,
        }
    finally:
        link.close()
    if as_json:
        print_json(found)
        return
    print_fields(
        "node",
        [
            *((name, found[name]) for name in ("node", "provider", "payout", "moved_to")),
            ("sessions end before", utc(revoked) if revoked else None),
            ("pools", ", ".join(map(str, places)) or None),
        ],
    )


@node_app.command("list")
@configured
def list_nodes(settings: Settings, as_json: Json = False) -> None:
    """List the owner's nodes (--provider, or the wallet's account)."""
    from prime_node.nodes import nodes_of

    owner = owner_account(settings)
    link = open_link(of_no_pool(settings))
    try:
        found = nodes_of(link, owner)
    finally:
        link.close()
    if as_json:
        print_json(found)
        return
    for node in found:
        typer.echo(node)
    if not found:
        typer.echo(f"{owner} has no node")


@configured
def payout(
    settings: Settings,
    to: Annotated[str, typer.Argument(help="Account that receives rewards from now on.")],
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Change where the owner's rewards are paid. Only the owner's own account can."""
    from prime_core import ids

    target = ids.address(to)
    send_calls(
        of_no_pool(settings),
        lambda context: [context.link.contracts.registry.set_payout(target)],
        dry_run=dry_run,
        as_json=as_json,
    )


@configured
def dispute(
    settings: Settings,
    submission: Annotated[str, typer.Argument(help="Digest of the accused submission.")],
    not_served: Annotated[
        bool, typer.Option("--not-served", help="Dispute because its evidence cannot be fetched.")
    ] = False,
    arbiter: Annotated[
        bool, typer.Option("--arbiter", help="Let the arbiter judge instead of the court.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Dispute a slash proposal. Three jurors of the court judge it, or the arbiter while
    fewer than seven jurors count.

    Costs a deposit, which is lost if they find the same. First: prime-node audit replay. The court
    needs what an --orchestrator or a mirror named on chain serves; if none serves it, --arbiter
    disputes without the court. With --not-served it costs
    nothing; then the arbiter alone can let the slash proceed.
    """
    from prime_core import ids
    from prime_core.printing import printable
    from prime_node.disputes import dispute_calls

    leaf = ids.digest(submission)

    def calls(context: OwnerContext) -> list[Call]:
        found, judge = dispute_calls(
            context.link,
            context.account,
            leaf,
            urls=[settings.orchestrator] if settings.orchestrator else [],
            allow_private=settings.allow_private,
            not_served=not_served,
            arbiter=arbiter,
        )
        typer.echo(printable(judge), err=True)
        return found

    send_calls(of_no_pool(settings), calls, dry_run=dry_run, as_json=as_json)


@configured
def appeal(
    settings: Settings,
    submission: Annotated[str, typer.Argument(help="Digest of the unpaid submission.")],
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Ask the arbiter to have an unpaid file paid. Applies to a file that was rejected, void
    or not judged. Once a
    file, within validity and slash window after its root; no deposit.

    See why it was not paid: prime-node audit show SUBMISSION. Granted amounts come with the next
    reward root. Against a slash: prime-node dispute.
    """
    from prime_core import ids
    from prime_node.disputes import appeal_calls

    leaf = ids.digest(submission)

    def calls(context: OwnerContext) -> list[Call]:
        return appeal_calls(
            context.link,
            leaf,
            urls=[settings.orchestrator] if settings.orchestrator else [],
            allow_private=settings.allow_private,
        )

    send_calls(settings, calls, dry_run=dry_run, as_json=as_json)
