"""What the leading scheduler knows of each gateway: its jobs, and what is to be told to it."""

from __future__ import annotations

import time
from collections.abc import Callable

from scheduler.bus.messages import (
    VERSION,
    Inward,
    Leased,
    Outward,
    Queued,
    Refused,
    ToGateway,
    encode,
)
from scheduler.core.errors import SchedulerError
from scheduler.runtime import OwnClaim, Runtime

NO_NAMES: dict[int, str] = {}


class Peer:
    """A gateway, as the scheduler knows it."""

    def __init__(self, name: str, send: Callable[[Peer], None]) -> None:
        self.name = name
        self.session = 0
        self._received = 0  # batches in this session
        self.heard_at = time.monotonic()
        self.applied = 0  # the serial of the last settlement that was counted
        self.jobs: dict[int, Held] = {}
        self.asks_again: set[int] = set()  # submissions in its latest batch
        self.outbox: list[ToGateway] = []
        self._sent = 0
        self._send = send

    def begin_session(self, session: int) -> None:
        """It has told everything anew, in its first batch."""
        self.session, self._received, self._sent = session, 1, 0
        self.outbox.clear()

    def takes(self, batch: Inward) -> bool:
        """Whether this is the batch after the last one. Once one is missing, none is."""
        if (batch.session, batch.number) != (self.session, self._received + 1):
            return False
        self._received += 1
        return True

    def tell(self, message: ToGateway) -> None:
        if not self.outbox:
            self._send(self)
        self.outbox.append(message)

    def batch(self, epoch: int) -> bytes:
        messages, self.outbox = self.outbox, []
        self._sent += 1
        return encode(Outward(VERSION, epoch, self.session, self._sent, messages))

    def refuse(self, number: int, error: SchedulerError, *, after_queueing: bool) -> None:
        self.tell(
            Refused(
                number,
                after_queueing,
                error.reason,
                error.message,
                error.retry_after,
                error.hopeless,
            )
        )


class Held:
    """One job of a gateway: passes on what becomes of its ticket."""

    __slots__ = ("claim", "number", "peer", "runtime")

    def __init__(self, runtime: Runtime, peer: Peer, number: int, claim: OwnClaim) -> None:
        self.runtime = runtime
        self.peer = peer
        self.number = number
        self.claim = claim
        claim.ticket.owner = self
        peer.jobs[number] = self

    def wake(self) -> None:
        """Its ticket has changed."""
        if self.claim.hold is not None:
            self.claim.hold.proceed()
        ticket = self.claim.ticket
        if ticket.state == "leased":
            self.tell_lease()
        elif ticket.state == "evicted":
            error = ticket.error
            assert error is not None  # noqa: S101  an evicted ticket says why
            self.peer.refuse(self.number, error, after_queueing=True)
            self.leave()

    def tell_state(self) -> None:
        """In answer to a submission."""
        if self.claim.ticket.state == "leased":
            self.tell_lease()
        else:
            ticket = self.claim.ticket
            self.peer.tell(
                Queued(
                    self.number,
                    ticket.position_at_arrival,
                    ticket.wait_reason,
                    self.claim.limited,
                )
            )

    def tell_lease(self) -> None:
        ticket = self.claim.ticket
        lease = ticket.lease
        assert lease is not None  # noqa: S101  it is leased
        self.peer.tell(
            Leased(
                self.number,
                ticket.attempts,
                lease.backend_id,
                lease.backend_name,
                lease.model_name,
                self.runtime.scheduler.token_rate(lease.backend_id),
                lease.hold,
                lease.decision._replace(names=NO_NAMES),
                ticket.position_at_arrival,
                ticket.wait_reason,
                self.claim.limited,
            )
        )

    def leave(self) -> None:
        """It has ended; what is still held is given back without charge."""
        self.peer.jobs.pop(self.number, None)
        self.claim.leave()
