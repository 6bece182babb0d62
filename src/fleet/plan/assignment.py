"""Assign models and machines to the roles."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.check import CLAUDE_WORDS
from fleet.config.names import free_name_of, make_name, model_slot
from fleet.config.sections import Model
from fleet.plan.candidates import (
    CODER_NAME,
    CONTEXT_STEP,
    PLANNING_BILLIONS,
    choose_best,
    maker_of,
    plan_candidates,
)
from fleet.plan.loads import Load, describe_load
from fleet.plan.memory import (
    STARTER_MODELS,
    parameters_of,
    plan_fitting_context,
    plan_gigabytes,
    plan_prompt_cache,
)
from fleet.plan.roles import JOBS, LEAST_CONTEXT_TOKENS, MAIN_CONTEXT_TOKENS, MAIN_JOB
from fleet.start.record import Record, replace
from fleet.text.phrases import some_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from fleet.config.node import NodeModel, NodeState
    from fleet.plan.candidates import Candidate
    from fleet.plan.measured import Measurement


# `init`, the first `up`, `worker`, `add` and `recommend` ask `plan_assignment`. All models in
# one list, the strongest first; then four rules, of which each takes what finds room beside
# what the rules before it took:
# 1. the main session and the implementer get the strongest that calls tools and
#    holds the prompt;
# 2. the reviewer is the strongest on another machine, of another maker if that can be;
# 3. plans and summaries come from the fastest, no plans from a small one;
# 4. an idle machine shares another's work, takes over a job, or is a fallback.
# Ties break by name: the same machines give the same file.


class Seating:
    """An assignment in progress: candidates for each job, models on each machine, reasons."""

    def __init__(self, states: Iterable[NodeState], measured: Iterable[Measurement],
                 memory: Mapping[str, float]) -> None:
        online = [state for state in states if state.online]
        self.candidates = plan_candidates(online, measured)
        self.nodes: dict[str, list[Candidate]] = {state.name: [] for state in online}
        for candidate in self.candidates:
            self.nodes[candidate.node].append(candidate)
        # By job, the strongest first; if none can do it, the nearest ones.
        self.able = {}
        for job, least in JOBS.items():
            able = [one for one in self.candidates if one.calls_tools and one.holds(least)]
            self.able[job] = able or choose_best(self.candidates)

        self.contexts: dict[tuple[str, str], int] = {}  # of what runs, by place
        self.doing: dict[str, Candidate] = {}  # by job
        self.why: dict[str, str] = {}
        self.memory = memory
        self.caches = {state.name: plan_prompt_cache(state) for state in online}
        # What was seen loaded together fits together, where the memory is not known.
        self._seen = {state.name: sum(loaded.size for loaded in state.loaded) / 1e9
                      for state in online}

    @property
    def running(self) -> list[Candidate]:
        """What runs, the strongest first."""
        return [one for one in self.candidates if one.place in self.contexts]

    def near(self, job: str, other: Candidate) -> list[Candidate]:
        """Return candidates for a job with over half of another's strength."""
        return [candidate for candidate in self.able[job]
                if candidate.strength * 2 > other.strength and candidate is not other]

    def fastest(self, job: str) -> list[Candidate]:
        """Return candidates for a job, fastest first; of equals, the less busy machine."""
        able = self.able[job]
        # Where one was not measured there is no scale for all. Who calls no tool is not
        # chosen for being quick at that.
        is_measured = all(candidate.rate and candidate.calls_tools for candidate in able)

        def order(candidate: Candidate) -> tuple[Any, ...]:
            speed = -candidate.rate if is_measured else candidate.slowness
            return speed, len(self.jobs_at(candidate.node)), candidate.order[1:]

        return sorted(able, key=order)

    def room_for(self, candidate: Candidate, job: str, wanted: int) -> int:
        """Return the largest context with which a model still fits its machine, or 0."""
        context = self.contexts.get(candidate.place, 0)
        if not context:
            context = max(min(candidate.context or wanted, wanted), LEAST_CONTEXT_TOKENS)
            taken = [plan_gigabytes(other.model, self.contexts[other.place])
                     for other in self.nodes[candidate.node] if other.place in self.contexts]
            usual = self._seen[candidate.node] if taken else float("inf")
            room = self.memory.get(candidate.node, usual) - sum(taken)
            if plan_gigabytes(candidate.model, context) > room:
                fitting = plan_fitting_context(candidate.model, room)
                context = min(fitting, context) // CONTEXT_STEP * CONTEXT_STEP
        least = JOBS[job] if candidate.holds(JOBS[job]) else LEAST_CONTEXT_TOKENS
        return context if context >= least else 0

    def take(self, job: str, choices: Iterable[tuple[Iterable[Candidate], str]]) -> None:
        """Give a job to the first candidate that fits, and note the reason."""
        size = "heavy" if JOBS[job] == MAIN_CONTEXT_TOKENS else "small"
        for candidates, why in choices:
            for candidate in candidates:
                context = self.room_for(candidate, job, STARTER_MODELS[size].context)
                if context:
                    self.contexts[candidate.place] = context
                    self.doing[job] = candidate
                    self.why[job] = why
                    return

    def jobs_at(self, node: str) -> list[str]:
        """Return the jobs on a node."""
        return [job for job, candidate in self.doing.items() if candidate.node == node]

    def idle_nodes(self) -> list[str]:
        """Return the nodes on which nothing runs, by name."""
        return sorted(set(self.nodes) - {node for node, _ in self.contexts})


def _rank(candidates: Sequence[Candidate], why: str) -> Iterator[tuple[list[Candidate], str]]:
    """Yield each candidate with its own reason: only of the first it may be said plainly."""
    for candidate in candidates:
        reason = why
        if candidate is not candidates[0]:
            reason = f"{why} that fits ({candidates[0].model.name} doesn't)"
        yield [candidate], reason


def _assign_strongest(seating: Seating) -> None:
    """The main session and the implementer get the strongest model that fits its machine."""
    for job in (MAIN_JOB, "implementer"):
        seating.take(job, [([one], f"{why}: {_show_strength(one)}")
                           for (one,), why in _rank(seating.able[job], "the strongest")])


def _assign_reviewer(seating: Seating) -> None:
    """Seat a reviewer to work at the same time: on another machine, from another maker."""
    main = seating.doing[MAIN_JOB]
    near = seating.near("reviewer", main)
    away = [one for one in near if one.node != main.node]
    others = [one for one in near if maker_of(one.model) != maker_of(main.model)]
    twins = [one for one in away[:1] if one.place[1] == main.place[1]]
    nobody = "no other model is strong enough"
    if len(seating.able["reviewer"]) == 1:
        nobody = ("the only model that can do it" if main.calls_tools
                  else "no other model comes closer")
    elif away or others:
        nobody = "no other model fits beside it"
    elif near:
        nobody = "the other models here are of the same family"
    # Another machine before another maker: one that waits for the main session is no help.
    seating.take("reviewer", [
        *_rank([one for one in away if one in others],
               "the strongest on another machine, of another family"),
        (twins, "the same model on another machine"),
        *_rank(away, "the strongest on another machine"),
        (others, "of another family, on the main session's machine"),
        ([main], nobody)])


def _assign_fastest(seating: Seating) -> None:
    """Plans and summaries come from the fastest; a small model makes no plans."""
    def grown(candidates: Iterable[Candidate]) -> list[Candidate]:
        return [candidate for candidate in candidates if candidate.size >= PLANNING_BILLIONS]

    main = seating.doing[MAIN_JOB]
    busy = {candidate.node for candidate in seating.doing.values()}
    seating.take("planner", [
        *_rank(grown(seating.fastest("planner")),
               f"the fastest with {PLANNING_BILLIONS:g} B parameters or more"),
        *_rank([one for one in seating.able["planner"] if one.node not in busy],
               "the strongest left"),
        ([main], "no other model fits")])

    # On another machine than the main session's where there is one; a small model only where
    # no other is free.
    fastest = seating.fastest("summarizer")
    away = [candidate for candidate in fastest if candidate.node != main.node]
    seating.take("summarizer", [
        *_rank(grown(away), "the fastest off the main session's machine"),
        *_rank(away, "a small model, the fastest off the main session's machine"),
        *_rank(fastest, "the fastest"), ([main], "no other model fits")])


def _employ_idle(seating: Seating) -> None:
    """An idle machine shares another's work, takes over a job, or is a fallback."""
    # First machines with a model that works elsewhere: a twin is as strong.
    # Not with less context: one alias promises the same on each of its machines.
    contexts = {candidate.place[1]: seating.contexts[candidate.place]
                for candidate in reversed(seating.running)}
    _run_idle(seating, "summarizer", lambda candidate: contexts.get(candidate.place[1], 0))

    for node in seating.idle_nodes():
        # The job that needs the least strength moves first; the main session never does.
        for job in ("summarizer", "planner", "reviewer", "implementer"):
            now = seating.doing[job]
            near = [candidate for candidate in seating.near(job, now)
                    if candidate.node == node]
            if len(seating.jobs_at(now.node)) > 1:  # else that machine would idle
                seating.take(job, [(near, f"{node} would idle; this is more than half as strong")])
            if seating.doing[job] is not now:
                if now not in seating.doing.values():
                    del seating.contexts[now.place]
                break

    _run_idle(seating, MAIN_JOB, lambda candidate: MAIN_CONTEXT_TOKENS)


def _run_idle(seating: Seating, job: str, wish: Callable[[Candidate], int]) -> None:
    """Let the strongest on each idle node run that has room for the context it is to have."""
    for node in seating.idle_nodes():
        for candidate in seating.able[job]:
            context = wish(candidate) if candidate.node == node else 0
            if context and seating.room_for(candidate, job, context) == context:
                seating.contexts[candidate.place] = context
                break


SEAT_NAMES = {"main session": "heavy-coder", "implementer": "builder",
              "reviewer": "second-coder", "planner": "small-coder", "summarizer": "reader"}
SEAT_ALIASES = {"main session": "claude-sonnet-local", "reviewer": "claude-opus-local",
                "planner": "claude-haiku-local"}
FALLBACKS = 2  # of a model other than the main session's, which all can stand in for


class Assignment(Record):
    """The models and machines for each job, with reasons."""

    placements: tuple[Load, ...] = ()
    jobs: dict[str, str] = {}  # job -> the name of its model
    why: dict[str, str] = {}  # by job
    idle: dict[str, str] = {}  # node -> why nothing runs there
    flaw: str = ""  # the flaw of the main session's model, or why there is none
    flaws: dict[tuple[str, str], str] = {}  # of all models, by place
    counted: tuple[str, ...] = ()  # what each model takes, and how many agents it keeps warm

    def model(self, job: str) -> Model:
        """Return the model that does a job."""
        models = [load.model for load in self.placements]
        return next(model for model in models if model.name == self.jobs[job])


def plan_assignment(states: Sequence[NodeState], measured: Iterable[Measurement] = (),
                    memory: Mapping[str, float] | None = None,
                    known: Collection[Model] = ()) -> Assignment:
    """Return an assignment, from the nodes' models, measurements and memory.

    A model that is known already keeps its name.
    """
    seating = Seating(states, measured, memory or {})
    _assign_strongest(seating)
    if seating.doing:  # the order matters: each takes of what the rules before it left
        _assign_reviewer(seating)
        _assign_fastest(seating)
        _employ_idle(seating)

    placements = _plan_placements(seating, known)
    names = {model_slot(load.model): load.model.name for load in placements}
    counted = [describe_load(load, seating.memory.get(load.model.node)) for load in placements
               if load.warm is not None or load.model.node in seating.memory]
    return Assignment(
        placements,
        jobs={job: names[candidate.place] for job, candidate in seating.doing.items()},
        why=seating.why,
        idle={node: _explain_idle(seating, node) for node in seating.idle_nodes()},
        flaw=_plan_flaw(seating),
        flaws={candidate.place: candidate.rating.flaw for candidate in seating.candidates},
        counted=tuple(counted))


def _plan_placements(seating: Seating, known: Collection[Model]) -> tuple[Load, ...]:
    """Return the models to write: those with jobs in job order, then twins and spares."""
    loads: dict[tuple[str, str], Load] = {}
    kept = {model_slot(model): model.name for model in known
            if model.cloud or model_slot(model) in seating.contexts}
    for candidate in (*seating.doing.values(), *seating.running):
        if candidate.place not in loads:
            others = [load.model for load in loads.values()]
            loads[candidate.place] = _plan_placement(seating, candidate, others, kept)
    by_strength = [loads[candidate.place].model for candidate in seating.running]
    return tuple(
        replace(load, model=replace(load.model, fallback=_plan_heirs(load, by_strength)))
        for load in loads.values())


def _plan_placement(seating: Seating, candidate: Candidate, others: Collection[Model],
                    kept: Mapping[tuple[str, str], str]) -> Load:
    """Return a model as it is to be; one model with one context has one alias everywhere.

    `kept` has the names of models that keep theirs, by place.
    """
    node, full_name = candidate.place
    context = seating.contexts[node, full_name]
    jobs = tuple(job for job, one in seating.doing.items() if one is candidate)
    why = "; ".join(dict.fromkeys(seating.why[job] for job in jobs))
    machine = make_name(node, "node")
    twins = [other for other in others
             if (model_slot(other)[1], other.context) == (full_name, context)]
    if twins:
        model = replace(twins[0], name=f"{twins[0].name}-{machine}"[:64], node=node)
        why = why or f"the same model as {twins[0].name}: they share its work"
    else:
        is_heavy = MAIN_JOB in jobs or context > MAIN_CONTEXT_TOKENS
        usual = STARTER_MODELS["heavy" if is_heavy else "small"]
        name = SEAT_NAMES[jobs[0]] if jobs else f"spare-{machine}"[:64]
        aliases = [SEAT_ALIASES[job] for job in jobs if job in SEAT_ALIASES]
        aliases.append(unique_alias(candidate.model, machine, others))
        model = Model(name, node, candidate.model.name, aliases[0], context, usual.timeout)
    name = kept.get(candidate.place) or free_name_of(
        model.name, machine, taken={*kept.values(), *(other.name for other in others)})
    return Load(replace(model, name=name, ollama_model=candidate.model.name), candidate.model,
                jobs, seating.caches[node], why or "answers when another machine does not")


def unique_alias(model: NodeModel, node: str, others: Iterable[Model]) -> str:
    """Return an alias for a model that cannot be confused with a tier's."""
    alias = make_name(re.sub(":latest$", "", model.name), "model")
    if set(re.split("[^a-z]+", alias)) & set(CLAUDE_WORDS):
        alias = "local"
    return free_name_of(alias, node, taken={other.alias for other in others})


def _plan_heirs(load: Load, strongest: Sequence[Model]) -> tuple[str, ...]:
    """Return a model's fallbacks: the strongest on other machines, no alias twice."""
    model = load.model
    heirs: dict[str, str] = {}  # by alias
    for other in strongest:
        is_short = other.context < min(model.context, MAIN_CONTEXT_TOKENS)
        if other.node != model.node and not is_short and other.alias != model.alias:
            heirs.setdefault(other.alias, other.name)
    limit = len(heirs) if MAIN_JOB in load.users else FALLBACKS
    return tuple(heirs.values())[:limit]


def _show_strength(candidate: Candidate) -> str:
    """Return what makes a model strong."""
    model, exam = candidate.model, candidate.exam
    if exam and candidate.beats:
        return (f"passed {exam.passed} of {exam.asked} in the exam, more than "
                f"{some_of(candidate.beats, 2)}")
    words = "of unknown size"  # vLLM and others do not tell it
    if model.size:
        words = f"{model.size / 1e9:.1f} GB"
    if parameters_of(model):
        words = f"{parameters_of(model):g} B"
    return words + ", a coder" if CODER_NAME.search(model.name.lower()) else words


def _explain_idle(seating: Seating, node: str) -> str:
    """Return why nothing runs on a node: the flaw that its models share."""
    candidates = seating.nodes[node]
    if not candidates:
        return "it has no model"
    if not any(candidate.rating.score for candidate in candidates):
        return "none of its models can chat there"
    if (seating.able[MAIN_JOB][0].calls_tools
            and not any(one.calls_tools for one in candidates)):
        return "none of its models is known to call tools"
    if not any(candidate in seating.able[MAIN_JOB] for candidate in candidates):
        return "the contexts of its models are too small"
    return "its models do not fit its memory"


def _plan_flaw(seating: Seating) -> str:
    """Return the flaw of the main session's model, or why there is none."""
    main = seating.doing.get(MAIN_JOB)
    candidates = [main] if main else seating.candidates
    flaws = [f"{one.model.name} {one.rating.flaw}" for one in candidates if one.rating.flaw]
    if len(flaws) < len(candidates):
        return "" if main else "no model fits the memory of its machine"
    return flaws[0] if flaws else ""
