"""A rollout process: `python -m weightcast.demo.worker`. The trainer starts it and tells it what to do.

Three threads. One reads the input and ends the process as soon as that ends, whatever the others do. One
follows the stream, which writes into the live weights. The main one generates with these weights; it holds
the target's lock meanwhile, so that a batch comes from one version whole.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from torch import Tensor

    from .messages import Finish, Job, Message

_IDLE_S: Final = 0.01  # seconds between two looks for something to do
_FINISH_S: Final = 60.0  # seconds in which the last version must have arrived


def watch_input(source: BinaryIO) -> queue.SimpleQueue[bytes]:
    """Return a queue of the input's lines. When the input ends, the trainer is gone: this process ends."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            lines.put(line)
        os._exit(
            0
        )  # the main thread may be busy or wait for the store; nothing it holds needs an orderly end

    threading.Thread(target=read, name="weightcast-demo-input", daemon=True).start()
    return lines


def send(message: Message) -> None:
    """Tell the trainer. One write, so that lines of two threads do not mix."""
    os.write(sys.stdout.fileno(), message.line())


class Worker:
    """Follows the stream with a live bf16 policy, and generates a batch with each version that it holds."""

    def __init__(self, job: Job) -> None:
        import torch

        from weightcast.manifest.store import StoreSettings, open_store
        from weightcast.schemas.settings import SubscriberSettings
        from weightcast.subscriber import Subscriber
        from weightcast.subscriber.tensors import Tensors

        from .policy import inference_copy
        from .spool import Spool

        self.job = job
        self.policy = inference_copy(job.config.policy)
        self.weights: dict[str, Tensor] = self.policy.state_dict()
        for tensor in self.weights.values():
            tensor.zero_()  # all it will know comes from the store
        self._rng = torch.Generator().manual_seed(_seed(job))
        self._spool, self._task = Spool(Path(job.spool)), job.config.task
        self._target = Tensors(self.weights)
        settings = SubscriberSettings(poll_s=job.config.poll_s)
        store = open_store(job.root, settings=StoreSettings(**job.store))
        self._subscriber = Subscriber(job.root, self._target, settings, store=store)
        self._first_step: int | None = None
        self._generated = 0  # batches

    def follow(self) -> None:
        """Keep the weights at the head, and say so at each version. For a thread; does not return."""
        from weightcast.schemas.errors import WeightcastError

        from .messages import Applied, Failed

        try:
            for position in self._subscriber.follow():
                send(Applied(version=position.version))
        except WeightcastError as error:
            send(Failed(message=error.message, hint=error.hint))
            os._exit(error.exit_code)

    def generate(self) -> bool:
        """Generate a batch and hand it over, if there is reason to: False if not.

        There is none while the last batch is untaken, or when it is as far ahead as it may be: one batch for
        each step of the trainer since its first, and `lead` beyond them.
        """
        from .rollout import rollout

        if self._spool.waiting(self.job.name):
            return False
        with self._target.exclusive():
            step = self._step()
            if step is None:
                return False
            if self._first_step is None:
                self._first_step = step
            if self._generated > step - self._first_step + self.job.config.lead:
                return False
            batch = rollout(
                self.policy,
                self._task,
                self._rng,
                step,
                prompts=self.job.config.prompts,
                group_size=self.job.config.group_size,
            )
        self._spool.put(batch, worker=self.job.name, sequence=step)
        self._generated += 1
        return True

    def _step(self) -> int | None:
        """The trainer's step that the live weights come from; None if they are no weights of this run."""
        at = self._subscriber.position
        return at.manifest.step if at is not None and at.version >= self.job.first_version else None

    def finish(self, command: Finish) -> None:
        """Go to the last version, and prove which bits the live weights have then."""
        from .proof import prove

        version = self._subscriber.wait_for(command.version, timeout=_FINISH_S)
        with self._target.exclusive():
            send(prove(version, self.weights))


def _seed(job: Job) -> int:
    """Of the samples: another one for each worker, and for each start of it."""
    return (job.config.seed << 16) + (job.incarnation << 8) + sum(job.name.encode())


def work(lines: queue.SimpleQueue[bytes], kind: type[Worker] = Worker) -> None:
    """Do what the trainer says, until it has the proof and closes the input."""
    import torch

    from weightcast.schemas.errors import WeightcastError

    from .messages import COMMANDS, Failed, Job

    torch.set_num_threads(1)  # two of these and a trainer share the machine
    try:
        job = COMMANDS.validate_json(lines.get())
        if not isinstance(job, Job):
            return
        worker = kind(job)
        threading.Thread(target=worker.follow, name="weightcast-demo-follow", daemon=True).start()
        while lines.empty():
            if not worker.generate():
                threading.Event().wait(_IDLE_S)
        command = COMMANDS.validate_json(lines.get())
        if not isinstance(command, Job):
            worker.finish(command)
    except WeightcastError as error:
        send(Failed(message=error.message, hint=error.hint))
        os._exit(error.exit_code)
    threading.Event().wait()  # the end of the input ends the process


def _die(args: threading.ExceptHookArgs) -> None:
    """A process that has lost a thread would look alive and do nothing: end it, so that the trainer sees."""
    threading.__excepthook__(args)
    sys.stderr.flush()
    os._exit(1)


def main(kind: type[Worker] = Worker) -> None:
    """Watch the input first: importing takes seconds, in which the trainer may go, too."""
    threading.excepthook = _die
    work(watch_input(sys.stdin.buffer), kind)


if __name__ == "__main__":
    main()
