"""Environments by name: the built-in ones, and plugins under the entry point below."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points

from prime_core.errors import PolicyError, PrimeError, UserError
from prime_core.ids import Digest
from prime_core.plugins import loaded
from prime_core.run import (
    Conversation,
    EnvironmentPart,
    EnvironmentRef,
    LengthBudgets,
    RunDefinition,
)
from prime_envs import environments
from prime_envs.base import OF_THIS_MACHINE, Environment
from prime_envs.mixture import Mixture
from prime_envs.tools import load_tools

ENTRY_POINT_GROUP = "prime_open.environments"
"""Plugins register their Environment class here, e.g. `mytask = "my_package:MyTask"`."""

BUILT_IN = {
    module.name: f"{environments.__name__}.{module.name}"
    for module in pkgutil.iter_modules(environments.__path__)
}
"""Name → module with the Environment of that name; a file in `environments/` adds itself. Also
MIXTURE, which is made of others."""


def environment_class(name: str) -> type[Environment]:
    """The class registered under `name`. Raises UserError if there is none, or it is a plugin that
    cannot be loaded."""
    if name in BUILT_IN:
        return _named(name, BUILT_IN[name])
    found = entry_points(group=ENTRY_POINT_GROUP, name=name)
    if not found:
        known = sorted({*BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names})
        raise UserError(
            f"There is no environment {name!r} here; known are {', '.join(known)}.",
            hint="Install the plugin that provides it, in every program of this run.",
        )
    plugin = loaded(next(iter(found)))
    if not (isinstance(plugin, type) and issubclass(plugin, Environment)):
        raise UserError(f"The plugin registered as {name!r} is not an Environment class.")
    return plugin


def _named(name: str, module: str) -> type[Environment]:
    """The Environment called `name` in a module. Raises LookupError if it has none."""
    for found in vars(import_module(module)).values():
        if isinstance(found, type) and issubclass(found, Environment):
            known = getattr(found, "name", None)  # an abstract class has none
            if known == name:
                return found
    raise LookupError(f"{module} defines no Environment with the name {name!r}")


def load_environment(
    name: str,
    arguments: Mapping[str, int | str],
    budgets: LengthBudgets,
    parts: Sequence[EnvironmentPart] = (),
) -> Environment:
    """The environment `name` with its arguments, or the mixture of `parts`. Raises UserError on an
    unknown name or value, if the code of a plugin raises, and if two parts are the same: what one
    trains on, the other holds out.
    """
    if not parts:
        return _made(name, arguments, budgets)
    members: list[tuple[str, int, Environment]] = []
    try:
        for part in parts:
            found = load_environment(part.name, part.arguments, budgets)
            members.append((part.title, part.weight, found))
        seen: dict[Digest, str] = {}
        for title, _, environment in members:
            first = seen.setdefault(environment.digest(), title)
            if first != title:
                raise UserError(
                    f"the parts {first!r} and {title!r} have the same problems",
                    hint="name the environment once, with the sum of the weights",
                )
    except PrimeError:
        for _, _, environment in members:
            environment.close()
        raise
    return Mixture(members, budgets)


def _made(name: str, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> Environment:
    made = environment_class(name)
    plugin = name not in BUILT_IN
    try:
        environment = made(arguments, budgets)
    except OF_THIS_MACHINE:
        raise
    except Exception as error:
        if not plugin:
            raise
        raise UserError(
            f"the environment {name!r} cannot be made with the arguments {dict(arguments)}: "
            f"{error!r}",
            hint="correct environment.arguments, or the plugin that provides it",
        ) from error
    environment.plugin = environment.plugin or plugin
    return environment


def environment_for(run: RunDefinition) -> Environment:
    """The run's environment, with the run's chat format.

    Raises PolicyError unless its digest is the one that the run pins.
    """
    ref = run.environment
    environment = load_environment(ref.name, ref.arguments, run.budgets, ref.parts)
    if environment.digest() != ref.digest:
        raise PolicyError(
            f"The environment {ref.name!r} installed here has digest {environment.digest()}, "
            f"but the run pins {ref.digest}: install the version that the run names."
        )
    if ref.train_size + ref.heldout_size > len(environment):
        raise PolicyError(
            f"The run wants {ref.train_size} + {ref.heldout_size} problems; "
            f"{ref.name!r} has {len(environment)}."
        )
    environment.require(run.conversation)
    index = None if run.conversation is None else load_tools(run.conversation)
    for member in environment.members():
        member.chat, member.conversation, member.index = run.chat, run.conversation, index
    return environment


def environment_ref(
    name: str,
    arguments: Mapping[str, int | str],
    budgets: LengthBudgets,
    *,
    train_size: int,
    heldout_size: int,
    conversation: Conversation | None = None,
    parts: Sequence[EnvironmentPart] = (),
) -> EnvironmentRef:
    """A reference to the installed environment, with its digest, for a new run definition with
    these conversation settings. Raises UserError if they do not go together."""
    environment = load_environment(name, arguments, budgets, parts)
    environment.require(conversation)
    return EnvironmentRef(
        name=name,
        arguments=dict(arguments),
        parts=tuple(parts),
        digest=environment.digest(),
        train_size=train_size,
        heldout_size=heldout_size,
    )
