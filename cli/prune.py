"""`weightcast prune`."""

from __future__ import annotations

from dataclasses import asdict

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write, write_fields, write_json, write_table
from .text import size


@click.command("prune")
@root_argument
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Newest versions that stay reachable.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds between raising the floor and deleting. [default: 3600]",
)
@click.option(
    "--orphan-age",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Age after which objects of uncommitted attempts go. [default: 86400]",
)
@click.option("--dry-run", is_flag=True, help="Show what would go.")
@json_option
@store_options
def command(
    root: str,
    keep: int,
    grace: float | None,
    orphan_age: float | None,
    dry_run: bool,
    as_json: bool,
    store: StoreOptions,
) -> None:
    """Delete data that no kept version needs. Version manifests always stay.

    Raises the floor, waits the grace, then deletes. May be stopped and repeated at any time.
    """
    from weightcast.manifest.retention import GRACE_S, ORPHAN_AGE_S, prune

    result = prune(
        store.reader(root),
        keep=keep,
        grace_s=GRACE_S if grace is None else grace,
        orphan_age_s=ORPHAN_AGE_S if orphan_age is None else orphan_age,
        dry_run=dry_run,
    )
    plan = result.plan
    if as_json:
        write_json(
            {
                "dry_run": dry_run,
                "head": plan.head,
                "floor_before": plan.floor_before,
                "floor": plan.floor,
                "held_by": plan.held_by,
                "deleted": result.deleted,
                "bytes": plan.bytes,
                "deletions": [asdict(d) for d in plan.deletions],
            }
        )
        return
    objects = f"{len(plan.deletions)} objects, {size(plan.bytes)}"
    write_fields(
        [
            ("floor", f"{plan.floor_before} -> {plan.floor}"),
            ("held by", plan.held_by),
            ("would delete" if dry_run else "deleted", objects),
        ]
    )
    if plan.deletions and dry_run:
        write("\n")
        write_table(("object", "size", "reason"), ((d.key, size(d.size), d.reason) for d in plan.deletions))
