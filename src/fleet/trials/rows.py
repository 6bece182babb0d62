"""The trials, as rows, and the functions that judge their answers."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.speech.talk import PromptTooLong, Tool
from fleet.start.gate import LatePattern
from fleet.start.record import replace
from fleet.text.phrases import count_of
from fleet.trials.kit import (
    COUNT_SLACK_TOKENS,
    COUNT_TOLERANCE,
    FILLER,
    FILLER_LINES_LIMIT,
    QUICK_SECONDS,
    SPEED_TOKENS,
    Trial,
    ask_about,
    ask_to_load_model,
    fill_prompt,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from fleet.speech.talk import Call
    from fleet.trials.kit import Answer, Question, Subject


# -- speed --


def _ask_prompt(subject: Subject) -> Question:
    """Return the question whose prompt compares the reading speeds of models."""
    tokens = min(SPEED_TOKENS, subject.model.context // 2)
    return fill_prompt(subject, subject.count_lines(tokens), 1)


def _ask_again(subject: Subject) -> Question:
    """Return a second question about the previous prompt, which the node has cached."""
    lines = len(FILLER)
    if subject.fills:
        lines = subject.fills[-1][0]
    question = fill_prompt(subject, lines, 1, wish="Say it once more.")
    return replace(question, lines=0)  # its words differ, so its count must not be learned


def _ask_long_prompt(subject: Subject) -> Question | None:
    """Return a question of half the context, because long prompts are read more slowly."""
    half = subject.model.context // 2
    if half < 2 * SPEED_TOKENS:
        return None
    return fill_prompt(subject, subject.count_lines(half), 2)


def time_answer(answer: Answer) -> dict[str, Any]:
    """Return the speeds of an answer, from the node's counters or else from our clock."""
    end = answer.end
    reads, writes = end.prompt_seconds or answer.first_seconds, end.answer_seconds
    read, written = end.input_tokens - end.cache_read, end.output_tokens
    first = answer.first_seconds
    if writes is not None:  # the node counts: what it does not report took no time
        first = (end.load_seconds or 0) + (end.prompt_seconds or 0)
    else:  # our clock starts at the first token
        written -= 1
        writes = answer.seconds - answer.first_seconds

    prompt_rate = round(read / reads, 1) if read > 0 and reads else None
    return {"load_seconds": None if end.load_seconds is None else round(end.load_seconds, 2),
            "prompt_rate": prompt_rate, "long_prompt_rate": prompt_rate,
            "answer_rate": round(written / writes, 1) if written > 0 and writes > 0 else None,
            "first_token_seconds": round(first, 3),
            "is_counted": end.prompt_seconds is not None}


# The order matters: the first loads the model and shows how many tokens a line of filler has;
# the third repeats the prompt that the node has cached for the second.
SPEED_TRIALS = (
    Trial("speed", "load", ask_to_load_model, speeds=("load_seconds",)),
    Trial("speed", "prompt", _ask_prompt, speeds=("prompt_rate", "is_counted")),
    Trial("speed", "first token", _ask_again, speeds=("first_token_seconds",),
          is_quick=False),
    Trial("speed", "answer", lambda subject: ask_about(
        subject, "Write the numbers from 1 to 200, one a line, and nothing else.",
        tokens=128),
        speeds=("answer_rate",)),
    Trial("speed", "long prompt", _ask_long_prompt, speeds=("long_prompt_rate",),
          is_quick=False))


# -- tools --


def _tool(name: str, description: str, **properties: Any) -> Tool:
    """Return a tool whose arguments are all required."""
    return Tool(name, description, {"type": "object", "properties": properties,
                                    "required": list(properties)})


# Each of the five has something that weak models get wrong: a name with a dash, an enum, a
# nested object, an array beside a flag. The last one should never be called.
TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
TRIAL_TOOLS = (
    _tool("set-log-level", "Set how much a service logs.", service=TEXT,
          level={"type": "string", "enum": ["debug", "info", "warning", "error"]}),
    _tool("open_ticket", "Open a ticket in the tracker.", title=TEXT,
          owner={"type": "object", "properties": {"name": TEXT, "team": TEXT},
                 "required": ["name", "team"]}),
    _tool("run_tests", "Run tests.", paths=TEXTS, stop_early={"type": "boolean"}),
    _tool("get_setting", "Look up a setting by its key.", key=TEXT),
    _tool("send_mail", "Send a mail.", receivers=TEXTS, text=TEXT))
# Results of the tools. Like an agent, a trial continues until the model calls none.
TRIAL_RESULTS = {"get_setting": "retry_limit = 7391"}
TRIAL_TURNS = 3
TRIAL_CALLS = 16  # more calls in one turn are not an answer
PRINTED_CALL = "printed the call as text"
# A call that was printed instead of made, whichever template or parser failed: with tags
# around it or a marker before it, as JSON with a name and arguments, or as Python.
_TOOL_NAMES = "|".join(tool.name for tool in TRIAL_TOOLS)
_PRINTED_CALL = LatePattern(
    r"(?i)<[|｜]?/?(?:\w+:)?(?:tool|function|invoke)[\w▁]{0,20}[^<>\n]{0,80}>"
    r"|\[/?TOOL_(?:CALLS?|REQUEST)\]|```tool_|\bto=functions\."
    r"|\"(?:name|tool|tool_name|function|action)\"\s*:\s*\"[\w.-]{1,64}\"\s*,"
    r"\s*\"(?:arguments|args|parameters|params|input|action_input)\"\s*:"
    rf"|\b(?:{_TOOL_NAMES})\s*\(")


def calls_rightly(*wanted: tuple[str, dict[str, Any]],
                  says: str = "") -> Callable[[Answer], str]:
    """Return a function that wants these calls, in any order, and then a word."""
    def judge(answer: Answer) -> str:
        is_short = len(answer.calls) < max(len(wanted), 1)
        if is_short and _PRINTED_CALL.search(answer.text):
            return PRINTED_CALL
        if wanted and not answer.calls:
            return "called no tool"
        if answer.calls and not wanted:
            return f"called `{answer.calls[0].name[:64]}` where no tool was needed"
        if len(answer.calls) != len(wanted):
            return f"made {count_of(answer.calls, 'call')}, not {len(wanted)}"
        flaw = _compare_calls(answer.calls, wanted)
        if not flaw and says not in answer.text.replace(",", ""):  # 7391 may be written 7,391
            return (PRINTED_CALL if _PRINTED_CALL.search(answer.text)
                    else f"did not answer {says}")
        return flaw
    return judge


def _compare_calls(calls: Sequence[Call],
                   wanted: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return the flaw of the first call that matches none of the wanted ones."""
    left = list(wanted)
    for call in calls:
        flaws = {_flaw_of(call, *want): want for want in left}
        if "" not in flaws:  # prefer the flaw for a tool of the same name
            return max(flaws, key=lambda flaw: " with " in flaw)
        left.remove(flaws[""])
    return ""


def _flaw_of(call: Call, name: str, wanted: dict[str, Any]) -> str:
    """Return the flaw of a call that should have this name and these arguments."""
    if call.name != name:
        return f"called `{call.name[:64]}` instead of `{name}`"
    for key in {**wanted, **call.arguments}:
        value = call.arguments.get(key)
        if key not in wanted and value:  # an empty one does no harm
            return f"called `{name}` with an unknown `{key[:64]}`"
        if key in wanted and _plain(value) != _plain(wanted[key]):
            return f"called `{name}` with a wrong `{key}`"
    return ""


def _plain(value: Any) -> Any:
    """Return an argument without the case and the outer blanks of its text."""
    if isinstance(value, str):
        return value.strip().lower()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return type(value), value  # JSON's own: 1 is not True


def _call_trial(name: str, text: str, *wanted: tuple[str, dict[str, Any]],
                says: str = "", is_quick: bool = False) -> Trial:
    """Return a trial whose question offers the five tools and expects these calls."""
    return Trial("tools", name, lambda subject: ask_about(subject, text, tools=TRIAL_TOOLS),
                 (calls_rightly(*wanted, says=says),), is_quick=is_quick)


TOOL_TRIALS = (
    _call_trial("an enum, a name with a dash",
                "Set the log level of the service billing to debug.",
                ("set-log-level", {"service": "billing", "level": "debug"}), is_quick=True),
    _call_trial("a nested object",
                'Open a ticket with the title "Login fails". Its owner is Ada, team web.',
                ("open_ticket", {"title": "Login fails",
                                 "owner": {"name": "Ada", "team": "web"}}),
                is_quick=True),
    _call_trial("an array",
                "Run the tests in tests/api and tests/web, in this order; stop early.",
                ("run_tests", {"paths": ["tests/api", "tests/web"], "stop_early": True})),
    _call_trial("none where none fits",
                "How much is 17 plus 25? Answer with the number alone.", says="42"),
    _call_trial("two calls", "Set the log level of the service billing to error and "
                "that of the service search to info.",
                ("set-log-level", {"service": "billing", "level": "error"}),
                ("set-log-level", {"service": "search", "level": "info"})),
    _call_trial("an answer after the result", "What is the value of the setting retry_limit?",
                ("get_setting", {"key": "retry_limit"}), says="7391", is_quick=True))


# -- context --


def _ask_full(subject: Subject) -> Question:
    """Return a question that fills the context; with --quick, as much as is read soon."""
    tokens = subject.model.context - subject.room
    if subject.is_quick:
        readable = int((subject.prompt_rate or 0) * QUICK_SECONDS)
        tokens = min(tokens, max(SPEED_TOKENS, readable))
    return fill_prompt(subject, subject.count_lines(tokens), 3)


def _ask_too_much(subject: Subject) -> Question:
    """Return a question of one token more than the context, by the node's counts."""
    tokens = subject.model.context + 1
    lines = subject.count_lines(tokens)
    missing = max(tokens - subject.count_tokens(lines), 0)
    return fill_prompt(subject, lines, 4, extra=min(missing, FILLER_LINES_LIMIT))


def holds_context(answer: Answer) -> str:
    """Return a flaw if the node holds less context than configured."""
    refusal, question = answer.refusal, answer.question
    if isinstance(refusal, PromptTooLong) and refusal.maximum < question.context:
        return f"holds {refusal.maximum:,} tokens, not {question.context:,}"
    if 0 < question.loaded < question.context:
        return f"is loaded with {question.loaded:,} tokens, not {question.context:,}"
    return answer.missing


def knows_beginning(answer: Answer) -> str:
    """Return a flaw if the answer lacks the code word from the beginning of the prompt."""
    if answer.question.word.lower() in answer.text.lower():
        return holds_context(answer)
    return f"lost the beginning of a prompt of {answer.question.tokens:,} tokens"


def counts_rightly(answer: Answer) -> str:
    """Return a flaw if the node counted fewer or more tokens than were sent."""
    expected, counted = answer.question.tokens, answer.end.input_tokens
    if abs(counted - expected) <= COUNT_SLACK_TOKENS + COUNT_TOLERANCE * expected:
        return ""
    return f"counted {counted:,} tokens of about {expected:,}"


def refuses_too_much(answer: Answer) -> str:
    """Return a flaw if a prompt that is too long is not refused as clients expect it."""
    if isinstance(answer.refusal, PromptTooLong):
        return ""
    if answer.missing:
        return f"too long a prompt: {answer.missing}"
    # It may hold more than the fleet file says; it must not lose anything.
    if knows_beginning(answer) or counts_rightly(answer):
        return "cuts a prompt that is too long instead of refusing it"
    return ""


def find_flaws(trial: Trial, answer: Answer) -> list[str]:
    """Return what each judge says about an answer; "" means no flaw."""
    if answer.missing and refuses_too_much not in trial.judges:
        return [holds_context(answer)] * len(trial.judges)
    return [judge(answer) for judge in trial.judges]


CONTEXT_TRIALS = (
    Trial("context", "full", _ask_full, (knows_beginning, counts_rightly)),
    Trial("context", "one token more", _ask_too_much, (refuses_too_much,), is_quick=False))


TRIALS = (*SPEED_TRIALS, *TOOL_TRIALS, *CONTEXT_TRIALS)
