"""Which conversations a place keeps warm."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from fleet.config.sections import Model
    from fleet.speech.answer import End
    from fleet.speech.dialect import Conversation
    from fleet.speech.talk import Talk


MEMORY_LIMIT = 64  # conversations that are remembered of a place
LESSON_TOKENS = 500  # fewer do not tell how fast a machine reads
LOAD_SECONDS = 1.0  # a model that took so long to load had been unloaded, and has forgotten all
HOLD_SECONDS = 15.0  # a seat is kept at most while a tool runs

SLICE = 1.2  # a seat lasts so many times what its prompt takes to read
DOUBT_SECONDS = 240.0  # after a loss, until as much is tried again; each loss doubles it
DOUBT_LIMIT_SECONDS = 24 * 3600.0
TURNS_AHEAD = 4  # for so many is thought ahead


# A place is a model on a machine. What it has just read it need not read again: its
# server keeps a conversation in each slot, and in main memory as many more as fit there.
# One more than that, and nearly all are lost, because each turn pushes out the one that
# comes next. So a conversation that goes on has a seat, and a request without one waits
# until a seat is free.
#
# Where all that is in use fits, everybody has a seat, and the order is first come, first
# served. How much fits is learned: what came back warm or cold after others were read says
# what is kept.


class Beginnings(Record):
    """What stands for the beginnings of a prompt: system and tools, then turn by turn.

    Prompts that begin alike have their first links in common. They mean nothing elsewhere.
    """

    links: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()  # in characters, up to there
    tokens: int = 0  # of all, about
    has_images: bool = False

    def tokens_at(self, index: int) -> int:
        """Return about how many tokens a beginning has."""
        return self.tokens * self.sizes[index] // self.sizes[-1]


UNKNOWN_PROMPT = Beginnings()  # it is served as it comes


def link_turns(talk: Talk, tokens: int) -> Beginnings:
    """Return the beginnings of a talk that has about so many tokens."""
    if not talk.turns:
        return UNKNOWN_PROMPT
    texts = (*talk.system,
             *(text for tool in talk.tools for text in (tool.name, tool.description)))
    links, sizes = [hash(texts)], [sum(map(len, texts)) + 1]
    for turn in talk.turns:
        texts = (*turn.reminders, *turn.texts, *turn.images,
                 *(result.text for result in turn.results))
        calls = tuple((call.id, call.name) for call in turn.calls)
        links.append(hash((links[-1], turn.role, texts, calls)))
        # A call's arguments are not looked at: its id tells it from any other.
        sizes.append(sizes[-1] + sum(map(len, texts)) + 100 * len(calls))
    return Beginnings(tuple(links), tuple(sizes), tokens, bool(talk.images()))


class Memory:
    """A conversation that a place has read, or reads."""

    def __init__(self, conversation: Conversation, now: float) -> None:
        self.conversation = conversation
        self.links: tuple[int, ...] = ()  # of the last prompt that was answered
        self.tokens, self.running = 0, 0
        self.waiter: Ticket | None = None  # that came while it had its seat
        self.since = self.used = now  # it has its seat; when it was read last
        self.until = 0.0  # so long the seat is kept for what comes of it

    def has_seat(self, now: float) -> bool:
        return bool(self.running or self.waiter or now < self.until)

    def give_up(self) -> None:
        """Leave the seat to somebody else."""
        self.waiter, self.until = None, 0.0


def average(known: float, new: float) -> float:
    """Return a measure that follows new ones slowly; 0: there was none."""
    return 0.7 * known + 0.3 * new if known else new


class Seats:
    """What a place is believed to keep warm, and who may have it read something now.

    It is pure: who calls says what time it is.
    """

    def __init__(self) -> None:
        self.slots = 1
        self.memories: dict[Memory, None] = {}  # used longest ago first
        self._by_link: dict[int, Memory] = {}  # the conversation that had it last
        # Tokens a second, and of an answer; 0: not known yet.
        self.read_rate = self.write_rate = self.answer_tokens = 0.0
        # Tokens that are kept besides those in the slots; None: of one more conversation, as
        # most servers keep some, and one that keeps none shows it soon.
        self.room: float | None = None
        self.claim = 0.0  # what the server should keep; believed once it kept anything
        # Tokens: the most that were, the fewest that were not; 0: none.
        self.kept, self.lost = 0, 0
        self.doubt, self.doubt_until = DOUBT_SECONDS, 0.0
        # When something else than a full cache may have pushed out what was read before.
        self.unclear_at = 0.0

    def find(self, prompt: Beginnings) -> tuple[Memory | None, int]:
        """Return who read the longest beginning of a prompt last, and its tokens."""
        for index in range(len(prompt.links) - 1, -1, -1):
            memory = self._by_link.get(prompt.links[index])
            if memory:
                return memory, prompt.tokens_at(index)
        return None, 0

    def find_own(self, ticket: Ticket) -> Memory | None:
        """Return the conversation that a request goes on with."""
        memory, _ = self.find(ticket.prompt)
        if not memory:
            return None
        links, is_named = ticket.prompt.links, bool(ticket.conversation.session)
        if is_named and memory.conversation != ticket.conversation:
            return None  # it has branched off, and both may go on
        # The last turn may have been changed since, where the client says that
        # it is the same.
        is_same = memory.links[-1] in links or (is_named and memory.links[1] == links[1])
        return memory if is_same else None

    def own_tokens(self, ticket: Ticket) -> int:
        """Return how many tokens of a request its conversation has had read here before."""
        return self.find(ticket.prompt)[1] if self.find_own(ticket) else 0

    def read_seconds(self, tokens: int) -> float:
        """Return how long so many tokens take to read, 0 where that is not known."""
        return tokens / self.read_rate if self.read_rate else 0.0

    def estimate(self, prompt: Beginnings) -> float:
        """Return how long a request and the turns after it take here; 0 if not known."""
        if not self.read_rate or not self.write_rate:
            return 0.0
        warm = self.find(prompt)[1]
        answers = TURNS_AHEAD * self.answer_tokens / self.write_rate
        return self.read_seconds(prompt.tokens - warm) + answers

    def _sizes_since(self, memory: Memory) -> list[int]:
        """Return the tokens of what was read since a conversation was, and its own."""
        return [other.tokens for other in self.memories
                if other is memory or other.running or other.used > memory.used]

    def taken(self, now: float) -> list[Memory]:
        """Return who has a seat."""
        return [memory for memory in self.memories if memory.has_seat(now)]

    def need(self, sizes: Iterable[int]) -> int:
        """Return what conversations take besides the slots, at the worst."""
        return sum(sorted(sizes)[self.slots:])

    def fits(self, sizes: Sequence[int]) -> bool:
        """Tell whether conversations of so many tokens stay warm together."""
        if self.room is None or len(sizes) <= self.slots:
            return len(sizes) <= self.slots + 1
        return self.need(sizes) <= self.room

    def admits(self, ticket: Ticket, now: float) -> bool:
        """Tell whether a request may be read without pushing out who has a seat."""
        taken, own = self.taken(now), self.find_own(ticket)
        if not taken or own in taken or self._leaves_warm(ticket, own, taken):
            return True
        # A subagent's first request may use the seat of its parent, who waits for it.
        session, is_first = ticket.conversation.session, len(ticket.prompt.links) == 2
        return bool(session and is_first and any(
            memory.conversation.session == session and memory.used <= ticket.came
            and not memory.running and not memory.waiter for memory in taken))

    def _leaves_warm(self, ticket: Ticket, own: Memory | None, taken: list[Memory]) -> bool:
        """Tell whether all who have a seat stay warm when a request is read.

        A running request is in its slot: nothing can push it out. Two slots, A runs, X is
        over, B comes: B gets the other slot at once.
        """
        idle = [memory for memory in taken if not memory.running]
        if not idle:
            return True
        since = taken
        if self.room is not None:  # what was read after a conversation stands before it, too
            memories = list(self.memories)
            since = memories[memories.index(idle[0]):]
        sizes = [memory.tokens for memory in self.memories
                 if memory is not own and (memory.running or memory in since)]
        return self.fits([*sizes, ticket.prompt.tokens])

    def has_lasted(self, now: float) -> bool:
        """Tell whether somebody has had a seat long enough to give it to who is late."""
        return any(now - memory.since >= SLICE * self.read_seconds(memory.tokens)
                   for memory in self.taken(now) if not memory.running)

    def begin(self, ticket: Ticket, now: float) -> None:
        """Note that a request is read here."""
        # What was too much may have been lost for another reason.
        if 0 < self.doubt_until <= now:
            self.room, self.lost, self.doubt_until = max(self.room or 0, self.lost), 0, 0.0
        prompt, own = ticket.prompt, self.find_own(ticket)
        reader, ticket.known = self.find(prompt)
        ticket.need = self.need(self._sizes_since(reader)) if reader else 0
        taken = self.taken(now)
        if own not in taken and taken and not self._leaves_warm(ticket, own, taken):
            idle = [memory for memory in taken if not memory.running]
            session = ticket.conversation.session  # its parent's seat first
            idle.sort(
                key=lambda memory: (memory.conversation.session != session, memory.since))
            for memory in idle[:1]:
                memory.give_up()
        if not own:
            own = Memory(ticket.conversation, now)
        elif not own.has_seat(now):
            own.since = now
        own.give_up()
        ticket.known_at = reader.used if reader else 0.0
        ticket.own = ticket.known if own else 0
        own.running, own.used, own.tokens = own.running + 1, now, prompt.tokens
        self._use(own)
        ticket.memory, ticket.began = own, now

    def remember(self, ticket: Ticket) -> None:
        """Note that a prompt was read: its answer has begun."""
        if ticket.memory:
            ticket.memory.links, ticket.is_answered = ticket.prompt.links, True
            self._by_link.update(dict.fromkeys(ticket.memory.links, ticket.memory))

    def end(self, ticket: Ticket, now: float) -> None:
        """Note that a request is over; only an answered prompt is remembered."""
        memory = ticket.memory
        assert memory
        memory.running -= 1
        if not ticket.is_answered:
            self.unclear_at = now  # how much of it was read, nobody knows
            if not memory.links and not memory.running:
                self.memories.pop(memory, None)

    def _use(self, memory: Memory) -> None:
        self.memories.pop(memory, None)
        self.memories[memory] = None
        if len(self.memories) > MEMORY_LIMIT:
            oldest = next(iter(self.memories))
            del self.memories[oldest]
            self._by_link = {link: reader for link, reader in self._by_link.items()
                             if reader is not oldest}

    def learn(self, ticket: Ticket, end: End, seconds: float, now: float) -> int:
        """Learn from an answer how fast this place is and how much stays warm; keep its seat.

        The prompt took so many seconds. Return how many of its tokens were warm.
        """
        memory, total, cached = ticket.memory, end.input_tokens, end.cache_read
        assert memory
        if (end.load_seconds or 0) > LOAD_SECONDS:
            self.forget()
            self.unclear_at = now
        is_warm = cached > ticket.known / 2
        if not cached and self.read_rate and ticket.known > total / 2:
            is_warm = seconds < self.read_seconds(total) / 2  # a server that tells no count
        memory.tokens, memory.used = total + end.output_tokens, now
        self._use(memory)
        self.remember(ticket)
        is_plain = not ticket.prompt.has_images  # an image takes longer than its tokens tell
        fresh = total - cached if is_plain and (cached or not is_warm) else 0
        self._learn_speeds(end, fresh, seconds, now - ticket.began - seconds)
        if end.reason == "tool_use":
            memory.until = now + min(self.read_seconds(memory.tokens), HOLD_SECONDS)
        # A prompt that something else explains does not teach.
        is_clear = is_plain and ticket.known_at > self.unclear_at
        if (ticket.need and ticket.known > total / 2 and self.read_rate
                and (is_warm or is_clear)):
            self._learn_room(ticket.need, is_warm, now)
        return cached or (ticket.known if is_warm else 0)

    def _learn_speeds(self, end: End, fresh: int, seconds: float, writing: float) -> None:
        """Learn how fast so many fresh tokens were read and an answer was written."""
        if fresh >= LESSON_TOKENS and seconds > 0:
            self.read_rate = average(self.read_rate, fresh / seconds)
        writing = end.answer_seconds or writing
        if end.output_tokens > 1 and writing > 0:
            self.write_rate = average(self.write_rate, end.output_tokens / writing)
            self.answer_tokens = average(self.answer_tokens, end.output_tokens)

    def _learn_room(self, need: int, is_warm: bool, now: float) -> None:
        """Note that so many tokens besides the slots were kept, or were not."""
        if is_warm:
            self.doubt = max(self.doubt / 2, DOUBT_SECONDS)
            self.kept = max(self.kept, need)
            if self.lost <= self.kept:
                self.lost = 0
            if not self.lost:
                self.room = max(self.room or 0, self.claim, 2 * self.kept)
            return
        self.lost, self.claim = min(self.lost or need, need), 0.0
        if self.room is None or need <= self.room:  # else it was known to be too much
            self.doubt_until = now + self.doubt
            self.doubt = min(2 * self.doubt, DOUBT_LIMIT_SECONDS)
        # Prompts grow: what was kept is soon too little for the same conversations.
        self.room = (self.kept + self.lost) / 2 if self.kept else 0
        for memory in list(self.memories)[:-len(self._warm_sizes())]:
            memory.give_up()

    def _warm_sizes(self) -> list[int]:
        """Return the tokens of what is believed to be warm: the latest that fit together."""
        sizes: list[int] = []
        for memory in reversed(self.memories):
            if not self.fits([*sizes, memory.tokens]):
                break
            sizes.append(memory.tokens)
        return sizes

    def forget(self) -> None:
        """Forget what was read: its server may have started anew."""
        self.memories = {memory: None for memory in self.memories if memory.running}
        self._by_link.clear()

    def show(self, now: float) -> dict[str, Any]:
        """Return what is believed to be warm."""
        sizes = self._warm_sizes()
        room = None if self.room == float("inf") else self.room
        return {"conversations": len(sizes), "tokens": sum(sizes), "room": room,
                "held": len(self.taken(now))}


class Ticket:
    """A request in the queue; once it holds a slot it has a `model`."""

    def __init__(self, number: int, alias: str, conversation: Conversation,
                 prompt: Beginnings, came: float, patience: float) -> None:
        self.number, self.alias, self.conversation = number, alias, conversation
        # Who can still be asked: the alias, its fallbacks.
        self.candidates: list[list[Model]] = []
        self.model: Model | None = None
        # Nodes that were asked on its behalf whether they answer.
        self.asked: set[str] = set()
        self.silent: dict[str, str] = {}  # none of them does: {node: why}
        self.chosen = ""  # by which rule it got its model
        self.wake: Callable[[], None] = lambda: None

        self.prompt, self.came, self.patience = prompt, came, patience
        self.kept: list[Memory] = []  # the seats that are kept for it while it waits
        self.waits_for = ""  # who had the seat that it waited for
        self.memory: Memory | None = None  # of the place that reads it
        self.began = 0.0  # when that was
        self.is_answered = False  # by that place
        # Tokens of its prompt that were read there before, and what had to be
        # kept since then.
        self.known = self.need = 0
        self.known_at = 0.0  # when they were read last
        # Of them, those of its own conversation, here and where most were.
        self.own = self.own_elsewhere = 0
        self.elsewhere = ""
