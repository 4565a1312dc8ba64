"""`python -m ptcollect`: commands for the shell, listed by ``--help``."""

from __future__ import annotations

import importlib.util

COMMANDS = ("doctor", "bench", "plan")
"""Modules of `ptcollect.commands`, each with a function of its own name, in the order in which a user needs them."""


def main() -> None:
    """Run the command named in the arguments."""
    if any(importlib.util.find_spec(package) is None for package in ("typer", "rich")):
        raise SystemExit("python -m ptcollect needs the packages typer and rich: pip install 'ptcollect[cli]'")
    import typer

    app = typer.Typer(
        help="Gradient synchronisation for PyTorch: check a launch, measure it, and plan what would pay.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # or else a single command would not be called by its name
    for name in COMMANDS:
        if importlib.util.find_spec(f"ptcollect.commands.{name}") is not None:
            module = importlib.import_module(f"ptcollect.commands.{name}")
            app.command(name)(getattr(module, name))
    app(prog_name="python -m ptcollect")


if __name__ == "__main__":
    main()
