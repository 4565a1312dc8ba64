"""Checks of what all ranks say about themselves; they need no network beyond the store, and run on rank 0."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ptcollect.doctor.facts import Facts
from ptcollect.doctor.finding import Finding, ranks
from ptcollect.doctor.launch import HOW_TO_LAUNCH


def world(facts: Sequence[Facts]) -> list[Finding]:
    """Every rank from 0 on is here, once, and all mean the same world."""
    name = "ranks"
    findings: list[Finding] = []
    sizes = Counter(each.world_size for each in facts)
    size = max(sizes)
    if len(sizes) > 1:
        said = "; ".join(f"{ranks(_who(facts, 'world_size', n))} with WORLD_SIZE={n}" for n in sorted(sizes))
        findings.append(
            Finding(name, "failed", said, "WORLD_SIZE must be hosts x processes per host on every rank", fatal=True)
        )
    counted = Counter(each.rank for each in facts)
    twice = [rank for rank, times in counted.items() if times > 1]
    if twice:
        hosts = ", ".join(sorted({each.host for each in facts if each.rank in twice}))
        what = f"{ranks(twice)} came more than once (from {hosts})"
        findings.append(
            Finding(name, "failed", what, "two processes have the same RANK: let torchrun number them", fatal=True)
        )
    missing = [rank for rank in range(size) if rank not in counted]
    if missing:
        what = f"{ranks(missing)} of {size} never came; {ranks(counted)} did"
        fix = (
            "not started, ended early (look at its own output), or it was given another MASTER_ADDR or MASTER_PORT; or "
            "WORLD_SIZE is too large"
        )
        findings.append(Finding(name, "failed", what, fix, fatal=True))
    machines = len({each.machine for each in facts})
    where = f"{machines} hosts" if machines > 1 else "one host"
    return findings or [Finding(name, "ok", f"{size} of {size} came, on {where}, and agree on the world")]


def versions(facts: Sequence[Facts]) -> list[Finding]:
    """The same python (to the minor), torch and ptcollect everywhere."""
    findings = []
    for package in ("python", "torch", "ptcollect"):
        groups = defaultdict(list)
        for each in facts:
            version = str(getattr(each, package))
            groups[".".join(version.split(".")[:2]) if package == "python" else version].append(each.rank)
        if len(groups) > 1:
            said = ", ".join(f"{version} on {ranks(group)}" for version, group in groups.items())
            fix = f"install one version of {package} on all hosts; which one is used: python -m ptcollect doctor there"
            findings.append(Finding("versions", "failed", f"{package} {said}", fix))
    first = facts[0]
    same = f"python {first.python}, torch {first.torch}, ptcollect {first.ptcollect} on all ranks"
    return findings or [Finding("versions", "ok", same)]


def backends(facts: Sequence[Facts]) -> list[Finding]:
    """Every rank's torch has gloo, which ptcollect needs beside any other backend, and all have the same others."""
    without = [each.rank for each in facts if "gloo" not in each.backends]
    if without:
        fix = "this build of torch lacks gloo (USE_GLOO=0): install one from pytorch.org"
        return [Finding("backends", "failed", f"no gloo on {ranks(without)}", fix, fatal=True)]
    kinds = {tuple(each.backends) for each in facts}
    if len(kinds) > 1:
        said = "; ".join(f"{', '.join(k)} on {ranks(r.rank for r in facts if tuple(r.backends) == k)}" for k in kinds)
        return [Finding("backends", "warning", said, "different builds of torch: install the same one on all hosts")]
    return [Finding("backends", "ok", f"{', '.join(facts[0].backends)} on all ranks")]


def interfaces(facts: Sequence[Facts]) -> list[Finding]:
    """Gloo will listen where the other ranks can reach it."""
    findings = []
    several = len({each.network for each in facts}) > 1
    for (chosen, host, bound), group in _grouped(facts, lambda each: (each.chosen, each.host, each.bound)).items():
        one = group[0]
        who = f"{ranks(each.rank for each in group)} on {host}"
        usable = [name for name, at in one.interfaces.items() if at and not _loopback(at)]
        export = f"export GLOO_SOCKET_IFNAME={'|'.join(usable) or 'NAME'} there"
        unknown = [name for name in chosen.split(",") if name and name not in one.interfaces]
        if unknown:
            what = f"{who}: GLOO_SOCKET_IFNAME={chosen}, and there is no interface {', '.join(unknown)}"
            fix = f"the interfaces are {', '.join(one.interfaces)}; {export}"
            findings.append(Finding("interfaces", "failed", what, fix, fatal=True))
        elif chosen and not bound:
            what = f"{who}: interface {chosen} has no IPv4 address"
            findings.append(Finding("interfaces", "warning", what, f"it may be down (ip addr show {chosen}); {export}"))
        elif several and _loopback(bound):
            cause = f"GLOO_SOCKET_IFNAME={chosen}" if chosen else f"the name {host} stands for {bound} in /etc/hosts"
            if not chosen and not one.resolved:
                cause = f"the name {host} stands for no address"
            what = f"{who}: gloo would listen on {bound}, which other hosts cannot reach ({cause})"
            findings.append(Finding("interfaces", "failed", what, export, fatal=True))
    used = sorted({each.bound for each in facts})
    shared = "" if several else "; all ranks share one network"
    if not several and all(_loopback(address) for address in used):
        shared += ", across hosts it must be another one: GLOO_SOCKET_IFNAME"
    return findings or [Finding("interfaces", "ok", f"gloo listens on {', '.join(used)}{shared}")]


def threads(facts: Sequence[Facts]) -> list[Finding]:
    """The threads of all ranks on a host fit on its cores."""
    findings = []
    for group in _grouped(facts, lambda each: each.machine).values():
        wanted, cores, host = sum(each.threads for each in group), max(each.cores for each in group), group[0].host
        if wanted <= cores:
            continue
        said = f"{host}: {len(group)} ranks with {wanted} threads on {cores} cores"
        fair = max(1, cores // len(group))
        fix = f"OMP_NUM_THREADS={fair}; torch takes all cores in every rank where it is not set"
        if all(each.threads == 1 for each in group):
            fix = "fewer ranks on this host: they take turns on its cores, and each collective waits for the slowest"
        findings.append(Finding("threads", "warning", said, fix))
    most = max(each.threads for each in facts)
    return findings or [Finding("threads", "ok", f"at most {most} a rank, and they fit on the cores of every host")]


CHECKS: tuple[Callable[[Sequence[Facts]], list[Finding]], ...] = (world, versions, backends, interfaces, threads)
"""In the order in which they are reported."""


def alone() -> Finding:
    """Nobody launched this process."""
    what = "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: one process, checked by itself"
    return Finding("environment", "warning", what, HOW_TO_LAUNCH)


def _who(facts: Sequence[Facts], field: str, value: object) -> list[int]:
    return [each.rank for each in facts if getattr(each, field) == value]


def _grouped(facts: Sequence[Facts], key: Callable[[Facts], Any]) -> dict[Any, list[Facts]]:
    groups: dict[Any, list[Facts]] = {}
    for each in facts:
        groups.setdefault(key(each), []).append(each)
    return groups


def _loopback(address: str) -> bool:
    return address.startswith("127.")
