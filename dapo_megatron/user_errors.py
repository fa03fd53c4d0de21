"""What the command line makes of errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turn a user's mistake and an interrupt into one line and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except ValueError as error:
        if debug:
            raise
        # An error from another process carries the original one as its cause.
        typer.echo(f"error: {getattr(error, 'cause', None) or error}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from None
