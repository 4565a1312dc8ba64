"""Ranks that may not all be there, and meet through the store alone: every wait has an end and says who is missing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from ptcollect.doctor.facts import Facts
from ptcollect.doctor.finding import Finding, ranks
from ptcollect.doctor.launch import Launch, LaunchError

POLL_SECONDS = 0.02
GRACE_SECONDS = 2.0  # for what is as good as done


@dataclass
class Report:
    """What one rank found on the network; travels to rank 0 as JSON."""

    findings: list[Finding] = field(default_factory=list)
    broken_pairs: dict[str, str] = field(default_factory=dict)
    """``"low-high"`` -> what failed between these two ranks."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What was timed."""
    pairs: dict[str, dict[str, float]] = field(default_factory=dict)
    """``"low-high"`` -> seconds of a small round trip, and of 1 MiB both ways."""


@dataclass(frozen=True)
class Meeting:
    """One rank's place in it."""

    store: Any  # a torch.distributed.Store
    launch: Launch
    timeout: float
    """Seconds that one step waits."""

    def arrive(self, facts: Facts) -> None:
        """Be counted, whatever rank this process takes itself for."""
        number = self.store.add("arrivals", 1)
        self.store.set(f"arrival/{number}", json.dumps(asdict(facts)))

    def roll_call(self) -> list[Facts]:
        """All that arrive within the timeout; as soon as every rank is there, or something is wrong.

        Expected are as many as the largest world that anybody speaks of.
        """
        deadline = time.monotonic() + self.timeout
        everyone: list[Facts] = []
        while True:
            while len(everyone) < self.store.add("arrivals", 0):
                key = f"arrival/{len(everyone) + 1}"
                self.store.wait([key], timedelta(seconds=GRACE_SECONDS))
                everyone.append(Facts(**json.loads(self.store.get(key))))
            present = {each.rank for each in everyone}
            complete = present.issuperset(range(max((each.world_size for each in everyone), default=1)))
            wrong = len({each.world_size for each in everyone}) > 1 or len(present) < len(everyone)
            if complete or time.monotonic() > deadline:
                return everyone
            if wrong:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            time.sleep(POLL_SECONDS)

    def decide(self, go: bool) -> None:
        """Rank 0 tells the others whether it makes sense to go on."""
        self.store.set("decision", "go" if go else "stop")

    def decision(self) -> bool:
        """What rank 0 decided.

        Raises:
            LaunchError: it never came.
        """
        if not self._comes("decision", 2 * self.timeout + GRACE_SECONDS):
            what = f"rank 0 never came; rank {self.launch.rank} waited {2 * self.timeout + GRACE_SECONDS:.0f} s"
            fix = "rank 0 was not started or has ended early: look at its own output"
            raise LaunchError(Finding("ranks", "failed", what, fix, fatal=True))
        return bool(self.store.get("decision") == b"go")

    def together(self, name: str, within: float) -> bool:
        """Wait until every rank calls this with the same name; whether all did in time."""
        if self.store.add(f"together/{name}", 1) == self.launch.world_size:
            self.store.set(f"together/{name}/all", "")
        return self._comes(f"together/{name}/all", within)

    def at(self, step: str) -> None:
        """Leave word of what this rank is about to do."""
        self.store.set(f"at/{self.launch.rank}", step)

    def report(self, report: Report) -> None:
        """Hand in what this rank found."""
        self.store.set(f"report/{self.launch.rank}", json.dumps(asdict(report)))

    def reports(self, within: float) -> tuple[dict[int, Report], list[Finding]]:
        """All reports by rank, and a finding for those that do not come in time."""
        deadline = time.monotonic() + within
        come: dict[int, Report] = {}
        for rank in range(self.launch.world_size):
            if self._comes(f"report/{rank}", max(POLL_SECONDS, deadline - time.monotonic())):
                content = json.loads(self.store.get(f"report/{rank}"))
                findings = [Finding(**each) for each in content.pop("findings")]
                come[rank] = Report(findings, **content)
        silent = [rank for rank in range(self.launch.world_size) if rank not in come]
        return come, [self._silent(rank) for rank in silent]

    def _silent(self, rank: int) -> Finding:
        step = self.store.get(f"at/{rank}").decode() if self.store.check([f"at/{rank}"]) else "nothing yet"
        what = f"{ranks([rank])} never reported back; the last it began: {step}"
        return Finding(step, "failed", what, "it died or hangs there: look at its own output", fatal=True)

    def dismiss(self, code: int) -> None:
        """Rank 0 tells the others how it ends, and hosts the store until they have heard it."""
        self.store.set("code", str(code))
        deadline = time.monotonic() + GRACE_SECONDS
        others = self.store.add("arrivals", 0) - 1
        while self.store.add("left", 0) < others and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def dismissed(self, within: float) -> int:
        """How rank 0 ends; 1 if it does not say."""
        if not self._comes("code", within):
            return 1
        code = int(self.store.get("code"))
        self.store.add("left", 1)
        return code

    def below(self, name: str) -> PrefixStore:
        """A store of its own for a process group."""
        return PrefixStore(name, self.store)

    def _comes(self, key: str, within: float) -> bool:
        """Whether a key is there in time."""
        return _soon(lambda: self.store.wait([key], timedelta(seconds=within)))


def _soon(wait: Callable[[], Any]) -> bool:
    try:
        wait()
    except RuntimeError:  # DistStoreError: timed out, or its host is gone
        return False
    return True


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Each finding once, in order of first appearance."""
    return list(dict.fromkeys(findings))
