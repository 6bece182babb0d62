"""What a model's name tells, and names that are still free."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.start.gate import LatePattern

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeVar

    from fleet.config.node import LoadedModel, NodeModel
    from fleet.config.sections import Model
    _Named = TypeVar("_Named", "NodeModel", "LoadedModel")


def leaves_house(ollama_model: str) -> bool:
    """Tell whether Ollama sends requests for this name to ollama.com."""
    return ollama_model.lower().endswith((":cloud", "-cloud"))


def full_model_name(name: str) -> str:
    """Return a name as Ollama compares it: tag, library and registry have defaults."""
    name = name.lower().removeprefix("registry.ollama.ai/").removeprefix("library/")
    has_tag = ":" in name.rsplit("/", 1)[-1]
    return name if has_tag else name + ":latest"


_BILLIONS = LatePattern(r"(?:(\d+)x)?(\d+(?:\.\d+)?)b(?![a-z])")


def billions(ollama_model: str) -> float:
    """Return the parameters in billions that a model's name tells, else 0."""
    sizes = _BILLIONS.findall(ollama_model.lower())
    return max((float(times or 1) * float(size) for times, size in sizes), default=0)


def prints_calls(ollama_model: str) -> bool:
    """Tell whether a model is known to write its tool calls down instead of making them."""
    return "qwen2.5-coder" in ollama_model.lower()


# What ollama.com offers without tools (November 2026), for where no machine is asked.
_TOOLLESS = LatePattern(
    "(?:.*/)?(?:(?:code)?gemma[23]?n?|(?:bak)?llava|llama2|codellama|moondream|"
    "phi[34]?|deepseek-coder|starcoder2?|tinyllama)(?::.*)?")


def lacks_tools(ollama_model: str) -> bool:
    """Tell whether a model's name alone says that it does not call tools."""
    return prints_calls(ollama_model) or bool(_TOOLLESS.fullmatch(ollama_model.lower()))


def model_slot(model: Model) -> tuple[str, str]:
    return model.node, full_model_name(model.ollama_model)


def find_models(models: Iterable[_Named], ollama_model: str) -> list[_Named]:
    """Return those of a node's models, on its disk or in its memory, that have this name."""
    full_name = full_model_name(ollama_model)
    return [model for model in models if full_model_name(model.name) == full_name]


def make_name(text: str, otherwise: str) -> str:
    """Return text as a name that a fleet file accepts."""
    return re.sub("[^A-Za-z0-9._]+", "-", text).strip("-._")[:64].lower() or otherwise


def free_name_of(name: str, more: str, *, taken: set[str]) -> str:
    """Return a name that is not taken: with the node's behind it, then with a number."""
    number = 1
    free = name
    while free in taken:
        behind = f"-{more[:40]}"
        if number > 1:
            behind += f"-{number}"
        free = f"{name[:64 - len(behind)]}{behind}"
        number += 1
    return free
