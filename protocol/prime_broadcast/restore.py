"""The files of any version that an origin has on its own disk, thinned out or not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from prime_broadcast import delta as deltas
from prime_broadcast import layout
from prime_broadcast.plans import plan_from_anchor
from prime_core.errors import UnavailableError


def write_files(root: Path, version: int, target: Path) -> None:
    """Writes the files of `version` into the folder `target`: copies, or made from the nearest
    anchor and deltas. Raises UnavailableError if neither is there, UntrustedError if what comes of
    it is not the published version; `target` is then to be thrown away."""
    manifest = layout.manifest_of(root, version).manifest
    if not layout.is_thin(root, version):
        folder = layout.version_folder(root, version)
        for entry in manifest.files:
            shutil.copyfile(folder / entry.name, target / entry.name)
        return
    known = {v: layout.manifest_of(root, v).manifest for v in layout.versions(root) if v <= version}
    thin = [v for v in known if layout.is_thin(root, v)]
    plan = plan_from_anchor(manifest, known, thin)
    if plan is None or plan.anchor is None:
        raise UnavailableError(f"no chain of deltas in {root} leads to policy {version}")
    folder, base = layout.version_folder(root, plan.anchor.version), plan.anchor
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=target.parent) as scratch:
        for number, hop in enumerate(plan.hops):
            last = number == len(plan.hops) - 1
            into = target if last else Path(scratch) / str(hop.target.version)
            into.mkdir(exist_ok=True)
            name = f"delta-{hop.entry.base}"
            path = layout.version_folder(root, hop.target.version) / name
            deltas.apply(folder, base, path, hop.target, into)
            if folder.parent == Path(scratch):
                shutil.rmtree(folder)
            folder, base = into, hop.target
