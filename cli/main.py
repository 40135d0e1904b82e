"""Entry point: finds the subcommand, runs it, and turns whatever ends it into an exit code and one line on
stderr.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final, NoReturn

import click

from weightcast.schemas.errors import WeightcastError

from .ending import (
    INTERRUPTED,
    TERMINATED,
    OutputClosed,
    Terminated,
    configure_warnings,
    report,
    silence_stdout,
)

COMMANDS: Final[dict[str, str]] = {
    "publish": "Publish a checkpoint, or every checkpoint that a trainer writes.",
    "subscribe": "Keep a checkpoint folder or an engine at the newest version.",
    "pull": "Write one version as a Hugging Face checkpoint.",
    "log": "List versions, newest first.",
    "show": "Show one version.",
    "diff": "Compare two versions bit by bit.",
    "status": "Show head, snapshots, pruning and readers at a glance.",
    "verify": "Check everything in a stream, or an engine's weights, and list all damage.",
    "snapshot": "Write a snapshot of the newest version.",
    "prune": "Delete data that no kept version needs.",
    "doctor": "Probe whether a store does what a stream needs.",
    "demo": "Train a small policy and cast its weights to two rollout processes.",
    "bench": "Measure speed and size on this machine.",
}
"""Subcommands with one line of help each: the help must not import them."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called. Module `cli.NAME` has the command as
    `command`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in COMMANDS:
            return None
        found = importlib.import_module(f"weightcast.cli.{cmd_name}").command
        return found if isinstance(found, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"weightcast {version('weightcast')}")
        ctx.exit()


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version.",
)
@click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    help="On a failure write the traceback, too (also: WEIGHTCAST_DEBUG=1).",
)
def cli() -> None:
    """Carry the weights of a policy from a trainer to rollout engines, bit for bit, through shared storage
    alone.

    ROOT is where a stream lies: a folder, or a URL such as s3://bucket/path.
    """


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Whatever happens ends here."""
    debug = "--debug" in argv or os.environ.get("WEIGHTCAST_DEBUG", "") not in ("", "0")
    json = "--json" in argv
    configure_warnings(debug=debug)
    try:
        code = cli.main(list(argv), prog_name="weightcast", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except WeightcastError as error:
        report(error.kind, error.message, error.hint, json=json, debug=debug)
        return error.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"{context.command_path} --help" if context is not None else "weightcast --help"
        report("usage", error.format_message(), hint, json=json, debug=debug)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        report("interrupted", "interrupted", "", json=False, debug=False)
        return INTERRUPTED
    except (OutputClosed, BrokenPipeError):
        silence_stdout()
        return OutputClosed.code
    except Terminated:
        report("terminated", "stopped by SIGTERM", "", json=False, debug=False)
        return TERMINATED
    except Exception as error:  # noqa: BLE001 - the last resort: a user gets one line, never a traceback
        hint = "this is a bug; --debug shows where"
        report("failure", f"{type(error).__name__}: {error}", hint, json=json, debug=debug)
        return 1


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise Terminated


def main() -> NoReturn:
    """What the installed script calls."""
    signal.signal(signal.SIGTERM, _terminate)
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        silence_stdout()
    if code in (INTERRUPTED, TERMINATED):
        # Threads may still wait for the store. Nothing they do matters: what is not committed does not exist.
        os._exit(code)
    sys.exit(code)
