"""A rollout process whose memory is not to be trusted: one bit of its weights flips before it proves them."""

from __future__ import annotations

import torch

from weightcast.demo.messages import Finish
from weightcast.demo.worker import Worker, main


class FlippingWorker(Worker):
    """Flips the lowest bit of one element once the last version is there."""

    def finish(self, command: Finish) -> None:
        """See Worker."""
        self._subscriber.wait_for(command.version, timeout=60)
        bits = self.weights["model.norm.weight"].view(torch.int16)
        bits[3] ^= 1
        super().finish(command)


if __name__ == "__main__":
    main(FlippingWorker)
