"""The application: which endpoint answers which address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from specdec_core import AsyncLLM, SpecdecError
from specdec_server.chat import ChatAnswer
from specdec_server.completions import CompletionAnswer
from specdec_server.errors import ApiError, answer_error
from specdec_server.front_page import FrontPage
from specdec_server.info import Info
from specdec_server.json_text import JSONText
from specdec_server.middleware import AccessLog, KeyCheck
from specdec_server.service import Service
from specdec_server.settings import Settings
from specdec_server.streaming import EventStream

Make = type[ChatAnswer] | type[CompletionAnswer]


def make_app(llm: AsyncLLM, settings: Settings) -> Starlette:
    """Make the ASGI application. The caller shuts the AsyncLLM down. `app.state.service` has the `Service`."""
    service = Service(llm, settings)
    info = Info(service)
    routes = [
        Route("/v1/chat/completions", _answering(service, ChatAnswer), methods=["POST"]),
        Route("/v1/completions", _answering(service, CompletionAnswer), methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.model),
        Route("/tokenize", info.tokenize, methods=["POST"]),
        Route("/detokenize", info.detokenize, methods=["POST"]),
        Route("/", FrontPage().answer),
        Route("/health", info.health),
        Route("/version", info.version),
        Route("/load", info.load),
        Route("/metrics", info.metrics),
    ]
    middleware = [Middleware(AccessLog)] if settings.access_log else []
    if settings.allowed_origins:
        origins = list(settings.allowed_origins)
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    if settings.api_keys:
        middleware.append(Middleware(KeyCheck, keys=settings.api_keys))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(service.watchdog.run())
        yield
        watching.cancel()
        service.close()

    answered = (ApiError, SpecdecError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=dict.fromkeys(answered, answer_error),
        lifespan=lifespan,
    )
    app.state.service = service
    return app


def _answering(service: Service, make: Make) -> Callable[[Request], Awaitable[Response]]:
    """Make the endpoint that answers requests for completions."""

    async def endpoint(request: Request) -> Response:
        body = await service.read(request)
        names = {make.required, *body}
        try:
            answer = make(service, body)
            if answer.is_streamed:
                return EventStream(service.lifecycle, answer.chunks(), names)
            whole = await service.lifecycle.run(request.receive, answer.whole())
            return Response(whole, media_type=JSONText.media_type)
        except ClientDisconnect:
            raise
        except Exception as error:
            return ApiError.of(error, names).response

    return endpoint
