"""`python -m ptcollect doctor`: checks a launch before training."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ptcollect.commands.deadline import ends_after
from ptcollect.doctor.examine import STEPS, Examination, examine
from ptcollect.doctor.facts import gather_facts
from ptcollect.doctor.finding import Finding
from ptcollect.doctor.launch import LaunchError, read_launch

RESULTS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failed": "[bold red]FAILED[/bold red]"}
LAST_WORD_SECONDS = 3.0


def doctor(
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that each step waits for other ranks.")] = 20.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write everything found to FILE (rank 0).")
    ] = None,
) -> None:
    """Check a launch before training: run it with the launcher and the environment that training will have.

    torchrun --nproc-per-node 4 -m ptcollect doctor

    Looks at the environment, who came, versions, backends, interfaces and threads on all ranks; sends between every two
    ranks; times the first collectives; and makes a call of ptcollect. Rank 0 prints one table. The exit code is 1 if
    any check failed. Alone, without a launcher, it checks what one process can.
    """
    rank = os.environ.get("RANK", "0")
    try:
        launch = read_launch(os.environ)
        with ends_after(STEPS * timeout + 10, f"doctor: rank {launch.rank}"):
            meeting, examination = examine(launch, gather_facts(launch, os.environ), timeout)
    except LaunchError as error:
        _end_apart(rank, error, json_file)
    if examination is None:
        raise typer.Exit(meeting.dismissed(STEPS * timeout))
    _show(examination)
    if json_file:
        json_file.write_text(_as_json(examination))
    meeting.dismiss(examination.code)
    raise typer.Exit(examination.code)


def _end_apart(rank: str, error: LaunchError, json_file: Path | None) -> None:
    """This rank cannot reach the others, so nobody else can say so."""
    if rank == "0":
        _show(Examination([error.finding]))
        if json_file:
            json_file.write_text(_as_json(Examination([error.finding])))
    else:
        sys.stderr.write(f"doctor: {error}\n")
        sys.stderr.flush()
        time.sleep(LAST_WORD_SECONDS)  # torchrun ends all ranks of a host with the first that fails: let them report
    raise typer.Exit(1)


def _show(examination: Examination) -> None:
    """The table, and below it what to do."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("check", "", "found"):
        table.add_column(heading, overflow="fold")
    for finding in examination.findings:
        table.add_row(escape(finding.check), RESULTS[finding.level], escape(finding.what))
    console.print(table)
    to_do = [finding for finding in examination.findings if finding.fix]
    if to_do:
        console.print("\n[bold]what to do[/bold]")
    for finding in to_do:
        console.print(f"{RESULTS[finding.level]} {escape(finding.check)}: {escape(finding.fix)}", soft_wrap=True)
    console.print(f"\n{_verdict(examination.findings)}")


def _verdict(findings: list[Finding]) -> str:
    failed = sum(finding.bad for finding in findings)
    if failed:
        return f"[bold red]{failed} of {len(findings)} checks failed[/bold red]"
    return "[green]ready to train[/green]"


def _as_json(examination: Examination) -> str:
    return json.dumps({"ok": not examination.code, **asdict(examination)}, indent=1)
