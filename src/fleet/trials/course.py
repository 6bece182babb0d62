"""The trials of one model, from its first load to its last answer."""
from __future__ import annotations

import contextlib
import datetime
import json
from typing import TYPE_CHECKING

from fleet.config.names import find_models
from fleet.nodes.probe import ask_loaded, ask_node, explain_failure
from fleet.nodes.relay import Learned, relay, translate
from fleet.nodes.warmup import Warmth, WarmUp, load_model, time_step
from fleet.plan.measured import MEASURED_TEXT_LIMIT, FailedAnswer, Measurement, Score
from fleet.speech.answer import End
from fleet.speech.cloud import backend_of
from fleet.speech.talk import NoField, Refusal, Result, Turn
from fleet.start.constants import PROBE_TIMEOUT_SECONDS
from fleet.start.errors import NodeFailure
from fleet.start.record import replace
from fleet.trials.kit import Answer
from fleet.trials.rows import (
    SPEED_TRIALS,
    TRIAL_CALLS,
    TRIAL_RESULTS,
    TRIAL_TURNS,
    TRIALS,
    find_flaws,
    time_answer,
)

if TYPE_CHECKING:
    from typing import Any

    from fleet.config.sections import Model, Node
    from fleet.speech.answer import Delta
    from fleet.speech.talk import Call
    from fleet.trials.kit import Question, Subject, Trial
    from fleet.world.world import World


UNLOAD_SECONDS = 20.0


def today(world: World) -> str:
    """Return the time in UTC, as measurements keep it."""
    now = datetime.datetime.fromtimestamp(world.now(), datetime.timezone.utc)
    return f"{now:%Y-%m-%dT%H:%M:%SZ}"


class Course(Warmth):
    """The trials of one model on its node; one thread runs them, others watch."""

    def __init__(self, node: Node, subject: Subject) -> None:
        super().__init__(node, subject.model)
        self.measurement = Measurement(node.name, node.endpoint, subject.model.ollama_model,
                                       tokens=subject.model.context)
        self._subject = subject
        self._flaws: dict[str, list[str]] = {}  # by topic; "" for each right answer

    def run(self, world: World) -> None:
        """Ask every question, one after the other; stop if the node stops answering."""
        if self.stage == "done":  # the node did not answer before
            return
        self.began = world.clock()
        self.stage = "loading"
        try:
            self._reload(world)
            for trial in TRIALS:
                self.stage = trial.title
                question = trial.ask(self._subject)
                if question and (trial.is_quick or not self._subject.is_quick):
                    self.take(trial, self._ask(world, question))
                if trial is SPEED_TRIALS[0]:
                    self._subject = replace(self._subject, loaded=self._see_loaded(world))
        except NodeFailure as failure:
            self.give_up(explain_failure(failure, backend_of(self.node)).what)
        self.stage = "done"

    def _reload(self, world: World) -> None:
        """Unload the model. Load it, unless the first question loads it as its route does."""
        unloading = Warmth(self.node, self.model)
        how = WarmUp(UNLOAD_SECONDS, busy_seconds=UNLOAD_SECONDS, unload=True)
        time_step(load_model, unloading, world, how)
        if backend_of(self.node).loads_as_asked:
            return  # the first answer says how long loading took
        if unloading.detail.startswith("stays") or not unloading.ok:
            self.note(load_seconds=0.0)
            return

        loading = Warmth(self.node, self.model)
        time_step(load_model, loading, world, WarmUp())
        if not loading.ok:
            raise NodeFailure(loading.reason, loading.detail)
        self.note(load_seconds=round(loading.seconds, 2))

    def take(self, trial: Trial, answer: Answer) -> None:
        """Record what an answer shows; without a first answer the trials end."""
        if trial is SPEED_TRIALS[0] and answer.missing:
            raise NodeFailure("not loaded", answer.missing)
        speeds = {} if answer.missing else time_answer(answer)
        self.note(**{name: speeds[name] for name in trial.speeds
                     if speeds.get(name) is not None})
        # A server that loads for the question but reports no load time.
        if self.measurement.load_seconds is None:
            self.note(load_seconds=round(answer.first_seconds, 2))

        # Learn how many tokens a line of filler has.
        lines, tokens = answer.question.lines, answer.end.input_tokens
        fills = self._subject.fills
        if lines and tokens and not answer.missing:
            fills = (*fills, (lines, tokens))
        self._subject = replace(self._subject, fills=fills,
                                prompt_rate=self.measurement.prompt_rate)
        if trial.judges:
            self._judge(trial, answer)

    def _judge(self, trial: Trial, answer: Answer) -> None:
        """Record the judges' flaws, each once, with the answer for a person to read."""
        flaws = find_flaws(trial, answer)
        known = self._flaws.setdefault(trial.topic, [])
        known += flaws
        wrong = list(filter(None, known))
        score = Score(known.count(""), len(known),
                      max(wrong, key=wrong.count, default="")[:256])
        failed = [FailedAnswer(trial.title, flaw[:256], show_answer(answer))
                  for flaw in dict.fromkeys(flaws) if flaw]
        self.note(failed=(*self.measurement.failed, *failed), **{trial.topic: score})

    def note(self, **fields: Any) -> None:
        """Record values in one step: another thread sees all of them or none."""
        self.measurement = replace(self.measurement, **fields)

    def give_up(self, why: str) -> None:
        """Record why the trials end early."""
        self.note(failure=why[:256])
        self.stage = "done"

    def _ask(self, world: World, question: Question) -> Answer:
        """Return the answer; it is missing if the node failed but still answers."""
        try:
            return ask_model(world, self.node, self.model, question)
        except NodeFailure as failure:
            # One question that is too hard must not end the trials. A node that is gone
            # raises again here.
            backend = backend_of(self.node)
            deadline = world.clock() + PROBE_TIMEOUT_SECONDS
            ask_node(world, self.node, backend.identify(), deadline=deadline)
            return Answer(question, failure=explain_failure(failure, backend).what)

    def _see_loaded(self, world: World) -> int:
        """Return the context that the node reports for the loaded model; 0: none."""
        loaded = ask_loaded(world, self.node) or ()
        matches = find_models(loaded, self.model.ollama_model)
        return max((match.context for match in matches), default=0)


def show_answer(answer: Answer) -> str:
    """Return an answer as text for a person: its words, then its calls."""
    calls = [f"{call.name} {json.dumps(call.arguments)}" for call in answer.calls]
    return "\n".join(filter(None, [answer.text, *calls]))[:MEASURED_TEXT_LIMIT]


def ask_model(world: World, node: Node, model: Model, question: Question) -> Answer:
    """Ask a model as its route does. If it calls tools, send results and ask again.

    A refusal counts as an answer.
    """
    known = Learned()
    talk = question.talk
    calls: tuple[Call, ...] = ()
    for _ in range(TRIAL_TURNS):
        answer = _hear(world, node, model, replace(question, talk=talk), known)
        made = tuple(replace(call, id=call.id or f"call_{number}")
                     for number, call in enumerate(answer.calls, len(calls)))
        calls += made
        if not 0 < len(made) <= TRIAL_CALLS:
            break
        results = tuple(Result(call.id, TRIAL_RESULTS.get(call.name, "Done."))
                        for call in made)
        said = Turn("assistant", texts=(answer.text,), thoughts=(answer.thoughts,),
                    calls=made)
        talk = replace(talk, turns=(*talk.turns, said, Turn("user", results=results)))
    return replace(answer, calls=calls)


def _hear(world: World, node: Node, model: Model, question: Question,
          known: Learned) -> Answer:
    """Return one answer of a model; fields that its server rejects are left out."""
    began, first_seconds = world.clock(), 0.0
    said: list[Delta] = []
    try:
        translation = translate(node, question.talk, model, known)
        exchange, reader = translation.send(world)
        with contextlib.closing(exchange):
            for deltas in relay(exchange, reader, translation, world.clock):
                if deltas and not said:
                    first_seconds = world.clock() - began
                said += deltas
    except Refusal as refusal:
        if isinstance(refusal, NoField) and refusal.name in translation.fields:
            known.unknown.add(refusal.name)
            return _hear(world, node, model, question, known)
        return Answer(question, refusal=refusal)

    text, thoughts = ("".join(delta.text for delta in said if delta.kind == kind)
                      for kind in ("text", "thinking"))
    return Answer(question, text, thoughts, tuple(delta.call for delta in said if delta.call),
                  said[-1].end or End(""), first_seconds, world.clock() - began)
