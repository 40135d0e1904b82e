"""A rollout process whose following thread dies of a bug."""

from __future__ import annotations

from weightcast.demo.worker import Worker, main


class BrokenWorker(Worker):
    """Follows nothing."""

    def follow(self) -> None:
        """See Worker."""
        raise RuntimeError("this is the bug")


if __name__ == "__main__":
    main(BrokenWorker)
