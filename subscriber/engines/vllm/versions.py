"""The vLLM releases this plugin works with, and a thin adapter over what differs between them.

Nothing here imports vLLM before it is called: the module can be read, and tested, without an engine.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

from weightcast.schemas.engine import PauseMode
from weightcast.schemas.errors import UsageError

WORKER_METHOD: Final = "weightcast"
"""Of the worker class: method(op, request, call_dir), for the ops of a rank."""

ASLEEP_METHOD: Final = "weightcast_asleep"
"""Of the worker class: method() -> bool, `memory_asleep` of that process."""


@dataclass(frozen=True, slots=True)
class Release:
    """What one minor release of vLLM has.

    Attributes:
        label: it keeps a weight version label (`update_weight_version`).
        all_answer: with data parallelism the client combines the answers of all engines to "are you paused",
            "is the prefix cache clear" and "which label"; before, it returned the first engine's.
        refuses_while_paused: new requests during a pause with mode "wait" or "abort" are answered with status 503;
            before, they wait until generation goes on.
    """

    minor: int
    label: bool
    all_answer: bool
    refuses_while_paused: bool

    @property
    def name(self) -> str:
        """As vLLM writes it, without the patch number."""
        return f"0.{self.minor}"


FIRST: Final = 26  # vllm.endpoint_plugins appeared
LAST: Final = 33  # newest whose sources were compared
SUPPORTED: Final[Mapping[int, Release]] = MappingProxyType(
    {
        minor: Release(minor, label=minor >= 27, all_answer=minor >= 32, refuses_while_paused=minor >= 33)
        for minor in range(FIRST, LAST + 1)
    }
)


def supported(version: str) -> Release:
    """The row of a version string such as "0.32.0", "0.32.1+cpu" or "0.33.0rc1".

    Raises:
        UsageError: none; the message names what was found and what is supported.
    """
    match = re.match(r"0\.(\d+)(?![0-9])", version)
    release = SUPPORTED.get(int(match[1])) if match else None
    if release is None:
        raise UsageError(
            f"vLLM {version}: not supported, weightcast works with 0.{FIRST} to 0.{LAST}",
            hint="install a vLLM of that range beside this weightcast, or another weightcast",
        )
    return release


def engine_version() -> str:
    """The version of the vLLM of this process. Does not need the distribution's metadata, which CPU builds lack."""
    from vllm.version import __version__  # type: ignore[import-not-found,unused-ignore]

    return str(__version__)


def current() -> Release:
    """The row of the vLLM of this process.

    Raises:
        UsageError: this release is not supported.
    """
    return supported(engine_version())


def rank_name(parallel: Any, *, tp: int, pp: int) -> str:
    """A worker's name, unique in the deployment: "dp0-pp0-tp0".

    Args:
        parallel: the `parallel_config` of the worker. Its `data_parallel_index` counts; `data_parallel_rank` is 0 on
            every engine where a model without experts runs as independent replicas.
        tp: rank in the tensor-parallel group.
        pp: rank in the pipeline group.
    """
    return f"dp{parallel.data_parallel_index}-pp{pp}-tp{tp}"


def memory_asleep() -> bool:
    """Whether device memory of this worker process was given back by sleep mode and cannot be read or written.

    Any sleeping allocation counts, the KV cache's too: generation must not be resumed without it.
    """
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = getattr(getattr(module, "CuMemAllocator", None), "instance", None)
    if allocator is None:  # no sleep mode in this process, or a backend without this allocator
        return False
    return any(data.is_asleep for data in allocator.pointer_to_data.values())


class Client(Protocol):
    """What is used of `vllm.engine.protocol.EngineClient`; the same in all supported releases, but for the label."""

    vllm_config: Any
    engine_core: Any

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
    async def is_paused(self) -> bool: ...
    async def is_sleeping(self) -> bool: ...
    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...
    async def get_weight_version(self) -> str: ...
    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]: ...


class Engine:
    """All engines behind one API server process, asked as one.

    Errors of the engine (dead, or an exception on its side) are let through as vLLM raises them.

    Args:
        client: vLLM's engine client, as an endpoint plugin is given it.
        release: of the vLLM of this process.
    """

    def __init__(self, client: Client, release: Release) -> None:
        self._client = client
        self._release = release

    @property
    def engines(self) -> int:
        """Data-parallel engines that calls reach: all of them, or this process's own behind an external balancer."""
        core = getattr(self._client, "engine_core", None)
        return max(1, len(getattr(core, "core_engines", ())))

    @property
    def workers(self) -> int:
        """Processes that `rpc` reaches, so the number of replies to expect."""
        return int(self._client.vllm_config.parallel_config.world_size) * self.engines

    async def pause(self, mode: PauseMode) -> None:
        """Return once nothing is computed any more on any engine. Caches are kept: `reset_caches` after the write.

        Pausing a paused engine is harmless.
        """
        await self._client.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        """Let generation go on, whoever paused it."""
        await self._client.resume_generation()

    async def paused(self) -> bool:
        """Whether every engine is paused."""
        return all(await self._answers("is_scheduler_paused", self._client.is_paused))

    async def sleeping(self) -> bool:
        """Whether a worker's memory was given back by sleep mode, at least in part.

        vLLM's own `is_sleeping` is true of every paused engine, too; that alone does not count here.
        """
        return await self.resting() and any(await self._client.collective_rpc(ASLEEP_METHOD))

    async def resting(self) -> bool:
        """Whether an engine is paused or sleeps; no worker is asked."""
        return bool(await self._client.is_sleeping())

    async def label(self, text: str) -> None:
        """Set the weight version label that outputs carry. Does nothing where the release has none."""
        if self._release.label:
            await self._client.update_weight_version(text)

    async def get_label(self) -> str | None:
        """The label; None where the release has none, or the engines differ."""
        if not self._release.label:
            return None
        labels = await self._answers("get_weight_version", self._client.get_weight_version)
        return str(labels[0]) if all(label == labels[0] for label in labels) else None

    async def reset_caches(self) -> list[str]:
        """Forget what was computed from the weights: prefix cache, connector, multimodal and encoder caches.

        Requests that a pause froze are computed again from their tokens.

        Returns:
            What could not be reset, and why; empty if all could.
        """
        results = await asyncio.gather(
            self._reset_prefix(),
            self._client.reset_mm_cache(),
            self._client.reset_encoder_cache(),
            return_exceptions=True,
        )
        names = ("prefix cache and connector", "multimodal cache", "encoder cache")
        failures = (_failure(result) for result in results)
        return [f"{name}: {failure}" for name, failure in zip(names, failures, strict=True) if failure]

    async def rpc(self, op: str, request: str, call_dir: str, *, timeout: float | None = None) -> None:
        """Run an op on every worker. Answers are files in `call_dir`: vLLM returns only the first engine's."""
        await self._client.collective_rpc(WORKER_METHOD, timeout=timeout, args=(op, request, call_dir))

    async def _reset_prefix(self) -> bool:
        of_running_requests, of_connector = True, True
        method = self._client.reset_prefix_cache
        return all(await self._answers("reset_prefix_cache", method, of_running_requests, of_connector))

    async def _answers(self, utility: str, method: Any, *args: Any) -> list[Any]:
        """Every engine's answer, or the one that vLLM combined from them.

        Where the client drops the others' answers, each engine is asked by the client's own call for one engine.
        """
        if self._release.all_answer or self.engines == 1:
            return [await method(*args)]
        core = self._client.engine_core
        calls = [core._call_utility_async(utility, *args, engine=engine) for engine in core.core_engines]
        return list(await asyncio.gather(*calls))


def _failure(result: object) -> str:
    """Why a reset did not happen; "" if it did."""
    if isinstance(result, asyncio.CancelledError):
        raise result
    if isinstance(result, BaseException):
        return str(result) or type(result).__name__
    return "the engine answered that it did not" if result is False else ""
