"""The console command."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ConfigPath = Annotated[Path, typer.Argument(help="YAML config of the run.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="dotted.key=value, over the config; repeatable.")]

USER_ERROR = 2
INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Writing more of an open file fails without the file's name."""


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train models larger than the GPU, or the RAM, of one machine: exactly, and as planned."""


@app.command()
def train(config: ConfigPath, set_: Overrides = None) -> None:
    """Train as CONFIG says; the model is saved as a Hugging Face folder in train.output_dir."""
    from .trainer.config import load_config
    from .trainer.run import train as run

    run(load_config(config, set_ or []))


@app.command()
def plan(
    config: ConfigPath,
    set_: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a run of CONFIG would do: bytes by tier, bytes moved, predicted step time. Reads no weights."""
    from .trainer.config import load_config
    from .trainer.run import plan as report

    result = report(load_config(config, set_ or []))
    typer.echo(result.to_json() if json else str(result))


def main() -> None:
    """Faults of the user's are one line each on stderr and exit code 2; bugs keep their traceback."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was saved", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        lines = _user_lines(error)
        if lines is None:
            raise
        for line in lines:
            typer.echo(f"error: {line}", err=True)
        sys.exit(USER_ERROR)


def _user_lines(error: Exception) -> list[str] | None:
    """The lines of an error that the user can do something about; None for a bug."""
    from .offload import BudgetError, NonFiniteGradient, WeightError
    from .offload.arena import SwapError
    from .trainer.config import ConfigError
    from .trainer.data import DataError
    from .trainer.run import TrainingError

    kinds = (BudgetError, ConfigError, DataError, NonFiniteGradient, SwapError, TrainingError, WeightError)
    if isinstance(error, kinds):
        return str(error).splitlines()
    if isinstance(error, OSError) and error.strerror and (error.filename or error.errno in _FULL):
        return [f"{error.filename}: {error.strerror}" if error.filename else error.strerror]
    return None
