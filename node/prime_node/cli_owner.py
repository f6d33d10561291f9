"""`prime-node wallet | stake | rewards | work`: keys, money, receipts. Needs neither torch nor
docker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from prime_chain import wallet_cli
from prime_core.command_line import Json, group
from prime_core.errors import PrimeError, UserError
from prime_core.ids import Address
from prime_core.printing import printable
from prime_core.times import parse_utc, utc
from prime_node.cli_common import (
    DryRun,
    NodeFlag,
    configured,
    print_fields,
    print_json,
    print_rows,
    typed_command,
)

if TYPE_CHECKING:
    from prime_chain.client import Call
    from prime_node.config import Settings
    from prime_node.link import Link

wallet_app = group("The node's key.")
stake_app = group("The owner's stake.")
rewards_app = group("What the node earned.")
work_app = group("Files handed in: are they on chain?")

Amount = Annotated[str, typer.Argument(help="Amount of PRIME, like 100 or 12.5.")]


# -- wallet ----------------------------------------------------------------------------------------


wallet_app.command("new")(wallet_cli.new)


@wallet_app.command("show")
@configured
def wallet_show(settings: Settings, as_json: Json = False) -> None:
    """Show the address that a keystore names."""
    from prime_node.wallet import wallet_address

    address = wallet_address(settings)
    if as_json:
        print_json({"address": address, "keystore": str(settings.wallet)})
    else:
        typer.echo(address)


# -- transactions of an owner ----------------------------------------------------------------------


@dataclass(frozen=True)
class OwnerContext:
    """What an owner's command decides from. `account` sends. `finished`: whether an interrupted
    command's transactions were finished just now."""

    link: Link
    account: Address
    finished: bool = False


def owner_account(settings: Settings) -> Address:
    """The selected owner: --provider, or the wallet's account."""
    from prime_node.wallet import named_provider, wallet_address

    return named_provider(settings) or wallet_address(settings)


def node_account(settings: Settings, node: str | None) -> Address:
    """The selected node: --node, or the wallet's account."""
    from prime_core import ids
    from prime_node.wallet import wallet_address

    return ids.address(node) if node else wallet_address(settings)


def open_link(settings: Settings) -> Link:
    """The chain; the orchestrator is asked for the pool only if nothing else names it. If it gives
    none, the pool is the one that the agent of this data folder last worked for."""
    from prime_core.transport.client import OrchestratorClient
    from prime_node.link import connect
    from prime_node.state import DataFolder

    settings.need_rpc()
    if settings.deployment is not None and settings.pool is not None:
        return connect(settings, None)
    with OrchestratorClient(settings.need_orchestrator()) as client:
        try:
            info = client.pool()
        except PrimeError as error:
            known = DataFolder(settings.data).known_pool(settings.orchestrator)
            if known is None:
                raise UserError(
                    str(error),
                    hint="to work without the orchestrator, add --deployment FILE and --pool N",
                    exit_code=error.exit_code,
                ) from error
            typer.echo(
                f"{printable(str(error))}; using the saved facts of pool {known.pool}", err=True
            )
            info = known
    return connect(settings, info)


def send_calls(
    settings: Settings,
    decide: Callable[[OwnerContext], list[Call]],
    *,
    dry_run: bool,
    as_json: bool,
    multisig: bool = False,
) -> None:
    """Sends an owner's transactions one by one, or prints them unsent with what they would cost or
    why they would be refused (then it exits with the refusal's code). `multisig` prints them as one
    transaction of a Safe instead."""
    from prime_chain import costs
    from prime_node.owner import Owner, as_one, describe
    from prime_node.state import DataFolder
    from prime_node.wallet import open_wallet

    signer, refused = None if dry_run or multisig else open_wallet(settings), None
    link = open_link(settings)
    try:
        if signer is not None:
            data, account = DataFolder(settings.data), signer.address
            data.make()
            owner = Owner(link, signer, data.chain)
            try:
                rows = owner.act(
                    typed_command(),
                    lambda finished: decide(OwnerContext(link, account, bool(finished))),
                    partial(typer.echo, err=True),
                )
            finally:
                owner.close()
        else:
            account = owner_account(settings)
            calls = decide(OwnerContext(link, account))
            if multisig:
                rows = [as_one(link.client, calls)] if calls else []
            else:
                found, rows = costs.rehearse(link.client, calls, account), describe(calls)
                refused = costs.refusal(found)
                rows = [r | {"cost": costs.words(one)} for r, one in zip(rows, found, strict=True)]
    finally:
        link.close()
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            typer.echo(row["what"])
            for name, value in row.items():
                if name != "what" and not ("transaction" in row and name in ("to", "data")):
                    typer.echo(f"  {name:12} {value}")
    if refused is not None:
        raise typer.Exit(refused.exit_code)


def of_no_pool(settings: Settings) -> Settings:
    """For commands that concern no pool: with a --deployment they need no --pool either."""
    return settings if settings.pool is not None else settings.model_copy(update={"pool": 0})


def require_stake_is_its_own(context: OwnerContext, settings: Settings) -> None:
    """Raises UserError if the account is a node's whose stake another account holds."""
    from prime_node.wallet import named_provider

    registry, account = context.link.contracts.registry, context.account
    if registry.is_provider(account):
        return
    owner = registry.provider_of(account) or named_provider(settings)
    if owner not in (None, account):
        raise UserError(
            f"{account} holds no stake: it is a node of {owner}, whose key moves the stake",
            hint="at the owner's machine, the same command with --wallet OWNER_KEYSTORE",
        )


# -- stake -----------------------------------------------------------------------------------------


@stake_app.command("show")
@configured
def stake_show(settings: Settings, as_json: Json = False) -> None:
    """Show an owner's stake on chain. Needs no password."""
    from dataclasses import asdict

    from prime_chain import flows
    from prime_chain.contracts import prime

    link = open_link(of_no_pool(settings))
    try:
        now = link.client.agreed_block("latest").time
        view = flows.stake_view(link.contracts, owner_account(settings), now)
    finally:
        link.close()
    amounts = ("active", "committed", "unbondable", "pending", "withdrawable", "wallet")
    if as_json:
        texts = {name: str(getattr(view, name)) for name in amounts}
        queue = [one | {"amount": str(one["amount"])} for one in map(asdict, view.unbonding)]
        print_json(asdict(view) | texts | {"unbonding": queue})
        return
    rows: list[tuple[str, object]] = [("provider", view.provider), ("payout", view.payout)]
    rows += [(name, prime(getattr(view, name))) for name in amounts]
    rows += [(f"unbonding until {utc(one.mature_at)}", prime(one.amount)) for one in view.unbonding]
    rows.append(("answers to", view.bound.words() or "no one"))
    print_fields("stake", rows)


@stake_app.command("add")
@configured
def stake_add(
    settings: Settings, amount: Amount, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Deposit stake. Registers the wallet as a provider first if needed."""
    from prime_chain import flows
    from prime_chain.amounts import parse_amount, prime

    wei = parse_amount(amount)

    def calls(context: OwnerContext) -> list[Call]:
        c, account = context.link.contracts, context.account
        held = c.token.balance_of(account)
        if not (dry_run or context.finished) and held < wei:
            raise UserError(
                f"{account} holds {prime(held)}, less than {prime(wei)}",
                hint="send it more, or on a test network: prime-node faucet",
            )
        return [*flows.register_and_stake(c, account, account, 0), *flows.stake(c, account, wei)]

    send_calls(of_no_pool(settings), calls, dry_run=dry_run, as_json=as_json)


@stake_app.command("unbond")
@configured
def stake_unbond(
    settings: Settings, amount: Amount, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Start taking stake out; it stays slashable until it is unbonded."""
    from prime_chain.amounts import parse_amount

    wei = parse_amount(amount)

    def calls(context: OwnerContext) -> list[Call]:
        require_stake_is_its_own(context, settings)
        return [context.link.contracts.vault.unbond(wei)]

    send_calls(of_no_pool(settings), calls, dry_run=dry_run, as_json=as_json)


@stake_app.command("rebond")
@configured
def stake_rebond(
    settings: Settings, amount: Amount, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Bond again what is on its way out, the newest first."""
    from prime_chain.amounts import parse_amount

    wei = parse_amount(amount)
    send_calls(
        of_no_pool(settings),
        lambda context: [context.link.contracts.vault.rebond(wei)],
        dry_run=dry_run,
        as_json=as_json,
    )


@stake_app.command("withdraw")
@configured
def stake_withdraw(settings: Settings, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Take out the stake that has finished unbonding."""

    def calls(context: OwnerContext) -> list[Call]:
        require_stake_is_its_own(context, settings)
        return [context.link.contracts.vault.withdraw()]

    send_calls(of_no_pool(settings), calls, dry_run=dry_run, as_json=as_json)


# -- rewards ---------------------------------------------------------------------------------------


@rewards_app.command("show")
@configured
def rewards_show(settings: Settings, node: NodeFlag = None, as_json: Json = False) -> None:
    """Show what the node earned, what is payable, and what was paid. Needs no password."""
    from prime_chain.contracts import prime
    from prime_node.rewards import read_rewards

    found = read_rewards(settings, node_account(settings, node))
    if as_json:
        print_json(found.as_json())
        return
    info = found.info
    when = utc(info.claimable_at) if info.claimable_at else "not yet settled"
    print_rows(
        f"rewards of {info.node}",
        ("", "amount"),
        [
            ("settled up to epoch", info.epoch),
            ("earned in all", prime(int(info.cumulative))),
            ("by this machine's files", prime(found.own) if found.own is not None else None),
            ("difference", prime(found.difference) if found.difference is not None else None),
            ("paid so far", "unknown (no --rpc)" if found.paid is None else prime(found.paid)),
            ("payable", prime(found.payable) if found.payable is not None else None),
            ("payable from", when),
            ("not yet settled (tokens)", info.pending_units),
            ("forfeited", prime(int(info.forfeited))),
        ],
    )


@rewards_app.command("claim")
@configured
def rewards_claim(
    settings: Settings,
    node: NodeFlag = None,
    everything: Annotated[
        bool, typer.Option("--all", help="For all nodes of the owner, in one transaction.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Claim the node's rewards for its owner's payout address. Anyone may do this.

    With an owner's wallet it claims for all nodes of the owner.
    """
    from prime_node.nodes import nodes_of
    from prime_node.rewards import claim_calls

    target = None if everything else node_account(settings, node)

    def calls(context: OwnerContext) -> list[Call]:
        if target is None:
            return claim_calls(
                settings, context.link, nodes_of(context.link, owner_account(settings))
            )
        accounts = [target]
        if node is None and context.link.contracts.registry.is_provider(target):
            accounts += [one for one in nodes_of(context.link, target) if one != target]
        return claim_calls(settings, context.link, accounts)

    send_calls(settings, calls, dry_run=dry_run, as_json=as_json)


@rewards_app.command("explain")
@configured
def rewards_explain(
    settings: Settings,
    node: NodeFlag = None,
    epoch: Annotated[
        int | None, typer.Option(help="Up to this epoch's reward root; the newest.", min=0)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what each file earned, or why it earned nothing.

    Exits with 1 if the files do not add up to what the reward root on chain gives.
    """
    from prime_node.rewards import explain_rewards

    found = explain_rewards(settings, node_account(settings, node), epoch)
    if as_json:
        print_json(found.as_json())
    else:
        typer.echo("\n".join(found.lines()))
    if found.problems:
        raise typer.Exit(1)


# -- work ------------------------------------------------------------------------------------------


@work_app.command("list")
@configured
def work_list(
    settings: Settings,
    last: Annotated[int, typer.Option(min=1, help="At most this many, the newest.")] = 20,
    since: Annotated[
        str | None, typer.Option(help="Received at this time or later, like 2026-11-20T19:05Z.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List receipts, and whether the chain holds their files."""
    from prime_node.state import DataFolder
    from prime_node.work import read_receipts, received_since, standing

    every = read_receipts(DataFolder(settings.data))
    chosen = received_since(every, parse_utc(since) if since is not None else 0)
    entries = chosen[-last:]
    link = open_link(settings)
    try:
        found = standing(link, entries, settings.orchestrator)
    finally:
        link.close()
    if as_json:
        print_json([one.as_json() for one in found])
        return
    if len(chosen) > last:
        typer.echo(f"{len(chosen) - last} older receipts are not shown: --last {len(chosen)}")
    for one in found:
        line = f"{one.entry.submission_digest}  {one.state}"
        if one.state in ("forgotten", "waiting", "unknown"):
            since, until = utc(one.post_from), utc(one.post_until)
            line += f"  may be posted from {since} to {until}"
        typer.echo(line)
    if not every:
        typer.echo(f"the data folder {settings.data} holds no receipt")
    elif not found:
        typer.echo(f"no receipt is from {since} or later")


@work_app.command("post")
@configured
def work_post(
    settings: Settings,
    submission: Annotated[
        str | None, typer.Argument(help="Submission digest; by default all that are forgotten.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Root a file that the manager ignored for an epoch. The file must have a receipt. Any
    account may do this."""
    from prime_core import ids
    from prime_node.state import DataFolder
    from prime_node.work import pick, post_call, read_receipts, standing

    named = ids.digest(submission) if submission is not None else None

    def calls(context: OwnerContext) -> list[Call]:
        entries = read_receipts(DataFolder(settings.data))
        found = standing(context.link, entries, settings.orchestrator)
        return [post_call(context.link, one.entry) for one in pick(found, named)]

    send_calls(settings, calls, dry_run=dry_run, as_json=as_json)
