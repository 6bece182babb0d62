"""Which request may ask which machine, and when."""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fleet.config.names import full_model_name
from fleet.gateway.receipts import Passed
from fleet.gateway.seats import LESSON_TOKENS, MEMORY_LIMIT, UNKNOWN_PROMPT, Seats, Ticket, average
from fleet.plan.environment import is_cloud
from fleet.plan.routes import models_by_alias, plan_fallbacks

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fleet.config.sections import Fleet, Model
    from fleet.gateway.seats import Beginnings
    from fleet.speech.answer import End
    from fleet.speech.dialect import Conversation


REST_SECONDS, REST_LIMIT_SECONDS = 2.0, 60.0

PATIENCE_SECONDS = 250.0  # after such a wait a request takes a seat that has lasted
READINGS = 8  # or after this many times what its own prompt takes to read
# But not sooner than this: where reading is fast, eight readings take less than five turns.
LEAST_PATIENCE_SECONDS = 30.0


class Rest:
    """How long a node, or one model that it lacks, is skipped after a failure.

    A node's rest ends when the gateway asks the node and it answers. If a request had to
    find out, all others would wait for its first token. A model's rest ends by the clock.
    """

    def __init__(self) -> None:
        self.until = 0.0  # 0: it does not rest
        self.seconds = 0.0  # of this rest; kept for the next one until a request is answered
        self.why = ""
        self.is_asked = False  # the gateway is asking the node now

    def begin(self, now: float, why: str) -> None:
        """Begin a rest, twice as long as the last one."""
        self.seconds = min(max(2 * self.seconds, REST_SECONDS), REST_LIMIT_SECONDS)
        self.until = now + self.seconds
        self.why = why

    def end(self) -> None:
        """End the rest; the next one will be short again."""
        self.until = self.seconds = 0.0


class ModelPlace:
    """A model on its node: its slots, its seats, and its own rest while the node lacks it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.slots, self.running = 1, 0
        self.last_number = 0  # of the latest request that got a slot
        self.missing = Rest()
        self.seats = Seats()

    def is_free(self) -> bool:
        return self.running < self.slots


class Scheduler:
    """Slots, the queue and rests. Pure except for a lock and a clock; any thread may call."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._lock, self._clock = threading.RLock(), clock
        self.clouds = {model.name for model in fleet.models.values() if is_cloud(fleet, model)}
        self.candidates = _plan_candidates(fleet)
        self.places = plan_model_places(fleet)
        self.is_due = threading.Event()  # a node should be asked before its rest is over
        self._rests = {name: Rest() for name in fleet.nodes}
        self._busy = dict.fromkeys(fleet.nodes, 0)  # slots in use, by node
        self._queue: dict[int, Ticket] = {}
        self._holders: dict[int, Ticket] = {}  # of slots
        self._number = 0
        self._answer_tokens = 0.0  # of an answer, on average

    def enter(self, alias: str, conversation: Conversation,
              candidates: list[list[Model]] | None = None, *,
              prompt: Beginnings = UNKNOWN_PROMPT,
              patience: float = PATIENCE_SECONDS) -> Ticket:
        """Return a ticket in the queue of an alias; it may hold a slot at once.

        With `candidates`, only these models are asked; the others lack something it needs.
        """
        with self._lock:
            self._number += 1
            ticket = Ticket(self._number, alias, conversation, prompt, self._clock(),
                            patience)
            self._queue_up(ticket, candidates or self.candidates[alias])
            self._give_out()
        return ticket

    def _queue_up(self, ticket: Ticket, candidates: list[list[Model]]) -> None:
        ticket.candidates = candidates
        self._queue[ticket.number] = ticket
        now = self._clock()
        for place in self._places_of(ticket):
            own = place.seats.look_up(ticket).own
            if own and own.has_seat(now) and not own.waiter:
                own.waiter = ticket
                ticket.kept.append(own)

    def _places_of(self, ticket: Ticket) -> dict[ModelPlace, None]:
        return {self.places[model.name]: None for group in ticket.candidates
                for model in group}

    def _take_off(self, ticket: Ticket) -> None:
        """Take a request out of the queue, and its slot from it."""
        self._queue.pop(ticket.number, None)
        for memory in ticket.kept:
            if memory.waiter is ticket:
                memory.waiter = None
        ticket.kept = []
        if ticket.model:
            del self._holders[ticket.number]
            place = self.places[ticket.model.name]
            place.running -= 1
            self._busy[place.node] -= 1
            if ticket.memory:
                place.seats.end(ticket, self._clock())
            ticket.model = ticket.memory = ticket.known = None

    def leave(self, ticket: Ticket) -> None:
        """Give up the wait or the slot. This says nothing about the node."""
        with self._lock:
            self._take_off(ticket)
            self._give_out()

    def move_on(self, ticket: Ticket, candidates: list[list[Model]]) -> None:
        """Leave a model that cannot do what the request needs, and wait for these."""
        with self._lock:
            self._take_off(ticket)
            self._queue_up(ticket, candidates)
            self._give_out()

    def claim(self, model: Model, tokens: float, *, is_sure: bool) -> None:
        """Note how many tokens a place should keep besides its slots, as told or assumed."""
        with self._lock:
            seats = self.places[model.name].seats
            seats.claim = tokens
            if is_sure:
                seats.room = tokens
            self._give_out()

    def succeed(self, ticket: Ticket) -> bool:
        """Note that the node answered, which ends its rest. Tell whether it was resting."""
        assert ticket.model
        with self._lock:
            place = self.places[ticket.model.name]
            rest = self._rests[place.node]
            had_rested = rest.until > 0
            rest.end()
            place.missing.end()
            place.seats.remember(ticket)
            self._give_out()
        return had_rested

    def learn(self, ticket: Ticket, end: End, seconds: float) -> tuple[int, int, str]:
        """Learn from an answer whose prompt took so many seconds.

        Return how many of its tokens were warm, how many were read again, and why.
        """
        with self._lock:
            if not ticket.known or not ticket.model:
                return end.cache_read, 0, ""
            own = ticket.known.own_tokens
            seats = self.places[ticket.model.name].seats
            warm = seats.learn(ticket, end, seconds, self._clock())
            if end.output_tokens > 1:
                self._answer_tokens = average(self._answer_tokens, end.output_tokens)
            # The prompt's tokens are an estimate; the machine's own count is the limit.
            again = min(max(own, ticket.own_elsewhere), end.input_tokens) - warm
            if again < LESSON_TOKENS:
                return warm, 0, ""
            if ticket.own_elsewhere > own:
                return warm, again, f"moved from {ticket.elsewhere}"
            return warm, again, "pushed out"

    def fail(self, ticket: Ticket, why: str, *, is_missing: bool = False,
             is_over: bool = False) -> float:
        """Let the node rest, or only the model if the node lacks it; queue for another.

        Return the seconds of the rest. A request that `is_over` is not queued again.
        """
        assert ticket.model
        with self._lock:
            now = self._clock()
            place = self.places[ticket.model.name]
            rest = place.missing if is_missing else self._rests[place.node]
            # A request sent before the rest began is not a second failure.
            if rest.until <= (now if is_missing else 0):
                rest.begin(now, why)

            others = [[model for model in group if model is not ticket.model]
                      for group in ticket.candidates]
            self._take_off(ticket)
            for other in self.places.values():
                if other is place or (other.node == place.node and not is_missing):
                    other.seats.forget()
            ticket.candidates = [] if is_over else others
            if any(ticket.candidates):
                self._queue_up(ticket, others)
            self._give_out()
        return rest.seconds

    def look(self) -> list[str]:
        """Give out the slots that have become free; return the nodes that should be asked.

        A node is returned once. The caller asks it and then calls `end_rest`.
        """
        with self._lock:
            self._give_out()
            now = self._clock()
            due = [name for name, rest in self._rests.items()
                   if 0 < rest.until <= now and not rest.is_asked]
            for name in due:
                self._rests[name].is_asked = True
            return due

    def end_rest(self, name: str, why: str) -> float:
        """End a node's rest, or begin another if it still does not answer, and `why`.

        Return the seconds of the new rest.
        """
        with self._lock:
            rest = self._rests[name]
            rest.is_asked = False
            if rest.until and why:
                rest.begin(self._clock(), why)
            else:
                rest.until = 0.0  # it may still fail requests, so `seconds` is kept
            self._give_out()
            return rest.seconds if rest.until else 0.0

    def show(self) -> tuple[dict[str, dict[str, Any]], int]:
        """Return the state of each model's place, and how many requests wait."""
        with self._lock:
            now = self._clock()
            places = {}
            for name, place in self.places.items():
                rest = self._rests[place.node]
                rests = round(max(rest.until, place.missing.until) - now, 1)
                rests = max(rests, 0.1 if rest.until else 0.0)  # until the node is known to answer
                places[name] = {"running": place.running, "slots": place.slots,
                                "rests_seconds": rests, "warm": place.seats.show(now)}
            return places, len(self._queue)

    def show_sessions(self) -> dict[str, str]:
        """Return {session: waiting or working} for those with requests here; working wins."""
        with self._lock:
            sessions = {ticket.conversation.session: "waiting"
                        for ticket in self._queue.values()}
            for ticket in self._holders.values():
                sessions[ticket.conversation.session] = "working"
            sessions.pop("", None)
            return sessions

    def rest_seconds(self, alias: str) -> int:
        """Return the whole seconds until the first rest of an alias's models is over."""
        with self._lock:
            ends = [max(self._rests[model.node].until, self.places[model.name].missing.until)
                    for group in self.candidates[alias] for model in group]
            return max(int(min(ends) - self._clock()) + 1, 1)

    def _give_out(self) -> None:
        """Give free slots to the requests that wait, in order.

        After each grant all are tried again: a request that now runs in its own seat no
        longer blocks the others.
        """
        # All see one time: a rest that ends meanwhile would otherwise serve the last first.
        now = self._clock()
        while self._queue and self._give_once(now):
            pass

    def _give_once(self, now: float) -> bool:
        """Give a free slot to the first request that may have one; tell whether one did."""
        is_free = any(place.is_free() for place in self.places.values())
        has_rests = any(rest.until for rest in self._rests.values())
        if not is_free and not has_rests:  # most of the time where many wait
            return False
        line = sorted(self._queue.values(), key=lambda ticket: ticket.number)
        # A request that has waited long takes a seat that has lasted, after all before it.
        late = max((ticket.number for ticket in line
                    if now - ticket.came >= LEAST_PATIENCE_SECONDS
                    and now - ticket.came >= self._patience(ticket)), default=0)
        for ticket in line:
            model = None
            if is_free:
                model = self._choose(ticket, now, is_late=ticket.number <= late)
            if model:
                self._grant(ticket, model, now)
                return True
            if has_rests:
                self._await_rests(ticket, now)
        return False

    def _patience(self, ticket: Ticket) -> float:
        """Return how many seconds a request waits so that others stay warm."""
        reading = [place.seats.read_seconds(ticket.prompt.tokens)
                   for place in self._places_of(ticket)]
        own = min((READINGS * each for each in reading if each), default=ticket.patience)
        return min(ticket.patience, max(own, LEAST_PATIENCE_SECONDS))

    def _await_rests(self, ticket: Ticket, now: float) -> None:
        """Have the resting nodes asked that a request waits for; end its wait if none answers."""
        rests = {model.node: self._rests[model.node]
                 for group in ticket.candidates for model in group}
        if not all(rest.until for rest in rests.values()):
            return  # one of them is only busy

        for name in rests.keys() - ticket.asked:
            ticket.asked.add(name)
            rests[name].until = min(rests[name].until, now)
            self.is_due.set()
        if all(rest.until > now and not rest.is_asked for rest in rests.values()):
            del self._queue[ticket.number]
            ticket.silent = {name: rest.why for name, rest in rests.items()}
            ticket.wake()

    def _grant(self, ticket: Ticket, model: Model, now: float) -> None:
        self._take_off(ticket)
        self._holders[ticket.number] = ticket
        place = self.places[model.name]
        ticket.is_answered = False
        if ticket.prompt.links:
            others = [(other.seats.look_up(ticket).own_tokens, other.node)
                      for other in self._places_of(ticket) if other is not place]
            ticket.own_elsewhere, ticket.elsewhere = max(others, default=(0, ""))
            place.seats.begin(ticket, now)
        place.running += 1
        place.last_number = ticket.number
        self._busy[place.node] += 1
        ticket.model = model
        ticket.wake()

    def _choose(self, ticket: Ticket, now: float, *, is_late: bool) -> Model | None:
        """Return a model to ask, or None to wait; a late ticket may take a seat that lasted."""
        missing = []  # models that were missing on nodes that answer
        for group in ticket.candidates:
            there = [model for model in group if not self._rests[model.node].until]
            awake = [model for model in there if self.places[model.name].missing.until <= now]
            if awake:
                free = [model for model in awake if self._admits(model, ticket, now, is_late)]
                if ticket.kept and len(free) < len(awake) and not is_late:
                    free = self._without_detours(free, awake, ticket, now)
                return self._pick(free, ticket)
            missing += there

        # No other model is left, and asking for one that was missing costs little.
        free = [model for model in missing if self.places[model.name].is_free()]
        return min(free, default=None,
                   key=lambda model: self.places[model.name].missing.until)

    def _admits(self, model: Model, ticket: Ticket, now: float, is_late: bool) -> bool:
        """Tell whether a place has a slot and a seat for a request."""
        place = self.places[model.name]
        if not place.is_free():
            return False
        if not ticket.prompt.links or place.seats.admits(ticket, now):
            return True
        if is_late and place.seats.lasted(now):
            return True
        if not ticket.waits_for:
            first = min(place.seats.taken(now), key=lambda memory: memory.since).conversation
            ticket.waits_for = first.agent or first.session or "another conversation"
        return False

    def _without_detours(self, free: list[Model], awake: list[Model], ticket: Ticket,
                         now: float) -> list[Model]:
        """Leave out who would read a request anew, if waiting for its own seat takes less.

        A place that was never measured is taken to read as fast as the one with the seat.
        """
        seats = {model.name: self.places[model.name].seats for model in awake}
        own = {name: each.look_up(ticket).own for name, each in seats.items()}
        kept = [seats[name] for name, memory in own.items()
                if memory and memory.waiter is ticket and not self.places[name].is_free()]
        waited = now - ticket.came
        return [model for model in free if own[model.name] or all(
            waited >= (seats[model.name].fresh_seconds(ticket)
                       or each.read_seconds(ticket.prompt.tokens)) for each in kept)]

    def _pick(self, free: list[Model], ticket: Ticket) -> Model | None:
        """Return the model to ask: the least busy, or one that ends sooner.

        The times are known once the machines' reading and writing speeds are.
        """
        def rank(model: Model) -> tuple[int, bool, int]:
            place = self.places[model.name]
            is_new = place.seats.look_up(ticket).own is None
            return self._busy[model.node], is_new, place.last_number

        if len(free) < 2:
            return free[0] if free else None
        best = min(free, key=rank)
        seconds = {model.name: self.places[model.name].seats.estimate(ticket, self._answer_tokens)
                   for model in free}
        fastest = min(free, key=lambda model: seconds[model.name])
        if 0 < seconds[fastest.name] < seconds[best.name]:
            return fastest
        return best


def _plan_candidates(fleet: Fleet) -> dict[str, list[list[Model]]]:
    """Return {alias: groups of models}: its own, then those of each of its fallbacks."""
    by_alias = models_by_alias(fleet)
    chains = plan_fallbacks(fleet)
    return {alias: [by_alias[name] for name in (alias, *chains.get(alias, ()))]
            for alias in by_alias}


def pass_over(groups: list[list[Model]], lacks: Callable[[Model], str]
              ) -> tuple[list[list[Model]], tuple[Passed, ...]]:
    """Return the candidates that can do what is needed, and the others with their reasons.

    If none can, all stay: trying is better than refusing.
    """
    passed = []
    able = []
    for group in groups:
        flaws = {model.name: lacks(model) for model in group}
        passed += [Passed(name, why) for name, why in flaws.items() if why]
        able.append([model for model in group if not flaws[model.name]])
    if not passed or not any(able):
        return groups, ()
    return able, tuple(passed)


def plan_model_places(fleet: Fleet) -> dict[str, ModelPlace]:
    """Return each model's ModelPlace; two that are one model on a node share it."""
    places = {}
    shared: dict[tuple[str, str], ModelPlace] = {}
    for model in fleet.models.values():
        key = (model.node, full_model_name(model.ollama_model))
        place = shared.setdefault(key, ModelPlace(model.node))
        place.slots = place.seats.slots = max(place.slots, model.max_parallel)
        if is_cloud(fleet, model) or fleet.nodes[model.node].provider == "vllm":
            place.seats.extra = MEMORY_LIMIT  # it keeps as many as are ever needed
        places[model.name] = place
    return places
