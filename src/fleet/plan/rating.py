"""How well a model serves a role."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.names import leaves_house, prints_calls
from fleet.config.rules import obeys
from fleet.plan.roles import MAIN_CONTEXT_TOKENS
from fleet.start.record import Record

if TYPE_CHECKING:
    from fleet.config.node import NodeModel


class Rating(Record):
    """How well a model serves Claude Code, and its flaw."""

    score: int  # 0: not at all
    flaw: str = ""


ABLE = 4  # the score of a model that calls tools and holds Claude Code's own prompt


def rate_model(model: NodeModel, calls_tools: bool | None = None) -> Rating:
    """Return how well a model serves Claude Code, and its flaw.

    Whether it `calls_tools` is believed where it was measured; None: as the node says.
    """
    name = model.name.lower()
    if model.remote or leaves_house(name):
        return Rating(0, "does not run there")
    if not can_chat(model):
        return Rating(0, "cannot chat")

    flaw = ""  # an agent that cannot act is worse than one that compacts early: said first
    if calls_tools is None:
        calls_tools = "tools" in (model.capabilities or ()) and not prints_calls(name)
        if prints_calls(name):
            flaw = "prints tool calls as text"
        elif model.capabilities and not calls_tools:  # empty: an Ollama that does not say
            flaw = "cannot call tools"
    elif not calls_tools:
        flaw = "did not call tools when `bench` tried"

    score = 3 if calls_tools else 1
    context = model.trained_context or MAIN_CONTEXT_TOKENS
    if context >= MAIN_CONTEXT_TOKENS:
        return Rating(score + 1, flaw)
    return Rating(score, flaw or f"holds {context} tokens; Claude Code's own prompt takes "
                  "10,000 to 18,000")


def can_chat(model: NodeModel) -> bool:
    """Tell whether a model answers, and by a name that a fleet file accepts."""
    if not obeys(model.name, "line"):
        return False
    if model.capabilities is None:
        return not re.search("embed|minilm|bge-", model.name.lower())
    return "completion" in model.capabilities
