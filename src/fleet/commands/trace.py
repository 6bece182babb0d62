"""`trace`: show which machine served which agent."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import known_fleet
from fleet.cli.rows import CONFIG, JSON, LOOK, OUT, Flag, command, parse_age
from fleet.cli.say import open_workspace, print_report, tell
from fleet.start.constants import EXIT_OK, EXIT_PROBLEM
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.text.phrases import count_of, first_line, show_amount, show_moment, show_span
from fleet.text.tables import format_table, format_words
from fleet.text.terminal import (
    PLAIN,
    Cell,
    clean_line,
    crop,
    mark,
    plan_machine_colours,
)
from fleet.traces.audit import QUESTIONS, show_session
from fleet.traces.judge import TraceFacts
from fleet.views.requests import name_task_sessions
from fleet.work.shown import find_task_rows
from fleet.workspace.claude import (
    find_agent_sources,
    find_sessions,
    read_first_prompt,
    read_session,
    subagent_paths,
)
from fleet.workspace.config import find_config, look_of
from fleet.workspace.records import LISTED_SESSIONS, read_receipts

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.text.terminal import Look
    from fleet.traces.audit import SessionReport
    from fleet.traces.judge import Served
    from fleet.workspace.claude import SessionFile
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


_PLANNED_WORDS = {"yes": ("yes", "ok"), "fallback": ("fallback", "warn"), "no": ("no", "bad"),
                  "failed": ("failed", "bad"), "left": ("no", "bad"),
                  "unknown": ("not known", "warn")}
_TRACE_HEADERS = ("Agent", "Model", "Machine", "Requests", "Waited", "First token", "tok/s",
                  "In", "Out", "As planned")
# Columns that a narrow terminal leaves out, in this order.
_TRACE_SPARES = ("First token", "Waited", "tok/s", "Out", "Requests", "In")


def format_trace(report: SessionReport, look: Look = PLAIN) -> str:
    """Return a session as a tree: each agent, and which model on which machine served it."""
    fleet = report.facts.fleet
    colours = plan_machine_colours(fleet.nodes) if fleet else {}
    depths = [told.agent.depth for told in report.agents]
    rows = []
    after = ""
    for index, told in enumerate(report.agents):
        branch, stem = _draw_branch(depths, index, look)
        name = branch + told.agent.kind
        if not told.served:
            rows.append([name, *"-" * 8, Cell(told.state or "nothing was asked", "dim")])
        for served in told.served:
            state = told.state if name != stem and told.state != "done" else ""
            rows.append([name, *_trace_cells(served, colours),
                         _format_planned(served, state, report.facts.now, look)])
            name = stem
            after += _tell_rereading(told.agent.kind, served, look)

    for place in report.session.torn[:3]:
        flaw = Cell(f"{place} cannot be read; it is cut off or not JSON")
        after += format_words([Cell("warning:", "warn"), flaw], look, indent="  ")
    head = format_words([Cell(_tell_session(report))], look, indent="  ")
    return f"{head}\n" + format_table(_TRACE_HEADERS, rows, look=look,
                                      right=_TRACE_HEADERS[3:-1], spare=_TRACE_SPARES) + after


def _trace_cells(served: Served, colours: Mapping[str, int]) -> list[object]:
    """Return the cells for what one model on one machine did for an agent."""
    machine = Cell(served.node or "?")
    if served.node in colours:
        machine = Cell(served.node, f"machine {colours[served.node]}")
    return [served.model or served.route, machine, served.requests,
            show_span(round(served.waited_seconds or 0, 1) or None),
            show_span(served.first_token_seconds),
            f"{served.answer_rate:.0f}" if served.answer_rate else "-",
            show_amount(served.input_tokens), show_amount(served.output_tokens)]


def _tell_rereading(name: str, served: Served, look: Look) -> str:
    """Return what a machine had to read again for an agent and why, and what it waited for."""
    said = []
    if served.read_again_tokens:
        why = served.read_again_why.replace("pushed out",
                                            "other prompts had pushed them out of the cache")
        said.append(f"{served.read_again_tokens:,} tokens were read twice "
                    f"({why})")
    if served.waited_for:
        said.append(f"it waited for {served.waited_for}")
    if not said:
        return ""
    words = f"{name} on {served.node}: {'; '.join(said)}"
    return format_words([Cell("note:", "dim"), Cell(words)], look, indent="  ")


def _draw_branch(depths: Sequence[int], index: int, look: Look) -> tuple[str, str]:
    """Return the branches before an agent's name in a tree, and before its other lines."""
    branch = stem = ""
    gap = "" if look.columns < 80 else " "  # a name that wraps would be worse
    for depth in range(1, depths[index] + 1):
        # Another agent follows on this branch if it comes before one that is nearer to the root.
        later = next((other for other in depths[index + 1:] if other <= depth), 0)
        line, corner = ("│ ", "├") if later == depth else ("  ", "└")
        branch = stem + (corner + gap if look.marks else "  ")
        stem += line if look.marks else "  "
    return branch, stem.rstrip()


def _format_planned(served: Served, state: str, now: float, look: Look) -> Cell:
    """Return whether the agent was served as planned, what happened instead, and its state."""
    word, role = _PLANNED_WORDS[served.planned]
    words = f"{word}: {served.why}" if served.why else word
    if served.planned == "fallback":
        arrow = "→ " if look.columns else ""  # a pipe gets the word alone
        cell = Cell(f"{arrow}{words} at {show_moment(served.at, now)}", role)
    else:
        cell = mark(words, role, look)
    return replace(cell, text=f"{cell.text}; {state}") if state else cell


def _tell_session(report: SessionReport) -> str:
    """Return a session in a sentence: what, when, how much, and what left the house."""
    prompt = crop(clean_line(first_line(report.session.prompt)), 60)
    title = f'"{prompt}"' if prompt else f"Session {report.session.id}"
    began = show_moment(report.began, report.facts.now)
    ended = show_moment(report.ended, report.facts.now)[-8:]  # without the date

    served = [row for told in report.agents for row in told.served]
    requests = sum(row.requests for row in served)
    left = sum(row.requests for row in served if row.planned == "left")
    unknown = sum(row.requests for row in served if row.planned == "unknown" and not row.node)
    house = "nothing left the house"
    if left:
        house = ("all left the house" if left == requests
                 else f"{left:,} of them left the house")
    elif unknown:
        which = "they" if unknown == requests else f"{unknown:,} of them"
        house = f"where {which} went is not known"
    return (f"{title}, {began} to {ended} ({show_span(report.ended - report.began)}): "
            f"{count_of(report.agents, 'agent')}, {count_of(requests, 'request')}, {house}.")


_ANSWERS = {"yes": ("yes", "ok"), "no": ("no", "bad"), "unknown": ("not known", "warn")}


def format_audit(report: SessionReport, look: Look = PLAIN) -> str:
    """Return the questions and their answers, with the evidence for all but a plain yes."""
    audited = [told for told in report.agents if told.verdicts]
    if not audited:
        return "\nThere is no subagent to audit.\n"

    rows = []
    answers = []
    text = ""
    for told in audited:
        name = f"{told.agent.kind}:"
        rows.append([told.agent.kind, *(mark(*_ANSWERS[verdict.answer], look)
                                        for verdict in told.verdicts)])
        for verdict in told.verdicts:
            answers.append(verdict.answer)
            if not verdict.what:
                continue
            outcome = {"yes": "", "no": "failed: ", "unknown": "not known: "}[verdict.answer]
            said = f"{verdict.question.lower()} {outcome}" if outcome else ""
            label = mark(name, _ANSWERS[verdict.answer][1], look)
            text += format_words([label, Cell(said + verdict.what)], look, indent="  ")
            places = [Cell(f"request {place}" if place.startswith("req_") else place, "dim")
                      for place in verdict.evidence]
            if places:
                text += format_words([Cell("at"), *places], look, margin="    ")
        for note in told.notes:
            text += format_words([Cell("note:", "dim"), Cell(f"{name} {note}")], look,
                                 indent="  ")

    counts = [f"{answers.count('yes')} checks passed"]
    counts += [f"{answers.count(answer)} {word}" for answer, word in (
        ("no", "failed"), ("unknown", "not known")) if answer in answers]
    head = f"\n{count_of(audited, 'subagent')} audited: {', '.join(counts)}\n"
    return head + format_table(["Agent", *QUESTIONS], rows, look=look) + text


def format_sessions(rows: Sequence[Sequence[object]], look: Look = PLAIN) -> str:
    """Return sessions as a list: id, when, how many agents and requests, the first prompt."""
    headers = ("Session", "Last active", "Agents", "Requests", "First prompt")
    return format_table(headers, rows, look=look, right=("Agents", "Requests"))


@command("trace", "show which machine served which agent, and whether as planned",
         Flag("session", "`last`, or how its id begins; without it, all are listed",
              "SESSION", {"nargs": "?", "default": ""}, offers=("last",)), CONFIG, OUT,
         Flag("--audit", "check every subagent with four questions; exit 1 if one fails"),
         Flag("--since", "only sessions active within this time: 90s, 30m, 2h, 1d", "AGE",
              {"type": parse_age, "default": 0.0}),
         JSON, group=LOOK, examples=("trace", "trace last", "trace --audit"))
def cmd_trace(options: Namespace, world: World) -> int:
    workspace = open_workspace(options, world)
    facts = observe_traces(workspace, options)
    sessions = find_sessions(workspace, read_receipts(workspace))
    if options.since:
        since = world.now() - options.since
        sessions = [session for session in sessions if session.at >= since]
    if not (options.session or options.audit) and (options.json or len(sessions) != 1):
        return list_sessions(sessions, options, world)

    texts = []
    shown = []
    tasks = name_task_sessions(options, world) if options.json else {}
    status = EXIT_OK
    for found in choose_sessions(sessions, options, world):
        report = read_session(workspace, found, facts, audits=options.audit)
        if options.json:
            shown.append({**list_session(found, tasks, world), **show_session(report)})
        else:
            look = look_of(world)
            texts.append(format_trace(report, look)
                         + (format_audit(report, look) if options.audit else ""))
        if any(verdict.answer == "no" for told in report.agents for verdict in told.verdicts):
            status = EXIT_PROBLEM
    if options.json:
        print_report(world, "trace", {"sessions": shown})
    else:
        world.out("\n".join(texts))
    return status


def choose_sessions(sessions: Sequence[SessionFile], options: Namespace, world: World
                    ) -> Sequence[SessionFile]:
    """Return the requested sessions; a task's name stands for its session."""
    wanted = options.session
    if options.audit and options.since and sessions and not wanted:
        return sessions
    rows = find_task_rows(world, None, options) if wanted else []
    task = next((row for row in rows if row.name == wanted), None)
    if task:
        wanted = task.session or "no session yet"
    matches = [session for session in sessions if session.id.startswith(wanted)]
    if wanted in ("", "last"):
        matches = list(sessions[:1])
    if len(matches) == 1:
        return matches
    if task:
        raise FleetError("no-session", f"task `{task.name}` has no recorded session (it is "
                         f"{task.state})", fix=f"subagent-fleet tasks {task.name}")
    if not sessions:
        raise FleetError("no-session", "no sessions recorded in this directory",
                         fix="type a prompt in Claude Code (`subagent-fleet up` starts it), "
                             "or cd to its project")
    what = f"no session's id begins with `{wanted}`"
    if matches:
        what = f"`{wanted}` begins the ids of {len(matches)} sessions"
    raise FleetError("no-session", what, fix="`subagent-fleet trace` lists them, and "
                     "`subagent-fleet trace last` shows the latest")


def list_session(session: SessionFile, tasks: Mapping[str, str], world: World
                 ) -> dict[str, Any]:
    """Return what `--json` says about a session; `tasks` are task names by session."""
    prompt = first_line(read_first_prompt(world, session.path)) if session.path else ""
    return {"session": session.id, "task": tasks.get(session.id, ""),
            "prompt": crop(clean_line(prompt), 80), "ended": session.at,
            "subagents": len(subagent_paths(world, session)), "requests": session.requests}


def list_sessions(sessions: Sequence[SessionFile], options: Namespace, world: World) -> int:
    """Print all sessions, the latest first, each with the beginning of its prompt."""
    listed = sessions[:LISTED_SESSIONS]
    tasks = name_task_sessions(options, world)
    entries = [list_session(session, tasks, world) for session in listed]
    if options.json:
        print_report(world, "trace", {"sessions": entries})
        return EXIT_OK
    if not listed:
        tell(world, "No sessions recorded in this directory yet. "
             "`subagent-fleet up` starts one.\n")
        return EXIT_OK

    length = 8  # the shortest beginning that no other id has
    while len({session.id[:length] for session in listed}) < len(listed):
        length += 4
    rows = [(entry["session"][:length], show_moment(entry["ended"], world.now()),
             entry["subagents"] + 1, entry["requests"] or "-",
            (entry["task"] and f"task {entry['task']}: ") + entry["prompt"] or "-")
            for entry in entries]
    world.out(format_sessions(rows, look_of(world)))
    tail = "`subagent-fleet trace last` shows the first one.\n"
    more = len(sessions) - len(listed)
    if more:
        tail = f"{more:,} older ones are left out; --since says how far to go back. {tail}"
    tell(world, tail)
    return EXIT_OK


def observe_traces(workspace: Workspace, options: Namespace) -> TraceFacts:
    """Return what to compare sessions with: the fleet file and agents' files as they are."""
    world = workspace.world
    facts = TraceFacts(None, world.now(), files=find_agent_sources(workspace))
    fleet = known_fleet(options, world)
    if fleet is None:
        return facts
    path = find_config(world, options.config)
    changed = world.changed_at(path) if path != "-" else 0.0
    return replace(facts, fleet=fleet, fleet_path=path, fleet_changed=changed)
