"""One poll of one backend: which engine it is, what it serves, how busy it is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx

from backends.engines.observation import Observation
from backends.engines.replies import Question, Reply
from backends.engines.table import DETECTION, ENGINES, detect
from backends.fetch import UnansweredError, ask, new_client

#: Seconds for all questions of one poll together.
TOTAL_SECONDS = 4.0
#: Of the questions whose answers are kept, asked in one poll at most.
_MAX_DETAILS = 32
_MAX_ERROR_LENGTH = 300
#: Statuses that tell something lasting; others are a mishap of the moment.
_LASTING = frozenset({200, 400, 404, 405, 501})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A backend to poll. ``known_engine``: what the last good poll found, or ""."""

    base_url: str
    engine: str = "auto"
    known_engine: str = ""
    api_key: str | None = field(default=None, repr=False)
    connect_timeout: float = 5.0
    total_seconds: float = TOTAL_SECONDS

    @property
    def root(self) -> str:
        """The base URL without the ``/v1`` that it may end in."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What a poll came to.

    ``reachable``: True after a good poll, that is when the list of models could be read. False
    when the connection was refused or the server says that it cannot serve yet. None otherwise, a
    time-out for example: then nothing is known. ``observation`` is None unless the poll was good.
    """

    reachable: bool | None
    error: str = ""
    engine: str = ""
    observation: Observation | None = None


async def probe(target: Target) -> ProbeResult:
    """Poll ``target``, within its ``total_seconds``. Never raises for what the server does."""
    poll = _Poll(target)
    try:
        async with asyncio.timeout(target.total_seconds):
            await poll.run()
    except TimeoutError:
        poll.error(f"no whole answer within {target.total_seconds:g} s")
    except UnansweredError as error:
        if error.refused:
            details.forget(target.root)
            return ProbeResult(reachable=False, error=str(error))
        poll.error(str(error))
    return poll.result()


class _Poll:
    """The answers so far, so that a time-out late in a poll loses only what is missing."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.engine = "" if target.engine == "auto" else target.engine
        self.replies: dict[Question, Reply] = {}
        self.errors: list[str] = []

    def error(self, text: str) -> None:
        self.errors.append(text)

    async def run(self) -> None:
        target = self.target
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else None
        connect_timeout = min(target.connect_timeout, target.total_seconds)
        async with new_client(connect_timeout=connect_timeout, headers=headers) as client:
            await self._ask_engine(client, self.engine or target.known_engine)
            if target.engine == "auto":
                await self._settle_engine(client)
            if self.engine and not self.unready():
                await self._ask_details(client)

    async def _ask_engine(self, client: httpx.AsyncClient, engine: str) -> None:
        first, *others = ENGINES[engine].questions if engine else DETECTION
        self.replies[first] = await ask(client, self.target.root, first)
        if self.replies[first].status != 503:  # else it is not there yet: spare it the rest
            await self._ask_all(client, others)

    async def _settle_engine(self, client: httpx.AsyncClient) -> None:
        """Find out the engine anew at each poll, from what was asked anyway where possible."""
        self.engine = detect(self.replies)
        if self.engine != self.target.known_engine and self.target.known_engine:
            await self._ask_all(client, DETECTION)
            self.engine = detect(self.replies)
        if self.engine and not self.unready():
            await self._ask_all(client, ENGINES[self.engine].questions)

    async def _ask_details(self, client: httpx.AsyncClient) -> None:
        questions = ENGINES[self.engine].follow_up(self.replies)
        for question in questions:
            kept = details.get(self.target.root, question)
            if kept is not None:
                self.replies[question] = kept
        await self._ask_all(client, [q for q in questions if q not in self.replies][:_MAX_DETAILS])

    async def _ask_all(self, client: httpx.AsyncClient, questions: Iterable[Question]) -> None:
        missing = [q for q in questions if q not in self.replies]
        await asyncio.gather(*(self._ask(client, question) for question in missing))

    async def _ask(self, client: httpx.AsyncClient, question: Question) -> None:
        try:
            reply = await ask(client, self.target.root, question)
        except UnansweredError as error:
            self.error(str(error))
            return
        self.replies[question] = reply
        if (question.cache and reply.status < 500) or reply.status == 501:
            details.keep(self.target.root, question, reply)

    def unready(self) -> bool:
        questions = ENGINES[self.engine].questions if self.engine else DETECTION
        first = self.replies.get(questions[0]) or next(iter(self.replies.values()), None)
        return first is not None and first.status == 503

    def result(self) -> ProbeResult:
        engine = self.engine or detect(self.replies)
        if self.unready():
            details.forget(self.target.root)
            return ProbeResult(reachable=False, error="503: not ready to serve", engine=engine)
        observation = ENGINES[engine].parse(self.replies) if engine else Observation()
        if observation.unready:
            return ProbeResult(reachable=False, error=observation.unready, engine=engine)
        if observation.models is None:
            return ProbeResult(reachable=None, error=self._why(), engine=engine)
        return ProbeResult(
            reachable=True, error=self._noted(), engine=engine, observation=observation
        )

    def _noted(self) -> str:
        return "; ".join(dict.fromkeys(self.errors))[:_MAX_ERROR_LENGTH]

    def _why(self) -> str:
        """Why the list of models could not be read."""
        statuses = {reply.status for reply in self.replies.values()}
        if statuses & {401, 403}:
            self.error("it refuses the router's key (401)" if 401 in statuses else "403")
        wrong = [f"{q.path}: {r.status}" for q, r in self.replies.items() if r.status >= 400]
        return self._noted() or "; ".join(wrong)[:_MAX_ERROR_LENGTH] or "no list of models"


class _Details:
    """Answers that hold until a server is upgraded or restarted. Shared by all threads."""

    _MAX = 4096
    _SECONDS = 600.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, Question], tuple[float, Reply]] = OrderedDict()

    def get(self, root: str, question: Question) -> Reply | None:
        with self._lock:
            kept = self._kept.get((root, question)) if question.cache else None
        if kept is None or time.monotonic() - kept[0] > self._SECONDS:
            return None
        return kept[1]

    def keep(self, root: str, question: Question, reply: Reply) -> None:
        with self._lock:
            self._kept[root, question] = (time.monotonic(), reply)
            while len(self._kept) > self._MAX:
                self._kept.popitem(last=False)

    def forget(self, root: str) -> None:
        """Drop what ``root`` told: it may come back as another server."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == root]:
                del self._kept[key]


details = _Details()
