"""A running experiment: who is answered by which arm, outcomes, and the guard that stops the worse arm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.core.console import notice
from headway.serve.asking import RefusedRequest
from headway.serve.experiment.journal import LATE_SECONDS, Decision, Journal, Outcome, Plan
from headway.serve.experiment.split import Names

#: Where clients post outcomes.
PATH = "/v1/outcomes"
#: Outcomes between two times that old requests are forgotten.
_FORGET_EVERY = 10_000


class Experiment:
    """An experiment between two arms.

    Args:
        plan: What it is about.
        folder: Where it is kept.
        clock: Gives the time in seconds since 1970.

    Raises:
        ConfigError, CheckpointError: as `Journal`.
    """

    def __init__(self, plan: Plan, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._plan = plan
        self._clock = clock
        self._journal = Journal(folder)
        self._journal.begin(plan, clock())
        self._names = Names(self._journal.key)
        self._lock = asyncio.Lock()

    @property
    def decision(self) -> Decision | None:
        """Which arm was stopped; None as long as both answer."""
        return self._journal.state.decision

    def arms(self) -> list[str]:
        """Return the aliases that answer."""
        if self.decision is not None:
            return [self._plan.split.arms[self.decision.winner]]
        return list(self._plan.split.arms)

    def choose(self, user: str | None) -> tuple[str, str]:
        """Return the alias that answers a user, and the identifier of the request."""
        arm = self._plan.split.arm_of(self._plan.model, user)
        if self.decision is not None:
            arm = self.decision.winner
        return self._plan.split.arms[arm], self._names.make(self._clock(), arm, user)

    async def note_version(self, alias: str, version: str) -> None:
        """Note the version that an alias answers with; another one begins the test anew.

        Raises:
            OSError: it cannot be written.
        """
        arm = self._plan.split.arms.index(alias)
        async with self._lock:
            if self._journal.state.version(arm) != version:
                values = {"time": self._clock(), "arm": arm, "version": version}
                await asyncio.to_thread(self._journal.append, "version", **values)

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take the outcome of a request, once.

        Raises:
            RefusedRequest: the request is not known, its outcome is there already, or it comes too late.
        """
        if set(body) != {"request_id", "success"}:
            raise RefusedRequest("an outcome has a 'request_id' and a 'success'", code="invalid_value")
        name = body["request_id"]
        success = body["success"]
        if type(success) is not bool:
            raise RefusedRequest("'success' must be true or false", param="success", code="invalid_value")
        asked = self._names.read(name) if isinstance(name, str) else None
        if asked is None:
            raise RefusedRequest(
                "no request of this experiment has that identifier", 404, param="request_id", code="unknown_request"
            )
        # The time and chance of a request identify it; its proof need not be kept.
        request = name.removeprefix("chat").removeprefix("cmpl-")[:45]
        async with self._lock:
            now = self._clock()
            state = self._journal.state
            if now - asked.time > LATE_SECONDS:
                raise RefusedRequest("outcomes are taken for a week", 410, param="request_id", code="too_late")
            if request in state.seen:
                raise RefusedRequest("the request has an outcome", 409, param="request_id", code="already_posted")
            outcome = Outcome(request, asked.time, asked.arm, asked.unit, success, now)
            counts = state.counts(outcome)
            await self._append("outcome", **asdict(outcome))
            if len(state.seen) % _FORGET_EVERY == 0:
                state.forget(now)
            if counts:
                await self._guard(now)
        decision = self.decision
        return {
            "request_id": name,
            "arm": self._plan.split.arms[asked.arm],
            "counted": counts,
            "winner": None if decision is None else self._plan.split.arms[decision.winner],
        }

    async def _guard(self, now: float) -> None:
        """Stop the worse arm once the test says which one that is."""
        one, other = self._journal.state.counted
        test = self._plan.test
        loser = test.worse(one, other)
        if loser is None:
            return
        counts = [asdict(one), asdict(other)]
        evidence = test.evidence(one, other)
        await self._append("decision", time=now, winner=1 - loser, loser=loser, evidence=evidence, counts=counts)
        arms = self._plan.split.arms
        notice(f"{arms[loser]} is worse than {arms[1 - loser]}, which answers every request from now on")

    async def _append(self, kind: str, **values: Any) -> None:
        try:
            await asyncio.to_thread(self._journal.append, kind, **values)
        except OSError as error:
            raise RefusedRequest(f"the outcome cannot be kept: {error.strerror}", 503, retry_seconds=10) from None

    def close(self) -> None:
        """Leave the folder to another server."""
        self._journal.close()
