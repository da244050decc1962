"""OpenAI's whole answers, as the few things that the other forms are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mindrouter.gateway.dialects.completions import (
    CallPart,
    Ending,
    Function,
    Said,
    parse_completion,
)
from mindrouter.gateway.dialects.translation import Reply, ended_early, invalid_answer
from mindrouter.gateway.requests import estimate_tokens
from scheduler.core.jobs import Usage


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; ``arguments`` is the text that the model wrote."""

    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Answer:
    """A whole answer's first choice: no other form can ask for several."""

    text: str
    reasoning: str
    refusal: str
    calls: list[Call]
    ending: Ending
    logprobs: list[msgspec.Raw] = field(default_factory=list)

    def usage(self, reply: Reply) -> Usage:
        """What the backend told, or an estimate."""
        if self.ending.usage is not None:
            return self.ending.usage
        texts = [self.text, self.reasoning, self.refusal, *(c.arguments for c in self.calls)]
        return Usage(
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=sum(
                estimate_tokens(len(t.encode("utf-8", "replace"))) for t in texts
            ),
            estimated=True,
        )


def read_answer(body: bytes, reply: Reply) -> Answer:
    """A chat completion or a completion. Raises: GatewayError where it is none."""
    parsed = parse_completion(body)
    if not parsed.choices:
        raise invalid_answer("an answer without choices")
    choice = parsed.choices[0]
    said = choice.message or Said(content=choice.text)
    ending = Ending()
    ending.note(parsed)
    ending.note_choice(choice)
    if not ending.reason:
        raise ended_early()
    return Answer(
        text=(said.content or "").removeprefix(reply.begun),
        reasoning=said.reasoning_content or said.reasoning or "",
        refusal=said.refusal or "",
        calls=[_whole_call(call, n, reply) for n, call in enumerate(said.tool_calls or ())],
        ending=ending,
        logprobs=(choice.logprobs and choice.logprobs.content) or [],
    )


def _whole_call(call: CallPart, position: int, reply: Reply) -> Call:
    function = call.function or Function()
    return Call(
        call.id or made_up_call_id(reply, position), function.name or "", function.arguments or ""
    )


def made_up_call_id(reply: Reply, position: int) -> str:
    """For engines that give their calls no ids, which results must be able to refer to."""
    return f"call_{reply.reply_id}_{position}"
