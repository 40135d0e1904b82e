"""Entry point `vllm.endpoint_plugins`: routes below `/weightcast` in the API server, for a subscriber beside it.

Whoever may call them may change the weights. So every call needs the token, and comes from this host unless the
operator says otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, ValidationError

from weightcast.schemas import engine as documents
from weightcast.schemas.engine import PREFIX, TOKEN_VARIABLE, Fault
from weightcast.schemas.errors import UsageError, WeightcastError

from ..staging import make_private, stage_folder
from .ops import fault_of
from .service import Service
from .versions import Client, Engine, current, engine_version

log = logging.getLogger("vllm.weightcast")

REMOTE_VARIABLE: Final = "WEIGHTCAST_VLLM_REMOTE"
"""Set to 1, clients on other hosts are answered, too; the token then travels over the network."""

MAX_REQUEST_BYTES: Final = 16 << 20
"""Of a request's body: a `load` names at most some ten thousand files."""

_STATUS: Final = {"usage": 422, "conflict": 409, "untrusted": 422, "unsupported": 422, "not_found": 422}
_OTHER_STATUS: Final = 500

D = TypeVar("D", bound=BaseModel)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Endpoint:
    """What vLLM asks of an endpoint plugin. Holds no state of the weights: there may be several such processes."""

    name = "weightcast"
    required_tasks: tuple[str, ...] | None = None

    def __init__(self) -> None:
        self._token = os.environ.get(TOKEN_VARIABLE, "")
        self._remote = os.environ.get(REMOTE_VARIABLE) == "1"
        self._service: Service | None = None
        self._refused = "the server is still starting"
        self._running: set[asyncio.Task[BaseModel]] = set()

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes. They are not part of the server's public description."""
        router = APIRouter(prefix=PREFIX, include_in_schema=False)
        router.add_api_route("/pulse", self._route(None, lambda s, _: s.pulse()), methods=["GET"])
        router.add_api_route("/state", self._route(None, lambda s, _: s.state()), methods=["GET"])
        posts: dict[str, tuple[type[BaseModel], Callable[[Service, Any], Awaitable[BaseModel]]]] = {
            "/attach": (documents.AttachRequest, Service.attach),
            "/adopt": (documents.AdoptRequest, Service.adopt),
            "/read": (documents.ReadRequest, Service.read),
            "/install": (documents.InstallRequest, Service.install),
            "/load": (documents.LoadRequest, Service.load),
            "/verify": (documents.VerifyRequest, Service.verify),
        }
        for path, (kind, do) in posts.items():
            router.add_api_route(path, self._route(kind, do), methods=["POST"])
        app.include_router(router)

    async def init_state(self, engine_client: Client | None, state: object, args: Namespace) -> None:
        """Take the engine that the routes work on; None in a server without one."""
        if engine_client is None:
            self._refused = "this server has no engine"
            return
        try:
            release = current()
            stage = await asyncio.to_thread(make_private, stage_folder())
        except UsageError as error:
            self._refused = str(error)
            log.error("weightcast cannot serve: %s", error)
            return
        where = f"{getattr(args, 'uds', None) or getattr(args, 'host', None)}:{getattr(args, 'port', None)}"
        lock = stage / f"server-{hashlib.sha256(where.encode()).hexdigest()[:16]}.lock"
        self._service = Service(
            Engine(engine_client, release),
            name=f"vllm {engine_version()}",
            model=str(engine_client.vllm_config.model_config.model),
            stage=stage,
            lock=lock,
        )
        log.info("weightcast answers below %s, files pass through %s", PREFIX, stage)

    def _route(self, kind: type[D] | None, do: Callable[[Service, Any], Awaitable[BaseModel]]) -> Handler:
        """A handler: who asks is looked at first, then what."""

        async def handle(request: Request) -> Response:
            refusal = self._refuse(request)
            if refusal is not None:
                return refusal
            if self._service is None:
                return _answer(Fault(kind="storage", message=self._refused), 503)
            try:
                question = None if kind is None else kind.model_validate_json(await _body(request))
            except (ValidationError, UsageError) as error:
                return _answer(Fault(kind="usage", message=f"not a request of this protocol: {error}"), 422)
            return await self._finish(self._service, do(self._service, question))

        return handle

    async def _finish(self, service: Service, work: Awaitable[BaseModel]) -> Response:
        """Wait for `work`, which goes on when the one who asked has hung up."""
        task = asyncio.ensure_future(_run(work))
        self._running.add(task)
        task.add_done_callback(self._forget)
        try:
            return _answer(await asyncio.shield(task), 200)
        except WeightcastError as error:
            log.error("weightcast: %s", error)
            fault = fault_of(error, paused=await service.paused())
            return _answer(fault, _STATUS.get(error.kind, _OTHER_STATUS))

    def _forget(self, task: asyncio.Task[BaseModel]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("weightcast: an op ended with %r", error)

    def _refuse(self, request: Request) -> Response | None:
        """An answer to whoever may not ask; None if they may."""
        if not self._remote and not _is_local(request):
            message = "only clients on this host are answered"
            return _answer(
                Fault(kind="usage", message=message, hint=f"{REMOTE_VARIABLE}=1 lets others in"), 403
            )
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if not self._token:
            hint = f"start the server with {TOKEN_VARIABLE} in its environment"
            return _answer(Fault(kind="usage", message="the server has no token", hint=hint), 401)
        if kind.lower() != "bearer" or not hmac.compare_digest(token.encode(), self._token.encode()):
            hint = f"{TOKEN_VARIABLE} must be the same in the server's environment and the subscriber's"
            return _answer(Fault(kind="usage", message="no token, or a wrong one", hint=hint), 401)
        return None


async def _run(work: Awaitable[BaseModel]) -> BaseModel:
    return await work


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_REQUEST_BYTES:
            raise UsageError(f"more than {MAX_REQUEST_BYTES} bytes")
    return bytes(data)


def _is_local(request: Request) -> bool:
    """Whether the peer is on this host; a Unix socket has no address, and is."""
    if request.client is None:
        return True
    try:
        address = ipaddress.ip_address(request.client.host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:  # a Unix socket's name
        return request.client.host == ""


def _answer(document: BaseModel, status: int) -> Response:
    return Response(document.model_dump_json(), status, media_type="application/json")
