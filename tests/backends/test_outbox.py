"""What leaves in a turn of the event loop, in which order, and what is done before."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from backends.outbox import MOST_WAITING, Outbox
from backends.pace import BATCH_SECONDS, Pace


class Sending:
    """A sender that notes when it was told to send."""

    def __init__(self, sent: list[str], name: str) -> None:
        self._sent = sent
        self._name = name

    def send_unsent(self) -> None:
        self._sent.append(self._name)


class Failing:
    def send_unsent(self) -> None:
        raise OSError("broken")


def noted() -> tuple[list[str], Outbox, Callable[[str], None]]:
    """(what happened, an outbox, what adds a sender of a name)."""
    seen: list[str] = []
    outbox = Outbox(lambda: seen.append("before"))
    return seen, outbox, lambda name: outbox.add(Sending(seen, name))


async def test_the_first_of_a_turn_leaves_at_once_and_the_others_together_at_its_end() -> None:
    seen, _, add = noted()
    for name in "abc":
        add(name)
    assert seen == ["before", "a"]
    await asyncio.sleep(0)
    assert seen == ["before", "a", "before", "b", "c"]
    add("d")
    assert seen[5:] == ["before", "d"]


async def test_a_turn_in_which_one_leaves_ends_without_anything_more() -> None:
    seen, _, add = noted()
    add("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == ["before", "a"]


async def test_so_many_waiting_do_not_wait_for_the_end_of_the_turn() -> None:
    seen, _, add = noted()
    for number in range(MOST_WAITING):
        add(str(number))
    assert seen == ["before", "0"]
    add("last")
    assert seen[2:] == ["before", *map(str, range(1, MOST_WAITING)), "last"]


async def test_flushing_has_those_who_wait_send_at_once_and_once() -> None:
    seen, outbox, add = noted()
    outbox.flush()
    assert seen == []
    add("a")
    add("b")
    outbox.flush()
    await asyncio.sleep(0)
    assert seen == ["before", "a", "before", "b"]


async def test_one_that_fails_keeps_nobody_behind_it_from_sending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen, outbox, add = noted()
    add("a")
    outbox.add(Failing())
    add("b")
    await asyncio.sleep(0)
    assert seen == ["before", "a", "before", "b"]
    assert "cannot send" in caplog.text


@pytest.fixture
def gathering(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Outbox]:
    """(what happened, an outbox in the middle of many events); each rest is a tenth of a
    millisecond less than a batch's time."""
    seen, outbox, _ = noted()
    now = 1000.0
    outbox.pace = Pace(lambda: now)
    assert outbox.pace.begins()
    now += 0.000_1
    monkeypatch.setattr("backends.outbox.sleep", lambda seconds: seen.append(f"{seconds:.4f}"))
    return seen, outbox


async def test_gathered_events_leave_together_before_the_process_rests(
    gathering: tuple[list[str], Outbox],
) -> None:
    seen, outbox = gathering
    for name in "abc":
        outbox.gather(Sending(seen, name))
    assert seen == []
    await asyncio.sleep(0)
    assert seen == ["before", "a", "b", "c"]
    await asyncio.sleep(0)
    assert seen == ["before", "a", "b", "c", f"{BATCH_SECONDS - 0.000_1:.4f}"]


@pytest.mark.parametrize("order", ["request first", "event first"])
async def test_a_turn_with_a_request_does_not_rest(
    gathering: tuple[list[str], Outbox], order: str
) -> None:
    seen, outbox = gathering
    if order == "request first":
        outbox.add(Sending(seen, "request"))
        outbox.gather(Sending(seen, "event"))
        expected = ["before", "request", "before", "event"]
    else:
        outbox.gather(Sending(seen, "event"))
        outbox.add(Sending(seen, "request"))
        expected = ["before", "event", "request"]
    await asyncio.sleep(0)
    assert seen == expected
    outbox.gather(Sending(seen, "next"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [*expected, "before", "next"] == seen[:-1]  # and a rest


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_an_event_woke_or_came_with_runs_before_the_rest(
    gathering: tuple[list[str], Outbox], loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    seen, outbox = gathering

    async def request() -> None:
        seen.append("request begins")
        outbox.add(Sending(seen, "request"))

    async def run() -> None:
        tasks = []

        class Reading(asyncio.Protocol):
            def __init__(self, name: str) -> None:
                self.name = name

            def data_received(self, data: bytes) -> None:
                if self.name == "stream":
                    outbox.gather(Sending(seen, "event"))
                tasks.append(asyncio.create_task(request()))

        ends = [socket.socketpair(), socket.socketpair()]
        for name, (ours, _) in zip(("stream", "other"), ends, strict=True):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda name=name: Reading(name), ours
            )
        for _, theirs in ends:
            theirs.send(b"x")
        while len(tasks) < 2:  # noqa: ASYNC110  each turn counts here
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)
        for _, theirs in ends:
            theirs.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
    assert seen.count("request begins") == 2
    assert not [one for one in seen if one.startswith("0.0")]  # no rest


async def test_a_rest_is_left_to_the_end_of_a_turn_that_has_begun_meanwhile(
    gathering: tuple[list[str], Outbox],
) -> None:
    seen, outbox = gathering
    outbox.gather(Sending(seen, "a"))
    await asyncio.sleep(0)
    outbox.gather(Sending(seen, "b"))
    await asyncio.sleep(0)
    assert seen == ["before", "a", "before", "b"]
    await asyncio.sleep(0)
    assert len(seen) == 5  # and a rest


async def test_a_turn_without_events_does_not_rest(gathering: tuple[list[str], Outbox]) -> None:
    seen, outbox = gathering
    outbox.add(Sending(seen, "a"))
    await asyncio.sleep(0)
    assert seen == ["before", "a"]


async def test_so_many_gathered_events_do_not_wait_for_the_end_of_the_turn(
    gathering: tuple[list[str], Outbox],
) -> None:
    seen, outbox = gathering
    for number in range(MOST_WAITING):
        outbox.gather(Sending(seen, str(number)))
    assert seen == ["before", *map(str, range(MOST_WAITING))]


@given(st.lists(st.sampled_from(["add", "gather", "turn", "flush"]), max_size=100))
def test_all_leave_once_and_in_the_order_they_came(steps: list[str]) -> None:
    seen, outbox, add = noted()

    async def run() -> None:
        for number, step in enumerate(steps):
            if step == "add":
                add(str(number))
            elif step == "gather":
                outbox.gather(Sending(seen, str(number)))
            elif step == "flush":
                outbox.flush()
            else:
                await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    added = [str(number) for number, step in enumerate(steps) if step in ("add", "gather")]
    assert [one for one in seen if one != "before"] == added
