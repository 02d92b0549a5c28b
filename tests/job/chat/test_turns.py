"""Conversations in tokens: what a further turn evaluates in blocks leaves those of the turns before it as they are."""

from __future__ import annotations

import random
from itertools import pairwise

from pipeinfer.core.blocks import BLOCK, Span, spans_of
from pipeinfer.job.requests.body_prompts import MAX_TURNS, spans_of_turns, turns_of
from pipeinfer.models.text.messages import ChatMessage

SYSTEM, USER, ASSISTANT = ChatMessage("system", "s"), ChatMessage("user", "u"), ChatMessage("assistant", "a")


def test_a_conversation_is_cut_before_each_answer() -> None:
    assert turns_of([]) == []
    assert turns_of([SYSTEM, USER]) == [[SYSTEM, USER]]
    said = [SYSTEM, USER, ASSISTANT, USER, USER, ASSISTANT, USER]
    assert turns_of(said) == [said[:2], said[:5], said]
    assert turns_of([ASSISTANT, USER]) == [[ASSISTANT, USER]], "nothing was said before it"
    many = [USER, ASSISTANT] * 100 + [USER]
    assert len(turns_of(many)) == MAX_TURNS + 1 and turns_of(many)[:-1] == turns_of([*many, ASSISTANT, USER])[:-1]


def test_spans_of_a_turn_begin_with_those_of_the_turn_before() -> None:
    rng = random.Random(1)
    for _ in range(300):
        prompts = [[rng.randrange(9) for _ in range(rng.randint(1, 200))]]
        for _ in range(rng.randint(1, 5)):
            prompts.append([*prompts[-1], *(rng.randrange(9) for _ in range(rng.randint(1, 150)))])
        before: tuple[Span, ...] = ()
        for n in range(1, len(prompts) + 1):
            spans = spans_of_turns(prompts[:n])
            assert spans[: len(before)] == before
            assert all(first.end <= second.start for first, second in pairwise(spans))
            assert all(span.end - span.start >= BLOCK and span.end < len(prompts[n - 1]) for span in spans)
            before = spans


def test_a_turn_whose_tokens_changed_is_cut_where_they_did() -> None:
    first = list(range(200))
    assert spans_of_turns([first]) == spans_of(200)
    other = [*range(150), *range(1000, 1200)]
    spans = spans_of_turns([first, other])
    assert spans == (Span(0, 128), Span(128, 349)), "whole blocks of what is the same"
