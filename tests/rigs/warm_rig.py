"""A simulated fleet for the queue: agents that talk for many turns, and machines that keep what they
read as llama-server does. The product's own Scheduler decides, on a clock that events move.

First come first served is the same Scheduler, which lets everybody in.
"""
import heapq
import random
from collections import OrderedDict
from dataclasses import dataclass

import subagent_fleet as sf
from gateway_rig import fleet_of


class Machine:
    """Slots, and a cache in memory of so many tokens for what was in them; it keeps at least one."""

    def __init__(self, slots, room, reads, writes):
        self.room, self.reads, self.writes = room, reads, writes  # tokens; tokens a second
        self.slots = [None] * slots  # (conversation, tokens)
        self.busy = [False] * slots
        self.used = [0] * slots
        self.cache = OrderedDict()
        self.count = 0

    def begin(self, conversation, tokens):
        """Take a prompt into a slot as the server chooses it; return the slot, tokens to read."""
        idle = [slot for slot in range(len(self.slots)) if not self.busy[slot]]
        assert idle, "more requests than slots"
        held = [slot for slot in idle if self.slots[slot] and self.slots[slot][0] == conversation]
        slot = held[0] if held else min(idle, key=lambda slot: self.used[slot])
        if held:
            known = self.slots[slot][1]
        else:
            known = self.cache.pop(conversation, 0)
            if self.slots[slot] and self.room:
                self.cache[self.slots[slot][0]] = self.slots[slot][1]
                while len(self.cache) > 1 and sum(self.cache.values()) > self.room:
                    self.cache.popitem(last=False)
        self.count += 1
        self.used[slot] = self.count
        self.slots[slot], self.busy[slot] = (conversation, tokens), True
        return slot, tokens - min(known, tokens)

    def end(self, slot, tokens):
        self.slots[slot], self.busy[slot] = self.slots[slot] and (self.slots[slot][0], tokens), False

    def lose(self):
        """Forget everything, as a restart does."""
        self.slots = [None] * len(self.slots)
        self.cache.clear()


@dataclass
class Agent:
    """A conversation: its first prompt, what each turn adds, how many turns."""

    name: str
    tokens: int
    grows: int = 1000
    turns: int = 10
    answer: int = 300
    start: float = 0.0
    thinks: tuple = (0.5, 10.0)  # seconds its tools take
    endless_at: int = 0  # above 0: it begins anew where its prompt is longer, for ever
    turn: int = 0
    life: int = 0
    done_at: float = 0.0

    def __post_init__(self):
        self.first = self.tokens

    def links(self):
        """What the beginnings of its prompt are known by: two more each turn."""
        sizes = [100, self.first]
        for _ in range(self.turn):
            sizes += [sizes[-1] + self.answer, sizes[-1] + self.answer + self.grows]
        links = [7] + [hash((self.name, self.life, index)) for index in range(1, len(sizes))]
        return sf.Beginnings(tuple(links), tuple(sizes), self.tokens)


@dataclass
class Outcome:
    """What a run came to."""

    seconds: float = 0.0  # until all were done
    mean: float = 0.0  # until one was
    read: int = 0  # tokens
    again: int = 0  # of them, as the scheduler believes
    longest: float = 0.0  # wait
    idle: float = 0.0  # seconds that a slot was empty at a stretch while somebody waited
    answers: int = 0
    order: tuple = ()  # who was served, where


class Run:
    """Agents at machines; `warm` False is first come first served."""

    def __init__(self, machines, agents, *, seed=0, warm=True, tells=True, leaves=0.0, fails=0.0,
                 rooms=()):
        self.dice, self.warm, self.tells = random.Random(seed), warm, tells
        self.leaves, self.fails = leaves, fails
        self.machines, self.agents = machines, agents
        names = [f"n{index}" for index in range(len(machines))]
        fleet = fleet_of(*((f"m{index}", name, "x", {"max_parallel": len(machine.slots)})
                           for index, (name, machine) in enumerate(zip(names, machines))),
                         nodes=names)
        self.now, self.events, self.count = 0.0, [], 0
        self.scheduler = sf.Scheduler(fleet, lambda: self.now)
        for index, room in enumerate(rooms):
            self.scheduler.places[f"m{index}"].seats.room = room
        if not warm:
            for place in self.scheduler.places.values():
                place.seats.admits = lambda *_: True
                place.seats.estimate = lambda *_: 0.0
            self.scheduler._without_detours = lambda free, *_: free
        self.out, self.next_look = Outcome(), float("inf")
        self.idle_since = {}  # places with a free slot while somebody waits
        self.open, self.order = [], []
        for agent in agents:
            self.push(agent.start, "ask", agent)

    def push(self, at, what, thing=None):
        self.count += 1
        heapq.heappush(self.events, (at, self.count, what, thing))

    def run(self, limit=2e5):
        while self.events:
            at, _, what, thing = heapq.heappop(self.events)
            if at > limit:
                break
            self.now = at
            getattr(self, what)(thing)
            self.begin_granted()
            self.check_slots()
            self.look_again()
        waiting = [self.now - ticket.came for ticket in self.open if not ticket.model]
        self.out.longest = max([self.out.longest, *waiting])
        ends = [agent.done_at or self.now for agent in self.agents]
        self.out.seconds, self.out.mean = max(ends), sum(ends) / len(ends)
        self.out.order = tuple(self.order)
        return self.out

    def check_slots(self):
        """A slot is empty while somebody waits only as long as its place is kept for who has a
        tool running, or as reading the prompt there takes longer than waiting for its own seat."""
        idle = set()
        for ticket in self.open:
            if ticket.model or ticket.silent or not ticket.prompt.links:
                continue
            places = self.scheduler._places_of(ticket)
            slowest = max(place.seats.read_seconds(ticket.prompt.tokens) for place in places)
            for place in places:
                if place.is_free() and not self.scheduler._rests[place.node].until:
                    idle.add(place)
                    least = self.now - sf.LOOK_SECONDS
                    has_seat = any(memory.waiter is ticket for memory in ticket.kept)
                    here = place.seats.fresh_seconds(ticket) or slowest
                    assert any(least < memory.until for memory in place.seats.memories) or (
                        has_seat and least < ticket.came + here), (
                        self.now, ticket.number, place.node)
        self.idle_since = {place: self.idle_since.get(place, self.now) for place in idle}
        self.out.idle = max([self.out.idle,
                             *(self.now - since for since in self.idle_since.values())])

    def look_again(self):
        """Have the queue looked at when a seat or a rest ends, as the gateway's own thread does."""
        if not self.scheduler._queue and not any(r.until for r in self.scheduler._rests.values()):
            return
        at = self.now + sf.LOOK_SECONDS
        if at < self.next_look:
            self.next_look = at
            self.push(at, "look")

    def look(self, _):
        self.next_look = float("inf")
        due = self.scheduler.look()
        for name in due:
            self.scheduler.end_rest(name, "")

    def ask(self, agent):
        ticket = self.scheduler.enter("x", sf.Conversation(agent.name), prompt=agent.links())
        ticket.agent, ticket.slot = agent, None
        self.open.append(ticket)
        if self.leaves and self.dice.random() < self.leaves:
            self.push(self.now + self.dice.uniform(1, 300), "leave", ticket)

    def begin_granted(self):
        for ticket in [ticket for ticket in self.open if ticket.silent]:  # it is refused
            self.scheduler.leave(ticket)
            self.open.remove(ticket)
            self.push(self.now + 5, "ask", ticket.agent)
        for ticket in self.open:
            if not ticket.model or ticket.slot is not None:
                continue
            index = int(ticket.model.name[1:])
            machine, agent = self.machines[index], ticket.agent
            self.out.longest = max(self.out.longest, self.now - ticket.came)
            self.order.append((agent.name, agent.turn, ticket.model.name))
            ticket.machine = machine
            ticket.slot, ticket.fresh = machine.begin((agent.name, agent.life), agent.tokens)
            self.out.read += ticket.fresh
            share = 1 + 0.3 * (sum(machine.busy) - 1)  # those that write at once slow each other
            seconds = ticket.fresh / machine.reads + agent.answer / machine.writes * share
            if self.fails and self.dice.random() < self.fails:
                self.push(self.now + seconds * self.dice.random(), "fail", ticket)
            else:
                self.push(self.now + seconds, "answer", ticket)

    def leave(self, ticket):
        """Go away in the middle, and begin anew."""
        if ticket not in self.open:
            return
        self.let_go(ticket)
        self.scheduler.leave(ticket)
        self.open.remove(ticket)
        self.start_over(ticket.agent)

    def fail(self, ticket):
        """Let the machine lose all that it knows, while it answers."""
        if ticket not in self.open:
            return
        ticket.machine.lose()
        self.let_go(ticket)
        self.scheduler.fail(ticket, "refused")
        if not any(ticket.candidates):
            self.scheduler.leave(ticket)
            self.open.remove(ticket)
            self.push(self.now + 5, "ask", ticket.agent)

    def let_go(self, ticket):
        if ticket.slot is not None:
            ticket.machine.busy[ticket.slot] = False
            ticket.slot = None

    def start_over(self, agent):
        agent.turn, agent.tokens, agent.life = 0, agent.first, agent.life + 1
        self.push(self.now + self.dice.uniform(*agent.thinks), "ask", agent)

    def answer(self, ticket):
        if ticket not in self.open or ticket.slot is None:
            return
        agent, machine = ticket.agent, ticket.machine
        machine.end(ticket.slot, agent.tokens + agent.answer)
        is_over = agent.turn + 1 >= agent.turns
        if agent.endless_at:
            is_over = agent.tokens > agent.endless_at
        self.scheduler.succeed(ticket)
        self.out.answers += 1
        cached = agent.tokens - ticket.fresh if self.tells else 0
        end = sf.End("end_turn" if is_over else "tool_use", input_tokens=agent.tokens,
                     output_tokens=agent.answer, cache_read=cached)
        self.out.again += self.scheduler.learn(ticket, end, ticket.fresh / machine.reads)[1]
        self.scheduler.leave(ticket)
        self.open.remove(ticket)
        agent.turn += 1
        agent.tokens += agent.answer + agent.grows
        if not is_over:
            self.push(self.now + self.dice.uniform(*agent.thinks), "ask", agent)
        elif agent.endless_at:
            self.start_over(agent)
        else:
            agent.done_at = self.now


def random_workload(seed):
    """Machines and agents as they may be at anybody's home."""
    dice = random.Random(seed)
    machines = [(dice.choice([1, 1, 2, 4]), dice.choice([0, 0, 40_000, 90_000, 200_000, 600_000]),
                 dice.choice([150, 400, 900, 2500]), dice.choice([15, 40, 80]))
                for _ in range(dice.randint(1, 3))]
    least = dice.choice([0.3, 0.5, 2])
    thinks = least, dice.choice([3, 10, 30])
    apart = dice.choice([0, 0, 5, 30])
    agents = [{"name": f"a{index}", "tokens": dice.randint(5_000, 60_000),
               "grows": dice.randint(300, 2_500), "turns": dice.randint(4, 14),
               "answer": dice.choice([100, 300, 300, 600]), "start": index * apart * dice.random(),
               "thinks": thinks} for index in range(dice.randint(2, 8))]
    return machines, agents


def busy_workload(seed, count=24):
    """As the first prototype was measured: all begin at once, answers of 300 tokens."""
    dice = random.Random(seed)
    machines = [(dice.choice([1, 1, 2, 4]), dice.choice([0, 0, 40_000, 90_000, 200_000, 600_000]),
                 dice.choice([150, 400, 900, 2500]), dice.choice([15, 40, 80]))
                for _ in range(dice.randint(1, 3))]
    agents = [{"name": f"a{index}", "tokens": dice.randint(5_000, 60_000),
               "grows": dice.randint(300, 2_500), "turns": dice.randint(4, 14)}
              for index in range(dice.randint(2, 8))]
    thinks = dice.choice([0.3, 0.5, 2]), dice.choice([3, 10, 30])
    for agent in agents:
        agent["thinks"] = thinks
    return machines, agents


def play(workload, **more):
    """Run a workload once."""
    machines, agents = workload
    return Run([Machine(*each) for each in machines], [Agent(**each) for each in agents],
               **more).run()


# -- a scheduler whose clock stands still --

def prompt_of(who, turn=0, tokens=10_000, has_images=False):
    links = (1, *(hash((who, index)) for index in range(1 + 2 * turn)))
    sizes = (1, *(tokens - 50 * index for index in reversed(range(len(links) - 1))))
    return sf.Beginnings(links, sizes, tokens, has_images)


class Desk:
    """A scheduler whose clock stands still; each place reads 100 tokens a second, writes 10."""

    def __init__(self, *models, rooms=(), slots=1, nodes=("a", "b")):
        self.now = 100.0
        models = models or (("m", "a", "x", {"max_parallel": slots}),)
        self.scheduler = sf.Scheduler(fleet_of(*models, nodes=nodes), lambda: self.now)
        for (name, *_), room in zip(models, rooms):
            self.scheduler.places[name].seats.room = room

    def enter(self, who, turn=0, *, tokens=10_000, session=None, agent="", has_images=False, **more):
        return self.scheduler.enter("x", sf.Conversation(session or who, agent),
                                    prompt=prompt_of(who, turn, tokens, has_images), **more)

    def answer(self, ticket, *, cached=0, reason="tool_use", seconds=None, writes=10,
               counted=None, load=0.0, output=100):
        """End a request whose machine still had so many tokens; return what was learned."""
        total = ticket.prompt.tokens
        read = (total - cached) / 100 if seconds is None else seconds
        self.now += read + output / writes
        total = total if counted is None else counted
        end = sf.End(reason, input_tokens=total, output_tokens=output, cache_read=cached,
                     answer_seconds=output / writes, load_seconds=load)
        said = self.scheduler.learn(ticket, end, read)
        self.scheduler.succeed(ticket)
        self.scheduler.leave(ticket)
        return said

    def look(self, seconds):
        self.now += seconds
        self.scheduler.look()

    def warm(self, name="m"):
        return self.scheduler.show()[0][name]["warm"]
