"""Checkpoints of workers whose machines share no disk: the remote tier is where they meet.

The first machine has every checkpoint whole, and the tier what has been published. At the start of an attempt, and when
the run rolls back, the first worker publishes the checkpoint to continue from, and one worker of every other machine
fetches it. Then all load it as from a common folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from headway.checkpoint.discovery import bring_same
from headway.checkpoint.remote.open import place_settings
from headway.checkpoint.remote.ownership import Claim
from headway.checkpoint.remote.relay import Relay
from headway.checkpoint.remote.tier import journal_of
from headway.checkpoint.remote_copies import TierAccess
from headway.checkpoint.run_identity import RunIdentity, run_identity
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.core.code_identity import compare
from headway.core.console import warning
from headway.core.coordination.launched import OWN_DISKS_VARIABLE
from headway.core.errors import DataError
from headway.core.machine.system import host_name
from headway.core.process.waiting import VISIBILITY_TIMEOUT
from headway.parallel.world import World
from headway.run.session.checks import may_differ, short_identity
from headway.run.session.joined import Joined


@dataclass(frozen=True)
class CheckpointAccess:
    """How the workers of an attempt get at a checkpoint that the first worker has chosen.

    Args:
        store: The checkpoints on this machine.
        world: The workers.
        relay: The remote tier between machines; None if all see one folder.
    """

    store: CheckpointStore
    world: World
    relay: Relay | None = None

    @classmethod
    def agree(cls, joined: Joined) -> CheckpointAccess:
        """Find out whether machines share the run's folder, and exchange what they need if not; all workers call it.

        Raises:
            CheckpointError: The remote tier cannot be reached.
            DataError: The data or the code of a machine differ from the first worker's.
        """
        config = joined.config
        store = joined.store
        world = joined.world
        attempt = joined.attempt
        fingerprints = joined.task.fingerprints
        code = joined.code_with_loss
        if OWN_DISKS_VARIABLE not in os.environ:
            return cls(store, world)
        check_same_data(world, {kind: value for kind, value in fingerprints.items() if kind not in code})
        check_same_code(world, code)
        remote = config.checkpoint.remote
        assert remote is not None, "the lead refuses machines without a common disk that have no remote tier"
        settings = place_settings(remote)
        mine: list[object] = []
        if world.is_first:
            identity = run_identity(config, fingerprints.get("data"))
            tier = TierAccess(attempt.run, settings, identity, attempt.number).open()
            assert tier.claim is not None and tier.identity is not None, "it is open for writing"
            mine = [asdict(tier.claim), tier.identity.settings()]
        claim, found = world.gather_json(mine)[0]
        identity = RunIdentity(attempt.run, **found)
        return cls(store, world, Relay(attempt.run, settings, Claim(**claim), identity, config.parallel.workers))

    def info(self, step: int) -> CheckpointInfo:
        """Return a checkpoint that the first worker has; all workers call it together.

        Raises:
            CheckpointError: It cannot be published or fetched.
        """
        if self.relay is None:
            return self.store.info(step, VISIBILITY_TIMEOUT)
        world = self.world
        mine = None
        if world.is_first:
            found = self.store.info(step)
            self.relay.open().publish(found.path, journal_of(self.relay.run, step))
            mine = found.state_sha256
        state_sha256 = world.gather_json(mine)[0]
        if world.local_rank == 0 and not world.is_first:
            bring_same(self.store, self.relay.open(), step, state_sha256)
        world.barrier()
        return self.store.info(step)


def check_same_data(world: World, fingerprints: Mapping[str, str]) -> None:
    """Raise an error if a machine trains on other data than the first worker; all workers call it together.

    Raises:
        DataError: The data, the tokenizer or the pretrained model of a machine differ.
    """
    everyone = world.gather_json({"host": host_name(), "fingerprints": dict(fingerprints)})
    for other in everyone:
        for kind, value in everyone[0]["fingerprints"].items():
            if (there := other["fingerprints"].get(kind)) != value:
                raise DataError(
                    f"the {kind} fingerprint of {other['host']} is {str(there)[:12]}, and that of"
                    f" {everyone[0]['host']} is {value[:12]}",
                    where="data.store",
                    fix="give all machines the same store: copy it, or set data.remote to one that all of them read",
                )


def check_same_code(world: World, code: Mapping[str, str]) -> None:
    """Raise an error if a machine has other code of the user than the first worker; all workers call it together.

    What may differ between two attempts of a run may also differ between its machines. That is reported.

    Raises:
        DataError: The code of a machine differs.
    """
    first, *others = world.gather_json({"host": host_name(), "code": dict(code)})
    for other in others:
        for key in {**first["code"], **other["code"]}:
            ours = first["code"].get(key, "")
            theirs = other["code"].get(key, "")
            found = compare(ours, theirs)
            if found == "same":
                continue
            what = (
                f"the code of {key} on {other['host']} is {short_identity(theirs) or 'none'}, and that on"
                f" {first['host']} is {short_identity(ours) or 'none'}"
            )
            if found == "another Python" or may_differ(key):
                if world.is_first:
                    warning(f"{what}; the run continues")
                continue
            raise DataError(what, where=key, fix="give all machines the same code, and start again")
