"""`weightcast demo`: one trainer, two subscribers, one folder or bucket between them.

Everything here is the shell around `trainer.Trainer`: arguments, temporary folders, the order in which things
are opened and closed, and the exit code.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Final

import click

from weightcast.cli.options import StoreOptions, store_options

from .config import TRAINER_THREADS, WORKERS, DemoConfig
from .crew import COMMAND, Crew
from .interrupts import Interrupts

if TYPE_CHECKING:
    from weightcast.manifest.store import StoreSettings
    from weightcast.publisher import Publisher

    from .outcome import Outcome

NOT_PROVED: Final = 1
INTERRUPTED: Final = 130  # 128 + SIGINT
_INTERRUPT_S: Final = 1.0  # seconds for a version that is on its way when the run breaks off


@dataclass(frozen=True)
class Options:
    """How to run.

    Attributes:
        keep: do not remove the temporary folder. A root that was given is never removed.
        json_output: write one JSON document to stdout instead of the summary.
        worker: command that starts a rollout process.
    """

    keep: bool = False
    json_output: bool = False
    worker: Sequence[str] = COMMAND


@click.command("demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--root", metavar="URL", help="Where the stream lies; a fresh temporary folder if not given.")
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=DemoConfig().steps,
    show_default=True,
    help="Steps to train.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights and samples."
)
@click.option(
    "--keep", is_flag=True, help="Keep the temporary folder, to look at it with the other commands."
)
@click.option("--json", "json_output", is_flag=True, help="Write one JSON document to stdout.")
@store_options
def command(
    root: str | None, steps: int, seed: int, keep: bool, json_output: bool, store: StoreOptions
) -> int:
    """Train a small policy while two processes follow it and generate its rollouts.

    Each step is published and followed bit for bit. One of the two processes is killed and started again on
    the way. At the end both must have the trainer's weights, byte for byte, and the reward must have risen;
    exit code 1 if not.
    """
    options = Options(keep=keep, json_output=json_output)
    return demo(root, DemoConfig(steps=steps, seed=seed), options, store_settings=store.settings())


def main(arguments: Sequence[str]) -> int:
    """Run with command-line arguments, and return the exit code."""
    code = command.main(list(arguments), prog_name="weightcast demo", standalone_mode=False)
    return code if isinstance(code, int) else 0


def demo(
    root: str | None = None,
    config: DemoConfig | None = None,
    options: Options | None = None,
    *,
    store_settings: StoreSettings | None = None,
) -> int:
    """Run the demo.

    Args:
        root: of the stream; a fresh temporary folder if not given.
        config: sizes and script.
        options: how to run.
        store_settings: how to reach the store.

    Returns:
        0 if everything was proved, 1 if not, 130 if it was interrupted.

    Raises:
        WeightcastError: the store, or a subscriber, failed.
    """
    config, options = config or DemoConfig(), options or Options()
    try:
        with _root(root, keep=options.keep) as url, TemporaryDirectory(prefix="weightcast-demo-") as work:
            outcome = _run(url, Path(work), config, options, store_settings)
    except KeyboardInterrupt:
        return INTERRUPTED
    _tell(outcome, kept=root is not None or options.keep, options=options)
    return NOT_PROVED if outcome.problems else 0


def _run(
    root: str, work: Path, config: DemoConfig, options: Options, store_settings: StoreSettings | None
) -> Outcome:
    """Open everything, train, and close everything."""
    began = time.monotonic()
    # The crew imports while this process does.
    with Interrupts() as interrupts, Crew(WORKERS, options.worker, work) as crew:
        import torch

        from weightcast.manifest.store import StoreSettings, open_store

        from .display import board
        from .intake import Intake
        from .outcome import Outcome
        from .trainer import Trainer

        interrupts.check()
        torch.set_num_threads(TRAINER_THREADS)
        settings = store_settings or StoreSettings()
        intake = Intake(work / "spool", WORKERS, max_staleness=config.max_staleness)
        with board(sys.stderr) as shown, _publisher(root, settings) as publisher:
            shown.note(f"stream {open_store(root, settings=settings).url}")
            trainer = Trainer(
                config,
                crew,
                publisher,
                intake,
                shown,
                root=root,
                store=asdict(settings),
                safe_point=interrupts.check,
            )
            manifest = trainer.run()
            proof = trainer.proof(manifest.version)
            subscribers = trainer.outcomes(proof)
        seconds = time.monotonic() - began
    return Outcome(root, trainer.rows, proof.digest, manifest.digest_after, subscribers, seconds)


@contextmanager
def _root(given: str | None, *, keep: bool) -> Iterator[str]:
    """The stream's root; a temporary one is removed unless it is kept."""
    if given is not None:
        yield given
        return
    folder = Path(mkdtemp(prefix="weightcast-demo-store-"))
    try:
        yield str(folder)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)  # a publisher that was broken off may still write there


@contextmanager
def _publisher(root: str, settings: StoreSettings) -> Iterator[Publisher]:
    """A publisher; what is on its way is waited for only if all goes well."""
    from weightcast.manifest.store import open_store
    from weightcast.publisher import Publisher
    from weightcast.schemas.errors import WeightcastError

    publisher = Publisher(root, store=open_store(root, settings=settings, option="--root"))
    try:
        yield publisher
    except BaseException:
        with suppress(WeightcastError):
            publisher.close(_INTERRUPT_S)
        raise
    publisher.close()


def _tell(outcome: Outcome, *, kept: bool, options: Options) -> None:
    if options.json_output:
        print(json.dumps(outcome.document() | {"kept": kept}, allow_nan=False))
        return
    from .display import write_summary

    write_summary(outcome, kept=kept)
