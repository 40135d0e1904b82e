"""A vLLM server without vLLM: workers with small sharded models, and an engine client that keeps vLLM's rules."""

from __future__ import annotations

import asyncio
import hashlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.torch
import torch
from fastapi import FastAPI
from starlette.testclient import TestClient

from weightcast.codec import Changes, Geometry, Memory, digest_all
from weightcast.schemas.engine import Held
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.subscriber.engines.staging import values_bytes
from weightcast.subscriber.engines.vllm import plugin, rank, versions
from weightcast.subscriber.engines.vllm.endpoint import Endpoint
from weightcast.subscriber.journal import Journal, write_journal
from weightcast.subscriber.target import Mark

TOKEN = "secret"
HIDDEN = 8

LAYOUT = Layout.of(
    [
        TensorSpec("down.weight", "BF16", (HIDDEN, 4 * HIDDEN)),
        TensorSpec("gate.weight", "BF16", (4 * HIDDEN, HIDDEN)),
        TensorSpec("up.weight", "BF16", (4 * HIDDEN, HIDDEN)),
        TensorSpec("norm.weight", "F32", (HIDDEN,)),
    ]
)
GEOMETRY = Geometry(LAYOUT)


class Model(torch.nn.Module):
    """One tensor-parallel rank of a gated layer: rows of gate and up fused, columns of down, norm on each rank."""

    def __init__(self, tp: int, ranks: int) -> None:
        super().__init__()
        self.tp, self.rows = tp, 4 * HIDDEN // ranks
        self.gate_up = torch.nn.Parameter(torch.zeros(2 * self.rows, HIDDEN, dtype=torch.bfloat16))
        self.down = torch.nn.Parameter(torch.zeros(HIDDEN, self.rows, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.zeros(HIDDEN))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        done = set()
        for name, weight in weights:
            done.add(name)
            first = self.tp * self.rows
            if name == "norm.weight":
                self.norm.data.copy_(weight)
            elif name == "down.weight":
                self.down.data.copy_(weight.narrow(1, first, self.rows))
            else:
                half = self.gate_up.data.narrow(0, self.rows * (name == "up.weight"), self.rows)
                half.copy_(weight.narrow(0, first, self.rows))
        return done


class Worker:
    """What a rank sees of vLLM."""

    def __init__(self, number: int, tp: int, dp: int) -> None:
        self.rank = number
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="/models/tiny"),
            parallel_config=SimpleNamespace(
                world_size=tp, pipeline_parallel_size=1, data_parallel_index=dp, data_parallel_rank=0
            ),
        )
        self.model = Model(number, tp)
        self.slept: list[int] = []
        self.asleep = False

    def get_model(self) -> Model:
        return self.model

    def sleep(self, level: int = 1) -> None:
        self.slept.append(level)

    @property
    def live(self) -> Any:
        """The plan's live weights."""
        return self.state._plan.live

    @property
    def state(self) -> rank.Rank:
        """What the plugin keeps on this worker."""
        found: rank.Rank = vars(self)["_weightcast_rank"]
        return found


class Client:
    """vLLM's engine client over in-process workers. `log` is what was asked of it, in order."""

    def __init__(self, tp: int = 1, dp: int = 1) -> None:
        self.workers = [Worker(number, tp, d) for d in range(dp) for number in range(tp)]
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=tp), model_config=SimpleNamespace(model="/models/tiny")
        )
        self.engine_core = SimpleNamespace(core_engines=list(range(dp)))
        self.log: list[str] = []
        self.is_paused_now = False
        self.label = "default"
        self.failures: dict[str, list[Exception | bool]] = {}  # call -> what its next calls do instead
        self.before: Callable[[str], Any] = lambda call: None  # awaited before each call

    async def _called(self, call: str) -> bool | None:
        """Log a call; its armed failure happens. Returns what it shall answer, if armed with an answer."""
        self.log.append(call)
        waiting = self.before(call)
        if waiting is not None:
            await waiting
        armed = self.failures.get(call)
        if not armed:
            return None
        failure = armed.pop(0)
        if isinstance(failure, Exception):
            raise failure
        return failure

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert not clear_cache
        await self._called(f"pause {mode}")
        self.is_paused_now = True

    async def resume_generation(self) -> None:
        if await self._called("resume") is not False:
            self.is_paused_now = False

    async def is_paused(self) -> bool:
        return self.is_paused_now

    async def is_sleeping(self) -> bool:
        return self.is_paused_now or any(worker.asleep for worker in self.workers)

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests
        assert reset_connector
        return await self._called("reset prefix") is not False

    async def reset_mm_cache(self) -> None:
        await self._called("reset mm")

    async def reset_encoder_cache(self) -> None:
        await self._called("reset encoder")

    async def update_weight_version(self, new_version: str) -> None:
        await self._called("label")
        self.label = new_version

    async def get_weight_version(self) -> str:
        return self.label

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        if method == versions.ASLEEP_METHOD:
            return [worker.asleep for worker in self.workers]
        assert method == versions.WORKER_METHOD
        await self._called(args[0])
        calls = [asyncio.to_thread(plugin._answer, worker, *args) for worker in self.workers]
        return (await asyncio.gather(*calls))[:1]  # with data parallelism, the first engine's alone


State = dict[str, np.ndarray[Any, Any]]


def states(count: int) -> list[State]:
    """Bits of versions 0, 1, … of `LAYOUT`, by tensor name, unsigned; a fifth of the elements change each time."""
    random = np.random.default_rng(7)
    found: list[State] = [
        {
            s.name: random.integers(0, 1 << 8 * s.width, s.elements, f"u{s.width}").reshape(s.shape)
            for s in LAYOUT
        }
    ]
    while len(found) < count:
        flips = {name: random.random(bits.shape) < 0.2 for name, bits in found[-1].items()}
        found.append({name: bits ^ flips[name].astype(bits.dtype) for name, bits in found[-1].items()})
    return found


def held(state: State, version: int) -> Held:
    """A version with these bits."""
    digest = digest_all(GEOMETRY, Memory.over(GEOMETRY, state))
    return Held(
        stream="s", version=version, sha256=hashlib.sha256(b"%d" % version).hexdigest(), digest=digest.hex
    )


def flat(state: State, dtype: str) -> np.ndarray[Any, Any]:
    """Bits of a flat space."""
    return np.concatenate([state[name].ravel() for name in GEOMETRY[dtype].names])


def folded(way: list[State]) -> dict[str, Changes]:
    """Absolute values that lead from the first of these states, or any other, to the last."""
    changes = {}
    for space in GEOMETRY:
        bits = [flat(state, space.dtype) for state in way]
        at = np.flatnonzero(np.any([a != b for a, b in pairwise(bits)], axis=0))
        changes[space.dtype] = Changes(space.dtype, at, bits[-1][at])
    return changes


def fill(worker: Worker, state: State) -> None:
    """Load a state the way the engine does at its start."""
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    tensors = {n: torch.from_numpy(b.copy()).view(kinds[LAYOUT[n].dtype]) for n, b in state.items()}
    worker.model.load_weights(tensors.items())


def save(state: State, folder: Path) -> None:
    """A checkpoint folder of a version."""
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    folder.mkdir(exist_ok=True)
    tensors = {n: torch.from_numpy(b.copy()).view(kinds[LAYOUT[n].dtype]) for n, b in state.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def expected(worker: Worker, state: State) -> dict[str, bytes]:
    """The bytes of each parameter of a rank that was loaded with `state`."""
    fresh = Worker(worker.rank, worker.vllm_config.parallel_config.world_size, 0)
    fill(fresh, state)
    return bits(fresh)


def bits(worker: Worker) -> dict[str, bytes]:
    """The bytes of each parameter of a rank."""
    return {n: p.detach().view(torch.uint8).numpy().tobytes() for n, p in worker.model.named_parameters()}


class Server:
    """An API server process over a fake engine, asked over HTTP; and the files of a subscriber beside it."""

    def __init__(self, stage: Path, client: Client, http: TestClient, endpoint: Endpoint) -> None:
        self.client, self.http, self.endpoint = client, http, endpoint
        self.folder = stage / "subscriber"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.states = states(4)
        self.held = [held(state, version) for version, state in enumerate(self.states)]
        self.session = "one"
        self.model = stage.parent / "model"  # what the engine was started with
        save(self.states[0], self.model)
        for worker in client.workers:
            worker.vllm_config.model_config.model = str(self.model)
            fill(worker, self.states[0])

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        body.setdefault("session", self.session)
        answer = self.http.post(f"/weightcast{path}", json=body, headers={"authorization": f"Bearer {TOKEN}"})
        return answer.status_code, answer.json()

    def state(self) -> dict[str, Any]:
        answer = self.http.get("/weightcast/state", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def attach(self) -> dict[str, Any]:
        path = self.folder / "layout.arrow"
        path.write_bytes(LAYOUT.encoded)
        status, report = self.post("/attach", layout=str(path), layout_sha256=LAYOUT.sha256)
        assert status == 200, report
        return report

    def adopt(self, version: int) -> tuple[int, dict[str, Any]]:
        return self.post("/adopt", held=self.held[version].model_dump())

    def read(self, positions: Mapping[str, list[int]]) -> tuple[int, dict[str, Any]]:
        counts = {dtype: len(at) for dtype, at in positions.items()}
        (self.folder / "positions").write_bytes(
            b"".join(np.array(at, np.int64).tobytes() for at in positions.values())
        )
        (self.folder / "values").write_bytes(bytes(values_bytes(counts)))
        return self.post(
            "/read",
            layout_sha256=LAYOUT.sha256,
            counts=counts,
            positions=str(self.folder / "positions"),
            values=str(self.folder / "values"),
        )

    def request(self, base: int, target: int, pause: str = "keep") -> dict[str, Any]:
        """Stage the way between two versions; the request to install it."""
        path = self.folder / f"staged-{base}-{target}.arrow"
        mark = Mark("s", target, self.held[target].sha256)
        write_journal(path, Journal(mark, folded(self.states[base : target + 1])))
        return {
            "session": self.session,
            "layout_sha256": LAYOUT.sha256,
            "staged": str(path),
            "base": self.held[base].model_dump(),
            "target": self.held[target].model_dump(),
            "pause": pause,
        }

    def install(self, base: int, target: int, pause: str = "keep") -> tuple[int, dict[str, Any]]:
        return self.post("/install", **self.request(base, target, pause))

    def serves(self, version: int) -> bool:
        """Whether every rank has exactly the bits of a version."""
        return all(bits(w) == expected(w, self.states[version]) for w in self.client.workers)

    def ready(self) -> Server:
        """With a plan, and version 0 adopted."""
        self.attach()
        assert self.adopt(0)[0] == 200
        self.client.log.clear()
        return self


@contextmanager
def served(stage: Path, client: Client, peer: str = "127.0.0.1") -> Iterator[Server]:
    """A server over `client`; requests come from `peer`."""
    app, endpoint = FastAPI(), Endpoint()
    endpoint.attach_router(app)
    with TestClient(app, client=(peer, 40000), raise_server_exceptions=False) as http:
        asyncio.run(endpoint.init_state(client, None, Namespace(host="127.0.0.1", port=8000)))
        yield Server(stage, client, http, endpoint)
