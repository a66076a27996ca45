"""Errors as clients of OpenAI's API expect them: a status code and {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from specdec_core import CapacityError, ConfigError, DeviceError, SpecdecError
from specdec_server.json_text import JSONText

logger = logging.getLogger(__name__)

KINDS = {429: "rate_limit_error"}
"""{status code: the error's type}. Others have "server_error" from 500 on, else "invalid_request_error"."""

STATUSES: tuple[tuple[type[Exception], int, str | None], ...] = (
    (ConfigError, 400, None),
    (CapacityError, 400, "context_length_exceeded"),
    (DeviceError, 500, "engine_dead"),
    (SpecdecError, 500, None),
)
"""(a class of the engine's errors, status code, the error's code). The first that fits counts."""


class ApiError(Exception):
    """An error with the status code and the body to answer it with.

    param: the field of the request that is wrong, if there is one.
    code: a word for programs, such as "model_not_found".
    headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @classmethod
    def of(cls, error: Exception, fields: Collection[str] = ()) -> ApiError:
        """Make the answer to any exception. One that is no error of the request or the engine is logged with its
        traceback.

        fields: of the request's body. The engine's messages begin with the one that is wrong, as in `top_p=2 ...`.
        """
        if isinstance(error, cls):
            return error
        for kind, status, code in STATUSES:
            if isinstance(error, kind):
                named = re.match(r"\w+", str(error))
                return cls(status, str(error), param=named[0] if named and named[0] in fields else None, code=code)
        logger.error("specdec: a request failed", exc_info=error)
        return cls(500, f"the server has a bug: {type(error).__name__}. Its log has the traceback")

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        return JSONText(self.body, self.status, headers=self.headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of exceptions: answer with OpenAI's shape."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # no client reads it; the access log has it
    if isinstance(error, HTTPException):  # unknown addresses and methods
        error = ApiError(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers
        )
    return ApiError.of(error).response
