"""HTTP to one engine: whole answers, deadlines, few retries, and errors that name everything.

A call is sent again only while nothing of an answer was read, so no answer is ever thrown away to
be asked for twice. What goes wrong is one of three errors: `TransportError` (no whole answer came),
`EngineRefusal` (an answer that says no), `UnusableAnswer` (an answer that is not what it should
be).
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import aiohttp
import msgspec

from headway.errors import EngineRefusal, TransportError, UnusableAnswer

_T = TypeVar("_T")

CONTROL_SECONDS = 10.0
"""Deadline of a call that only tells or asks the engine something."""
_NUM_RETRIES = 2
_RETRY_SECONDS = 0.05
_CONNECT_SECONDS = 10.0
_MAX_MESSAGE_CHARACTERS = 500
_HEADERS = {"Content-Type": "application/json"}
_HTTP_OK = 200


class HttpClient:
    """Calls to one server.

    Args:
        name: of the engine, for messages.
        url: such as `http://127.0.0.1:8000`.

    Connections are made at the first use, inside the running loop, and kept.
    """

    def __init__(self, *, name: str, url: str) -> None:
        self._name = name
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        deadline_seconds: float | None = CONTROL_SECONDS,
        num_retries: int = _NUM_RETRIES,
    ) -> bytes:
        """Send `body` as JSON and read the whole answer.

        `deadline_seconds` None: the caller cancels (a completion takes as long as it takes).
        Raises TransportError or EngineRefusal.
        """
        if deadline_seconds is None:
            return await self._call(method, path, body, num_retries)
        try:
            async with asyncio.timeout(deadline_seconds):
                return await self._call(method, path, body, num_retries)
        except TimeoutError:
            raise TransportError(
                f"engine {self._name} at {self.url} gave no answer to {path} within "
                f"{deadline_seconds:g} s"
            ) from None

    async def get(self, path: str, kind: type[_T]) -> _T:
        """The answer to a GET, decoded. Raises UnusableAnswer when it is no such thing."""
        return self.decode(path, await self.call("GET", path), kind)

    async def post(self, path: str, body: Any, kind: type[_T]) -> _T:
        """The answer to a POST, decoded. Raises UnusableAnswer when it is no such thing."""
        return self.decode(path, await self.call("POST", path, body), kind)

    def decode(self, path: str, answer: bytes, kind: type[_T]) -> _T:
        """Check an answer against its type. Raises UnusableAnswer."""
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise UnusableAnswer(
                f"engine {self._name} gave an unusable answer to {path}: {error}; it begins "
                f"{answer[:80]!r}"
            ) from error

    async def aclose(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, method: str, path: str, body: Any, num_retries: int) -> bytes:
        data = b"" if body is None else msgspec.json.encode(body)
        for attempt in range(num_retries + 1):
            try:
                response = await self._open().request(
                    method, self.url + path, data=data, headers=_HEADERS
                )
            except (aiohttp.ClientError, OSError) as error:
                if attempt == num_retries:
                    self._lost(path, error)
                await asyncio.sleep(_RETRY_SECONDS * 2**attempt)
                continue
            async with response:
                try:
                    answer = await response.read()
                except (aiohttp.ClientError, OSError) as error:
                    self._lost(path, error)
            if response.status != _HTTP_OK:
                raise EngineRefusal(
                    f"engine {self._name} answered {path} with {response.status}: "
                    f"{_message(answer)}",
                    status=response.status,
                    retry_after_seconds=_retry_after(response.headers),
                )
            return answer
        raise AssertionError("unreachable")

    def _lost(self, path: str, error: Exception) -> NoReturn:
        raise TransportError(
            f"engine {self._name} at {self.url} broke off {path}: {type(error).__name__}: {error}"
        ) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # One connection per request in flight; the capacity gate is what bounds them.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def sum_metric(text: str, name: str) -> float:
    """Sum of a metric over its labels in Prometheus text; 0 when it is not there."""
    total = 0.0
    for line in text.splitlines():
        label, _, value = line.rpartition(" ")
        if label.partition("{")[0] == name:
            total += float(value)
    return total


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds; the header's other form, a date, is taken for none."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


def _message(answer: bytes) -> str:
    """The server's own words, out of one of the shapes in which it wraps them."""
    try:
        content = msgspec.json.decode(answer)
    except msgspec.MsgspecError:
        content = answer.decode(errors="replace")
    for key in ("error", "detail", "message"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return str(content)[:_MAX_MESSAGE_CHARACTERS]
