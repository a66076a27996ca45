"""The front page at /: it compares plain and speculative decoding in a browser."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response


class FrontPage:
    """Answers with one file, which has its style and its script in it and loads nothing but this server's API. The
    browser runs no other script in it, wherever that came from."""

    def __init__(self) -> None:
        self._text = files("specdec_server").joinpath("front_page.html").read_text(encoding="utf-8")
        self._headers = {
            "content-security-policy": "; ".join(
                [
                    "default-src 'none'",
                    f"script-src {_hash_of('script', self._text)}",
                    f"style-src {_hash_of('style', self._text)}",
                    "connect-src 'self'",
                    "img-src data:",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                ]
            ),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    async def answer(self, request: Request) -> Response:
        return HTMLResponse(self._text, headers=self._headers)


def _hash_of(element: str, text: str) -> str:
    """The source expression of Content-Security-Policy that allows the file's only such element."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
