"""Which conversations a place keeps warm."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fleet.config.sections import Model
    from fleet.speech.answer import End
    from fleet.speech.dialect import Conversation
    from fleet.speech.talk import Talk


MEMORY_LIMIT = 64  # conversations that are remembered of a place
LESSON_TOKENS = 500  # fewer say little about how fast a machine reads
LOAD_SECONDS = 1.0  # a model that took this long to load had been unloaded, and has forgotten all
HOLD_SECONDS = 30.0  # a seat is kept at most while a tool runs

SLICE = 1.2  # a seat lasts this many times as long as its prompt takes to read
PROOFS = 6  # warm follow-ups for each seat before one more is tried; doubled by each loss
TURNS_AHEAD = 2  # turns that the estimate looks ahead


# The warm queue. What a machine has just read it need not read again: its server keeps a
# conversation in each slot, and in main memory as many more as fit there. One more than
# that, and nearly all are lost, because each turn pushes out the one that comes next. So a
# conversation that goes on has a seat, and a request without one waits for a seat.
#
#  1. A place is a model on a machine. It remembers the 64 conversations that it read last,
#     each as a chain of hashes (system and tools, then turn by turn), with its tokens.
#     - An agent's third request has the links S 1 2 3 4 5: system, then five turns.
#  2. A request goes on with the conversation whose chain it continues, whatever ids the
#     client sends; a subagent's first request may use the seat of its waiting parent.
#     - S 1 2 3 was answered here: S 1 2 3 4 5 goes on with it, S 1 7 does not.
#  3. A conversation has a seat while its request runs, while its next one waits, and after
#     a tool call for as long as reading it anew takes, 30 s at most. An answer that ends
#     the turn frees it.
#     - A calls a tool; reading A takes 12 s: for 12 s nobody else has its seat.
#  4. Whenever something happens, and twice a second, those who wait are asked in the order
#     they came.
#     - A's answer ends: B, who came first, is asked, then C.
#  5. A place with a free slot takes a request whose conversation has a seat, or while fewer
#     conversations have seats than it keeps warm: its slots and one more; where the
#     metadata tell, its slots and what the cache holds of such prompts; a cloud and vLLM
#     keep all. Who runs is in its slot, and nobody pushes it out: where all who have seats
#     run, a free slot is anybody's. Who is over counts no more. On one place where all fits
#     this is first come, first served.
#     - Two slots and a cache of 90,000 tokens keep five conversations of 30,000.
#     - Two slots, A runs, X is over, B comes: B has the other slot at once.
#  6. Of such places the least busy wins, then one that knows the conversation, then the
#     longest idle; but one that ends sooner by measured reading and writing beats them. A
#     place that was never measured decides nothing.
#     - Both are idle, mini knows A: mini. Studio reads A anew sooner: studio.
#  7. If a busy place has the conversation's seat, the request waits for it at most as long
#     as reading it here takes.
#     - A's seat is on studio, where B runs; mini needs 40 s for A: A waits 40 s at most.
#  8. Who has waited 8 times its own reading time, 30 s at least and 250 s at most (60 s
#     without a stream), and all before it, takes the longest-held seat whose owner is not
#     running and has had it for 1.2 times its reading time.
#     - B would be read in 10 s. A comes and goes on one slot: after 80 s B is next.
#  9. A follow-up that comes back cold lowers by one what the place keeps, never below its
#     slots. Six warm ones for each seat of a full place add one, and twice as many after
#     each loss. Only an answered prompt is remembered, and only a prompt that nothing else
#     explains teaches: a client that left, a model that was loaded anew, images, a failure
#     teach nothing.
#     - One slot and one more: A, B, A comes back cold: it keeps one. Twelve warm: two again.
# 10. A machine that failed has forgotten everything.
#     - A's next request is taken by whoever is free.


class Beginnings(Record):
    """What stands for the beginnings of a prompt: system and tools, then turn by turn.

    Prompts that begin alike have their first links in common. They mean nothing elsewhere.
    """

    links: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()  # in characters, up to each link
    tokens: int = 0  # of the whole prompt, estimated
    has_images: bool = False

    def tokens_at(self, index: int) -> int:
        """Return the estimated tokens of a beginning."""
        return self.tokens * self.sizes[index] // self.sizes[-1]


UNKNOWN_PROMPT = Beginnings()  # served first come, first served


def link_turns(talk: Talk, tokens: int) -> Beginnings:
    """Return the beginnings of a talk with this many tokens, about."""
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
        self.waiter: Ticket | None = None  # the follow-up that came while it had its seat
        self.since = self.used = now  # when it got its seat; when it was read last
        self.until = 0.0  # when its seat is no longer kept for a follow-up

    def has_seat(self, now: float) -> bool:
        return bool(self.running or self.waiter or now < self.until)

    def give_up(self) -> None:
        """Leave the seat to another conversation."""
        self.waiter, self.until = None, 0.0


class Known:
    """What a place knows of a prompt; true while its memories have this version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.own: Memory | None = None  # the conversation that the prompt continues
        self.own_tokens = 0  # how many were read here for that conversation
        self.tokens = 0  # of its longest beginning read here, even by another conversation
        self.read_at = 0.0  # when that was


def average(known: float, new: float) -> float:
    """Return a measure moved a little toward a new one; 0 means none is known."""
    return 0.7 * known + 0.3 * new if known else new


class Seats:
    """What a place is believed to keep warm, and which requests it may read now.

    It is pure: who calls says what time it is.
    """

    def __init__(self) -> None:
        self.slots = 1
        self.memories: dict[Memory, None] = {}  # used longest ago first
        self._by_link: dict[int, Memory] = {}  # the latest conversation with that link
        self._version = 0  # of these two
        self.read_rate = self.write_rate = 0.0  # tokens a second; 0: not known yet

        self.room: float | None = None  # tokens that its cache holds, if its server says
        self.claim = 0.0  # tokens that it should hold; believed once one more was kept
        self.extra: int | None = None  # conversations besides the slots, once learned
        # Warm follow-ups of a full place since it learned the last time, and losses so far.
        self.proofs = self.losses = 0
        # The last time that something other than a full cache may have pushed prompts out.
        self.unclear_at = 0.0

    def look_up(self, ticket: Ticket) -> Known:
        """Return what is known of a request's prompt; looked up again only after a change."""
        known = ticket.known_at.get(self)
        if not known or known.version != self._version:
            known = ticket.known_at[self] = self._look_up(ticket)
        return known

    def _look_up(self, ticket: Ticket) -> Known:
        known, links = Known(self._version), ticket.prompt.links
        for index in range(len(links) - 1, -1, -1):
            reader = self._by_link.get(links[index])
            if not reader:
                continue
            known.tokens, known.read_at = ticket.prompt.tokens_at(index), reader.used
            # The last turn may have been changed since, where the client says that
            # it is the same.
            is_own = reader.links[-1] in links
            if ticket.conversation.session:
                # Another one has branched off, and both may go on.
                is_own = (reader.conversation == ticket.conversation
                          and (is_own or reader.links[1] == links[1]))
            if is_own:
                known.own = reader
                known.own_tokens = known.tokens
            break
        return known

    def read_seconds(self, tokens: int) -> float:
        """Return how long these tokens take to read, or 0 if not known."""
        return tokens / self.read_rate if self.read_rate else 0.0

    def fresh_seconds(self, ticket: Ticket) -> float:
        """Return how long the new part of a request's prompt takes to read, or 0 if not known."""
        return self.read_seconds(ticket.prompt.tokens - self.look_up(ticket).tokens)

    def estimate(self, ticket: Ticket, answer_tokens: float) -> float:
        """Return how long a request and the turns after it take here, or 0 if not known."""
        if not self.read_rate or not self.write_rate:
            return 0.0
        return self.fresh_seconds(ticket) + TURNS_AHEAD * answer_tokens / self.write_rate

    def taken(self, now: float) -> list[Memory]:
        """Return the conversations that have a seat."""
        return [memory for memory in self.memories if memory.has_seat(now)]

    def keeps(self, tokens: float) -> float:
        """Return how many conversations of this many tokens stay warm together."""
        if self.extra is not None:
            return self.slots + self.extra
        if self.room is None:
            return self.slots + 1  # most servers keep one more; the others show it soon
        return self.slots + self.room // max(tokens, 1)

    def admits(self, ticket: Ticket, now: float) -> bool:
        """Tell whether a request may be read without pushing out a conversation with a seat."""
        taken = self.taken(now)
        if self._leaves_warm(ticket, taken):
            return True
        # A subagent's first request may use the seat of its parent, who waits for it.
        session, is_first = ticket.conversation.session, len(ticket.prompt.links) == 2
        return bool(session and is_first and any(
            memory.conversation.session == session and memory.used <= ticket.came
            and not memory.running and not memory.waiter for memory in taken))

    def _leaves_warm(self, ticket: Ticket, taken: list[Memory]) -> bool:
        """Tell whether all conversations with a seat stay warm when a request is read."""
        if self.look_up(ticket).own in taken:
            return True
        # A conversation that runs is in its slot, and nothing can push it out.
        if all(memory.running for memory in taken):
            return True
        tokens = ticket.prompt.tokens + sum(memory.tokens for memory in taken)
        return len(taken) < self.keeps(tokens / (1 + len(taken)))

    def lasted(self, now: float) -> list[Memory]:
        """Return the conversations that have had a seat long enough to give it up."""
        return [memory for memory in self.taken(now) if not memory.running
                and now - memory.since >= SLICE * self.read_seconds(memory.tokens)]

    def begin(self, ticket: Ticket, now: float) -> None:
        """Note that a request is read here."""
        taken, known = self.taken(now), self.look_up(ticket)
        if not self._leaves_warm(ticket, taken):
            session = ticket.conversation.session  # its parent's seat first
            idle = [memory for memory in self.lasted(now) or taken if not memory.running]
            longest = min(idle, key=lambda memory: (memory.conversation.session != session,
                                                    memory.since))
            longest.give_up()
        ticket.known, own = known, known.own
        ticket.depth = 0
        if not own:
            own = Memory(ticket.conversation, now)
        else:
            ticket.depth = len(self.memories) - list(self.memories).index(own)
            if not own.has_seat(now):
                own.since = now
        own.give_up()
        own.running, own.used, own.tokens = own.running + 1, now, ticket.prompt.tokens
        self._use(own)
        ticket.memory, ticket.began = own, now

    def remember(self, ticket: Ticket) -> None:
        """Note that a prompt was read: its answer has begun."""
        if ticket.memory:
            ticket.memory.links, ticket.is_answered = ticket.prompt.links, True
            self._by_link.update(dict.fromkeys(ticket.memory.links, ticket.memory))
            self._version += 1

    def end(self, ticket: Ticket, now: float) -> None:
        """Note that a request is over; only an answered prompt is remembered."""
        memory = ticket.memory
        assert memory
        memory.running -= 1
        if not ticket.is_answered:
            self.unclear_at = now  # it is not known how much of it was read
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
            self._version += 1

    def learn(self, ticket: Ticket, end: End, seconds: float, now: float) -> int:
        """Learn from an answer how fast this place is and how much stays warm; keep its seat.

        The prompt took so many seconds. Return how many of its tokens were warm.
        """
        memory, total, cached = ticket.memory, end.input_tokens, end.cache_read
        known = ticket.known
        assert memory and known
        if (end.load_seconds or 0) > LOAD_SECONDS:
            self.forget()
            self.unclear_at = now
        is_warm = cached > known.tokens / 2
        if not cached and self.read_rate and known.tokens > total / 2:
            is_warm = seconds < self.read_seconds(total) / 2  # a server that reports no count
        memory.tokens, memory.used = total + end.output_tokens, now
        self._use(memory)
        self.remember(ticket)
        is_plain = not ticket.prompt.has_images  # an image takes longer than its tokens suggest
        fresh = total - cached if is_plain and (cached or not is_warm) else 0
        self._learn_speeds(end, fresh, seconds, now - ticket.began - seconds)
        if end.reason == "tool_use":
            memory.until = now + min(self.read_seconds(memory.tokens), HOLD_SECONDS)
        if known.own_tokens > total / 2 and self.read_rate:
            if is_warm:
                self._learn_kept(ticket)
            elif is_plain and known.read_at > self.unclear_at:
                self._learn_lost(ticket, now)
        return cached or (known.tokens if is_warm else 0)

    def _learn_speeds(self, end: End, fresh: int, seconds: float, writing: float) -> None:
        """Learn how fast these fresh tokens were read and an answer was written."""
        if fresh >= LESSON_TOKENS and seconds > 0:
            self.read_rate = average(self.read_rate, fresh / seconds)
        writing = end.answer_seconds or writing
        if end.output_tokens > 1 and writing > 0:
            self.write_rate = average(self.write_rate, end.output_tokens / writing)

    def _learn_kept(self, ticket: Ticket) -> None:
        """Note that a follow-up came back warm: of a full place, it may keep one more."""
        if self.claim and ticket.depth > self.slots:
            self.room, self.claim = self.claim, 0.0
        keeps = self.keeps(ticket.prompt.tokens)
        if ticket.depth < keeps or keeps >= MEMORY_LIMIT:
            return
        self.proofs += 1
        if self.proofs >= PROOFS * keeps * 2 ** self.losses:
            self.extra, self.proofs = int(keeps) - self.slots + 1, 0

    def _learn_lost(self, ticket: Ticket, now: float) -> None:
        """Note that a follow-up came back cold: the place keeps one less."""
        self.extra = max(int(self.keeps(ticket.prompt.tokens)) - self.slots - 1, 0)
        self.claim, self.proofs, self.losses = 0.0, 0, self.losses + 1
        taken = self.taken(now)
        for memory in taken[:max(len(taken) - self.slots - self.extra, 0)]:
            memory.give_up()

    def forget(self) -> None:
        """Forget what was read: its server may have restarted."""
        self.memories = {memory: None for memory in self.memories if memory.running}
        self._by_link.clear()
        self._version += 1

    def show(self, now: float) -> dict[str, Any]:
        """Return what is believed to be warm: the latest of its conversations."""
        tokens = [memory.tokens for memory in reversed(self.memories)]
        keeps = int(self.keeps(sum(tokens) / max(len(tokens), 1)))
        return {"conversations": len(tokens[:keeps]), "tokens": sum(tokens[:keeps]),
                "keeps": keeps, "held": len(self.taken(now))}


class Ticket:
    """A request in the queue. Once it holds a slot, it has a `model`."""

    def __init__(self, number: int, alias: str, conversation: Conversation,
                 prompt: Beginnings, came: float, patience: float) -> None:
        self.number, self.alias, self.conversation = number, alias, conversation
        # Who can still be asked: the alias, its fallbacks.
        self.candidates: list[list[Model]] = []
        self.model: Model | None = None
        # The nodes that were probed for it.
        self.asked: set[str] = set()
        self.silent: dict[str, str] = {}  # set when none of them answers: {node: why}
        self.wake: Callable[[], None] = lambda: None

        self.prompt, self.came, self.patience = prompt, came, patience
        self.known_at: dict[Seats, Known] = {}  # of its prompt, by place
        self.kept: list[Memory] = []  # the seats that are kept for it while it waits
        self.waits_for = ""  # the agent or session whose seat it waited for
        # Of the place that reads it: its conversation, since when, whether it has answered,
        # what was known of the prompt, and how many conversations were read there since its
        # own was, with itself; 0: it is new.
        self.memory: Memory | None = None
        self.began = 0.0
        self.is_answered = False
        self.known: Known | None = None
        self.depth = 0
        self.own_elsewhere, self.elsewhere = 0, ""  # read before on another node: tokens, node
