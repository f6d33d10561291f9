"""Wiring of `trainer run` and `trainer publish`: builds everything from the settings and runs one
process until a stop request."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from prime_broadcast.files import write_whole
from prime_broadcast.transfer import Link, TransferError
from prime_chain.keystore import open_keystore
from prime_core import tracing
from prime_core.deployment import Deployment
from prime_core.errors import MalformedError, PrimeError, UserError
from prime_core.folders import held_alone, make_folder
from prime_core.logs import log_to_stderr, set_process_fields
from prime_core.messages import RelayInfo, Status
from prime_core.signing import LocalSigner
from prime_core.transport.client import OrchestratorClient
from prime_core.waiting import StoppedError, until_stopped
from prime_trainer.config import Settings
from prime_trainer.feed import PoolFacts, check_on_chain, insist, pool_facts, require_trainer

if TYPE_CHECKING:
    from prime_core.run import RunDefinition
    from prime_trainer.bucket import Bucket
    from prime_trainer.dryrun import Estimate
    from prime_trainer.publish import Publisher, TrainerOrigin

log = logging.getLogger(__name__)
KNOWN_RUN = "run.json"
"""File in the data folder, written once the orchestrator (and the chain) has answered for the first
time."""
FINISH_SECONDS = 30.0
"""Time for readers to finish their downloads once a policy is available elsewhere."""
LOOK_SECONDS = 2.0
_RELAYS = TypeAdapter(list[RelayInfo])


def unlock(settings: Settings) -> LocalSigner:
    """The trainer's key. Raises UserError without a wallet, or if the password is wrong."""
    return open_keystore(settings.need("wallet"), settings.password_file, settings.password_fd)


def known_facts(
    settings: Settings,
    client: OrchestratorClient,
    stop: threading.Event,
    give_up: float | None = None,
) -> PoolFacts:
    """Fetches the pool's facts, waiting for the orchestrator, and checks them on chain if
    configured.

    Raises UnavailableError if one of them does not answer for `give_up` seconds (None: waits).
    """
    facts = insist(
        lambda: pool_facts(client, settings.run), stop, "asking for the pool", give_up=give_up
    )
    if settings.pool is not None and settings.pool != facts.info.pool:
        raise UserError(
            f"the orchestrator serves pool {facts.info.pool}, not {settings.pool}",
            hint="name the right --orchestrator or --pool",
        )
    if settings.rpc:
        deployment = Deployment.load(settings.need("deployment"))
        insist(
            lambda: check_on_chain(facts, settings, deployment),
            stop,
            "asking the chain",
            give_up=give_up,
        )
    return facts


def bucket_of(settings: Settings, facts: PoolFacts) -> Bucket | None:
    """The bucket of the settings, tested, if they name one. Raises as `open_bucket` does."""
    if not settings.s3_bucket:
        if settings.s3_endpoint or settings.s3_public_url:
            raise UserError("an S3 server was given without a bucket", hint="add --s3-bucket")
        return None
    from prime_trainer.bucket import open_bucket
    from prime_trainer.publish import ORIGIN

    pools = facts.domain("pools")
    return open_bucket(
        settings.data / ORIGIN,
        bucket=settings.s3_bucket,
        place=f"{pools.chain_id}/{pools.contract}/{facts.info.pool}",
        endpoint=settings.s3_endpoint,
        region=settings.s3_region,
        public_url=settings.s3_public_url,
    )


def new_publisher(
    settings: Settings,
    facts: PoolFacts,
    signer: LocalSigner,
    client: OrchestratorClient,
    bucket: Bucket | None = None,
) -> Publisher:
    """The publisher over `<data>/origin`. Raises UserError if the settings would remove policies
    while files made by them can be accused, judged or appealed."""
    from prime_trainer.publish import Publisher

    if settings.policies_kept_days is not None:
        least = Deployment.load(settings.need("deployment")).periods.dispute_days
        if settings.policies_kept_days < least:
            raise UserError(
                f"policies_kept_days is {settings.policies_kept_days}: a file can be in dispute "
                "for longer after its policy is out of use",
                hint=f"policies_kept_days of {least} or more",
            )
    return Publisher(settings, facts, signer, client, bucket)


def new_origin(
    settings: Settings, root: Path, signer: LocalSigner, bucket: Bucket | None = None
) -> TrainerOrigin:
    """The origin over `root`, not yet serving."""
    from prime_broadcast.server import Limits, Serving
    from prime_trainer.publish import TrainerOrigin

    url = settings.need("orchestrator")
    serving = Serving(
        settings.origin_host,
        settings.origin_port,
        settings.origin_url or None,
        Limits(connections_per_address=settings.origin_connections_each),
    )
    return TrainerOrigin(root, serving, lambda: OrchestratorClient(url, signer, "relay"), bucket)


def run_trainer(settings: Settings, stop: threading.Event) -> None:
    """Runs this rank until `stop`, or for the configured number of steps. Raises PrimeError.

    User errors are detected before torch is loaded.
    """
    log_to_stderr(settings.log_level)
    tracing.start("trainer")
    url = settings.need("orchestrator")
    settings.need("model")
    leads = os.environ.get("RANK", "0") == "0"
    signer = unlock(settings) if leads else None
    make_folder(settings.data)
    known = settings.data / KNOWN_RUN
    give_up = settings.first_answer_seconds if leads and not known.exists() else None
    with ExitStack() as stack:
        if leads:  # two would overwrite checkpoints and sign two policies for a version
            stack.enter_context(held_alone(settings.data, "trainer"))
        client = stack.enter_context(
            OrchestratorClient(url, signer, "trainer", allow_private=settings.allow_private)
        )
        try:
            facts = known_facts(settings, client, stop, give_up)
        except StoppedError:
            return
        set_process_fields(pool=facts.info.pool)
        if signer is not None:
            require_trainer(facts, signer.address)
            write_whole(known, facts.run.raw())

        from prime_trainer.learner import make_learner
        from prime_trainer.observe import Observers
        from prime_trainer.parallel import joined_world
        from prime_trainer.publish import Publishing, write_address
        from prime_trainer.train import Trainer

        world = stack.enter_context(joined_world())
        learner = make_learner(facts.run, settings, world)
        publishing = None
        if signer is not None:
            bucket = bucket_of(settings, facts)
            publisher = new_publisher(settings, facts, signer, client, bucket)
            origin = new_origin(settings, publisher.root, signer, bucket)
            stack.enter_context(origin)
            write_address(settings.data, origin.url)
            print(f"origin: {origin.url}", flush=True)
            publishing = Publishing(publisher, origin)
        observers = stack.enter_context(Observers.of(settings, world.leads))
        Trainer(learner, facts, client, publishing, stop, observers).run()
        if settings.linger and publishing is not None and not stop.is_set():
            log.info("every wished batch is trained; serving policies until stopped")
            stop.wait()


def dry_run(settings: Settings) -> tuple[RunDefinition, Estimate]:
    """The run that would be trained, and the estimated cost of a batch. Writes nothing, opens no
    key, and contacts the orchestrator only if no run file is given."""
    from prime_core.run_file import read_run
    from prime_trainer.dryrun import cpu_peak, estimate, measured_prompt
    from prime_trainer.loading import require_model_folder
    from prime_trainer.observe import peak_flops

    require_model_folder(settings.need("model"))
    if settings.run is not None:
        definition = read_run(settings.run)
    else:
        with OrchestratorClient(settings.need("orchestrator"), None, "trainer") as client:
            definition = pool_facts(client, None).run
    import torch

    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    peak = peak_flops(settings, torch.cuda.get_device_name() if cuda else "cpu")
    if peak is None and not cuda:
        peak = cpu_peak()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        prompt = measured_prompt(definition, settings.need("model"))
    except PrimeError as error:
        log.warning("the prompts' length is only assumed: %s", error)
        prompt = None
    return definition, estimate(definition, settings, ranks=ranks, peak=peak, prompt=prompt)


def publish_by_hand(
    settings: Settings,
    model: Path,
    version: int,
    *,
    serve: bool = True,
    as_json: bool = False,
    stop: threading.Event | None = None,
) -> None:
    """Signs `model` as policy `version` and submits it to the orchestrator, then serves it until a
    relay or node is known to have all of it, or until `stop` (by default Ctrl-C or SIGTERM).
    Idempotent: the same folder gives the same policy, which is served again if no one has it.
    Raises UserError while a trainer publishes from the same folder."""
    signer = unlock(settings)
    make_folder(settings.data)
    with (
        held_alone(settings.data, "trainer"),
        OrchestratorClient(settings.need("orchestrator"), signer, "trainer") as client,
        ExitStack() as stack,
    ):
        facts = pool_facts(client, settings.run)
        require_trainer(facts, signer.address)
        bucket = bucket_of(settings, facts)
        publisher = new_publisher(settings, facts, signer, client, bucket)
        who = whole_at(client, version) if serve else None
        if who or not serve:
            publish_and_say(publisher, model, version, as_json)
            if bucket is not None and version not in bucket.versions:
                bucket.update()  # this process ends, so its bucket has to answer now
            if who:
                _say(f"{who} has all of policy {version} already: it is not served again")
            return
        origin = new_origin(settings, publisher.root, signer, bucket)
        stack.enter_context(origin)  # listening errors surface before anything is announced
        publish_and_say(publisher, model, version, as_json)
        origin.announce()
        stop = stop or until_stopped()
        _say(
            f"serving policy {version} at {origin.url} until a relay, or a node's heartbeat, says "
            "that it has all of it; Ctrl-C ends it"
        )
        if (who := wait_whole(client, version, stop)) is not None:
            _say(f"{who} has all of policy {version}; who still reads it here may finish")
            origin.stop(FINISH_SECONDS)
            return
    _say(
        f"no source is known to have all of policy {version} yet; `trainer run` with this --data "
        "serves it, and so does this command again"
    )


def publish_and_say(publisher: Publisher, model: Path, version: int, as_json: bool) -> None:
    """Publishes, with a progress bar on terminals, and prints the policy's digest, or all facts as
    JSON."""
    from prime_broadcast.bars import work_bar

    with work_bar(shown=not as_json):
        signed = publisher.publish(model, version)
    manifest = signed.manifest
    facts = {
        "version": version,
        "digest": manifest.digest(),
        "result_digest": manifest.result_digest,
        "bytes": sum(entry.size for entry in manifest.files),
        "deltas": {str(delta.base): delta.size for delta in manifest.deltas},
    }
    said = json.dumps(facts) if as_json else f"policy {version}: {facts['digest']}"
    print(said, flush=True)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def whole_at(
    client: OrchestratorClient, version: int, ended: Callable[[], bool] = lambda: False
) -> str | None:
    """A relay or node that has all of a published policy, in words; None if none is known, or once
    `ended` returns True. Raises PrimeError if the orchestrator does not answer."""
    reach = {of.version: len(of.after_ms) for of in client.get("/v1/status", Status).reach}
    if reach.get(version):
        return "a node"
    try:
        relays = _RELAYS.validate_json(client.request("GET", "/v1/relays", b"", signed=False))
    except ValidationError as error:
        raise MalformedError("the orchestrator's list of relays does not parse") from error
    for relay in relays:
        if not ended() and version in relay.versions and _says_whole(relay.url, version):
            return f"the relay {relay.url}"
    return None


def wait_whole(client: OrchestratorClient, version: int, stop: threading.Event) -> str | None:
    """Waits until `whole_at` finds one, and returns it; None if `stop` is set first."""
    trouble = ""
    while True:
        try:
            if (who := whole_at(client, version, stop.is_set)) is not None:
                return who
            trouble = ""
        except PrimeError as error:
            if str(error) != trouble:
                trouble = str(error)
                log.warning("cannot ask who has policy %d: %s", version, error)
        if stop.wait(LOOK_SECONDS):
            return None


def _says_whole(url: str, version: int) -> bool:
    """Whether a relay claims to have the version. Origins do not count: they have what they
    publish, and this may be our own."""
    try:
        link = Link(url)
        try:
            health = link.health()
        finally:
            link.close()
    except (TransferError, ValueError):  # unreachable, or an invalid address
        return False
    complete = health.get("complete")
    return health.get("role") == "relay" and isinstance(complete, list) and version in complete
