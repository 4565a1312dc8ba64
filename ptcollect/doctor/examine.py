"""The whole examination, from one rank's point of view."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from ptcollect.doctor.agreement import CHECKS, alone
from ptcollect.doctor.facts import Facts
from ptcollect.doctor.finding import Finding
from ptcollect.doctor.launch import Launch, connect
from ptcollect.doctor.meeting import POLL_SECONDS, Meeting, Report, merged
from ptcollect.doctor.network import LARGE, check_group, check_pairs

STEPS = 8  # how many timeouts an examination can last at most, if everything that can hang does


@dataclass(frozen=True)
class Examination:
    """What rank 0 knows in the end."""

    findings: list[Finding]
    facts: list[Facts] = field(default_factory=list)
    reports: dict[int, Report] = field(default_factory=dict)

    @property
    def code(self) -> int:
        """The exit code: 1 if any check failed."""
        return int(any(finding.bad for finding in self.findings))


def examine(launch: Launch, facts: Facts, timeout: float) -> tuple[Meeting, Examination | None]:
    """Run all checks; all ranks call this. Only rank 0 is given the result, and then owes the others `Meeting.dismiss`.

    Raises:
        LaunchError: this rank cannot reach the others.
    """
    meeting = Meeting(connect(launch, timeout), launch, timeout)
    meeting.arrive(facts)
    if launch.rank != 0:
        if meeting.decision():
            meeting.report(_network(meeting))
        return meeting, None
    everyone = sorted(meeting.roll_call(), key=lambda each: each.rank)
    findings = [finding for check in CHECKS for finding in check(everyone)]
    if launch.alone:
        findings.insert(0, alone())
    go = not any(finding.fatal for finding in findings)
    meeting.decide(go)
    if not go:
        return meeting, Examination(findings, everyone)
    meeting.report(_network(meeting))
    reports, silent = meeting.reports(timeout)
    return meeting, Examination([*findings, *silent, *_summary(everyone, reports)], everyone, reports)


def _network(meeting: Meeting) -> Report:
    report = Report()
    meeting.at("pairs")
    check_pairs(meeting, report)
    well = not report.broken_pairs and not report.findings
    # A rank that knows already that something is wrong is counted, and waits for nobody.
    if meeting.together("after pairs", meeting.timeout if well else POLL_SECONDS) and not meeting.store.add(
        "broken", 0
    ):
        check_group(meeting, report)
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    return report


def _summary(facts: Sequence[Facts], reports: dict[int, Report]) -> list[Finding]:
    """What the ranks found on the network, in one line a subject."""
    findings = _pairs(facts, reports)
    failures = merged([finding for report in reports.values() for finding in report.findings])
    timed = [
        _timed("group", "made in {group:.0f} ms", reports),
        _timed("all_reduce", "first {first all_reduce:.1f} ms, second {second all_reduce:.1f} ms", reports),
        _timed("ring_reduce", "first {first ring_reduce:.1f} ms, second {second ring_reduce:.1f} ms", reports),
    ]
    return [*findings, *failures, *[finding for finding in timed if finding]]


def _pairs(facts: Sequence[Facts], reports: dict[int, Report]) -> list[Finding]:
    bound = {each.rank: each.bound for each in facts}
    findings = []
    broken = {pair: why for report in reports.values() for pair, why in report.broken_pairs.items()}
    for pair, why in sorted(broken.items()):
        low, high = map(int, pair.split("-"))
        what = f"ranks {low} and {high} ({bound[low]} and {bound[high]}): {why}"
        fix = (
            "a firewall or no route between these two (ports are picked at random: open all between the hosts), or "
            "interfaces in different networks: set GLOO_SOCKET_IFNAME to one that both share"
        )
        findings.append(Finding("pairs", "failed", what, fix))
    good = {pair: times for report in reports.values() for pair, times in report.pairs.items() if pair not in broken}
    if good and not broken:
        latency, at = max((times["small"] / 2, pair) for pair, times in good.items())
        large, slowest = max((times["large"] / 2, pair) for pair, times in good.items())
        what = (
            f"all {len(good)} can talk both ways; slowest: {latency * 1e6:.0f} us to send {8} bytes ({at}), "
            f"{LARGE / large / 1e6:.0f} MB/s at 1 MiB ({slowest})"
        )
        findings.append(Finding("pairs", "ok", what))
    return findings


def _timed(name: str, text: str, reports: dict[int, Report]) -> Finding | None:
    """The slowest rank's times; None if some rank has none."""
    steps = [part.partition(":")[0] for part in text.split("{")[1:]]
    if not all(step in report.seconds for step in steps for report in reports.values()):
        return None
    slowest = {step: max(report.seconds[step] for report in reports.values()) * 1e3 for step in steps}
    return Finding(name, "ok", text.format_map(slowest) + ("; the values are right" if name != "group" else ""))
