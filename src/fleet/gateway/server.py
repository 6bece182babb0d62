"""The fleet behind one address."""
from __future__ import annotations

import contextlib
import hmac
import re
import threading
from typing import TYPE_CHECKING

from fleet.config.address import show_host
from fleet.config.names import find_models
from fleet.files.target import fleet_digest
from fleet.gateway.client import retry_header
from fleet.gateway.keys import prove_key
from fleet.gateway.queue import Scheduler
from fleet.gateway.receipts import Ledger, keep_receipts, plan_row
from fleet.gateway.reception import GRACE_SECONDS, Reception
from fleet.gateway.service import Service
from fleet.nodes.probe import ask_node, explain_failure, probe_nodes
from fleet.nodes.relay import Learned, translate
from fleet.plan.environment import FLEET_KEY_HEADER
from fleet.plan.memory import plan_kept_gigabytes, plan_prompt_cache
from fleet.speech.cloud import backend_of
from fleet.speech.messages import Messages
from fleet.speech.responses import DIALECTS, dialect_of
from fleet.speech.talk import Refusal
from fleet.start.constants import PROBE_TIMEOUT_SECONDS, TICK_SECONDS
from fleet.start.errors import FleetError, NodeFailure
from fleet.start.gate import VERSION
from fleet.start.record import replace
from fleet.text.json import render_json
from fleet.text.phrases import count_of

if TYPE_CHECKING:
    from typing import Any

    from fleet.config.sections import Fleet, Model, Node
    from fleet.gateway.receipts import Receipt
    from fleet.nodes.relay import Translation
    from fleet.speech.dialect import Dialect
    from fleet.speech.talk import Talk
    from fleet.world.visitor import Listener, Visitor
    from fleet.world.world import World


# Each client connection has a thread. While it waits for a node it also watches its client:
# when the client leaves, the node is left at once.

LOOK_SECONDS = 0.5  # how often the queue and the rests are checked when nothing happens

BODY_SECONDS = 120.0
BODY_LIMIT_BYTES = 64 * 1024 * 1024
BODIES_LIMIT_BYTES = 512 * 1024 * 1024  # of all open requests together

OPEN_PAGES = ("/", "/health/liveliness")  # anybody may read them; they say which program answers
EVENTS_PATH = "/events"

PROOF_PATH = "/prove/"  # a nonce follows: 32 bytes in hexadecimal


class Server(Reception):
    """The gateway: checks keys, finds the right answer for each path, knows its models."""

    def __init__(self, fleet: Fleet, key: str, world: World, *, receipts: str = "") -> None:
        name, _ = world.own_names()
        super().__init__(world,
                         (show_host(fleet.gateway.host), "localhost", "127.0.0.1", "[::1]",
                          name, f"{name}.local"))
        self.fleet, self.key = fleet, key
        self._told_of_key = False  # a client with another key was reported
        self.scheduler = Scheduler(fleet, world.clock)
        self.ledger = Ledger(fleet.nodes)
        if receipts:
            self.listen(keep_receipts(world, receipts, self.said.put))

        self.learned = {name: Learned() for name in fleet.models}
        self._unstudied: set[str] = set()  # nodes that did not say what their models can do
        self._held: dict[Visitor, int] = {}  # bytes of bodies; each thread changes its own entry
        # Anthropic's and OpenAI's fields together; the date of a model is not known.
        models = [{"type": "model", "id": alias, "display_name": alias,
                   "created_at": "1970-01-01T00:00:00Z", "object": "model", "created": 0,
                   "owned_by": "subagent-fleet"} for alias in self.scheduler.candidates]
        self._pages: dict[str, object] = {  # pages that never change, by path
            "/": {"name": "subagent-fleet", "version": VERSION},
            "/health/liveliness": "I'm alive!",
            "/v1/models": {"object": "list", "data": models, "has_more": False,
                           "first_id": models[0]["id"], "last_id": models[-1]["id"]},
            **{f"/v1/models/{model['id']}": model for model in models}}

    def run(self, listener: Listener | None) -> None:
        """Serve until `stop`, then let open answers end; without a listener, wait for the port."""
        # Another `up` has the port, and may end first.
        while not listener and not self.stops:
            self.world.sleep(TICK_SECONDS)
            with contextlib.suppress(FleetError):
                listener = self.world.listen(self.fleet.gateway.host, self.fleet.gateway.port)
        if listener:
            self.world.return_memory()
            threading.Thread(target=self._ask_rested, daemon=True).start()
            self.serve(listener)
        self._end_visits()
        self.world.close_idle()
        for aside in self._listeners:
            aside.end(GRACE_SECONDS / 2)
        lost = sum(aside.dropped for aside in self._listeners)
        if lost:
            self.said.put(f"warning: {count_of(lost, 'record')} of requests dropped: the "
                          "disk or the terminal was too slow\n")
        self.said.end(GRACE_SECONDS / 2)

    def file(self, receipt: Receipt) -> None:
        """File the receipt of a request."""
        self.ledger.add(receipt)
        self.log.put(plan_row(receipt))
        self.hand_on(receipt)

    def tell_rest(self, node: str, route: str = "", seconds: float = 0.0,
                  why: str = "") -> None:
        """Log how long a node, or one model there, is skipped; 0: it answers again."""
        self.log.put({"kind": "rest", "id": f"rest {node} {route}", "node": node,
                      "route": route, "time": round(self.world.now(), 3), "seconds": seconds,
                      "why": why})

    def _ask_rested(self) -> None:
        """Ask each node that has rested whether it answers, until the gateway stops."""
        while not self.stops:
            for name in self.scheduler.look():
                try:
                    threading.Thread(target=self._end_rest, args=(name,), daemon=True).start()
                except RuntimeError:  # the system gives no more threads now
                    self.scheduler.end_rest(name, "no thread to ask it")
            self.scheduler.is_due.wait(LOOK_SECONDS)
            self.scheduler.is_due.clear()

    def look(self, node: Node) -> str:
        """Return why a node does not answer, or "" if it does without a server error."""
        backend = backend_of(node)
        ask = replace(backend.identify(), extract=lambda reply: reply.status)
        until = self.world.clock() + PROBE_TIMEOUT_SECONDS
        try:
            status = ask_node(self.world, node, ask, deadline=until)
        except NodeFailure as failure:
            return explain_failure(failure, backend).reason
        return f"http {status}" if status >= 500 else ""

    def _end_rest(self, name: str) -> None:
        """Ask a node that has rested whether it answers, and end its rest or begin another."""
        try:
            why = self.look(self.fleet.nodes[name])
        except Exception as error:
            self.refusal_of(error)
            why = "not asked"
        self.tell_rest(name, "", self.scheduler.end_rest(name, why), why)
        if not why:
            self.study_later(name)

    def _hello(self) -> dict[str, Any]:
        return {"fleet": self.fleet.name, "config": fleet_digest(self.fleet)}

    def _refuse(self, visitor: Visitor, refusal: Refusal, path: str) -> None:
        dialect = dialect_of(path) or DIALECTS[Messages.path]
        visitor.reply(refusal.http, dialect.refuse(refusal), head=retry_header(refusal))

    def _respond(self, visitor: Visitor, method: str, target: str,
                 headers: dict[str, str]) -> None:
        from urllib.parse import unquote
        path = target.partition("?")[0]
        self._check_door(visitor, headers, path)
        self._visitors[visitor] = "asking"
        dialect = dialect_of(path)
        if method == "POST" and dialect:
            self._respond_to_talk(visitor, path, dialect)
            return

        follows = method == "GET" and path == EVENTS_PATH
        page = self._pages.get(unquote(path))
        proof = re.fullmatch(f"{PROOF_PATH}([0-9a-f]{{64}})", path)
        if path == "/fleet":
            page = self.show()
        elif proof:
            page = {"proof": prove_key(self.key, proof[1], *visitor.reached)}
        if not follows and (page is None or method not in ("GET", "HEAD")):
            raise Refusal(404, "there is nothing at this path")
        visitor.refuse_body()
        if follows:
            self._follow(visitor)
        else:
            visitor.reply(200, render_json(page))

    def _respond_to_talk(self, visitor: Visitor, path: str, dialect: Dialect) -> None:
        """Answer a request to a model, or count its tokens."""
        def hold(more: int) -> None:
            self._held[visitor] = self._held.get(visitor, 0) + more
            if sum(self._held.copy().values()) > BODIES_LIMIT_BYTES:
                raise Refusal(503, "too many requests at once", retry_seconds=2)

        try:
            talk = dialect.parse(visitor.read_body(BODY_LIMIT_BYTES, BODY_SECONDS, hold))
            candidates = self.scheduler.candidates
            if talk.alias not in candidates:
                shown = re.sub(r"(?s).*[^\w.:/@[\]-].*", "…",
                               talk.alias[:128])  # it is logged
                known = ", ".join(f"`{name}`" for name in candidates)
                raise Refusal(404, f"model: this fleet has no `{shown}`; it has {known}")
            if path == dialect.count_path:
                asked = self.translate(talk, candidates[talk.alias][0][0])
                visitor.reply(200, dialect.count(asked.estimate))
                return
            talk = replace(talk, came=int(self.world.now()))
            Service(self, visitor, dialect, talk).run()
        finally:
            self._held.pop(visitor, None)

    def can_show(self, model: Model, talk: Talk) -> bool:
        """Tell whether a model can be shown all of a request, including images by URL."""
        return not talk.unshown or backend_of(self.fleet.nodes[model.node]).takes_messages

    def lacks(self, model: Model, talk: Talk, weight: int) -> str:
        """Return what a request needs and a model lacks, as far as is known."""
        known = self.learned[model.name]
        abilities = known.abilities
        sees = known.takes_images and (abilities is None or "vision" in abilities)
        if (not sees and talk.images()) or not self.can_show(model, talk):
            return "images"
        if weight / known.ratio > model.context:
            return "context"
        if talk.tools and abilities is not None and "tools" not in abilities:
            return "tools"
        if talk.answer_format and not backend_of(self.fleet.nodes[model.node]).takes_formats:
            return "format"
        return ""

    def study(self, *names: str) -> None:
        """Learn in the background what the models of these nodes, or of all, can do."""
        with contextlib.suppress(RuntimeError):  # the system gives no more threads now
            threading.Thread(target=self.learn_abilities, args=names, daemon=True).start()

    def study_later(self, name: str) -> None:
        """Learn it from a node that answers now and did not before."""
        if name in self._unstudied:
            self._unstudied.discard(name)
            self.study(name)

    def learn_abilities(self, *names: str) -> None:
        """Ask nodes what their models can do, and how much stays warm.

        A model whose node does not say is taken to be able.
        """
        nodes = {name: self.fleet.nodes[name] for name in names or self.fleet.nodes}
        states = probe_nodes(self.world, nodes, PROBE_TIMEOUT_SECONDS, self.fleet.models)
        if not names:  # once more each: not again after every answer of an odd server
            self._unstudied.update(name for name in nodes if not states[name].online)
        for model in self.fleet.models.values():
            if model.node not in states:
                continue
            for held in find_models(states[model.node].models, model.ollama_model):
                self.learned[model.name].digest = held.digest
                if held.capabilities is not None:
                    self.learned[model.name].abilities = held.capabilities
                if held.token_bytes and model.name in self.scheduler.places:
                    told = self.fleet.nodes[model.node].cache_gb
                    cache_gb = plan_prompt_cache(states[model.node], told)
                    kept_gb = plan_kept_gigabytes(held, model.context)
                    self.scheduler.claim(model, cache_gb / kept_gb * model.context,
                                         is_sure=told is not None)

    def translate(self, talk: Talk, model: Model) -> Translation:
        """Return a talk as the request to a model, without what the model is known not to take."""
        return translate(self.fleet.nodes[model.node], talk, model, self.learned[model.name])

    def _check_door(self, visitor: Visitor, headers: dict[str, str], path: str) -> None:
        """Refuse a wrong key and a wrong host name, in the same time as a right one."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        keys = [headers.get("x-api-key", ""), headers.get(FLEET_KEY_HEADER, "")]
        if scheme.lower() == "bearer":
            keys.append(token.strip())
        wanted = self.key.encode("utf-8")
        fits = [hmac.compare_digest(key.encode("latin-1"), wanted) for key in keys]
        self._check_host(visitor, headers)

        is_open = path in OPEN_PAGES or path.startswith(PROOF_PATH)
        if not any(fits) and not is_open:
            if any(keys) and not self._told_of_key:
                self._told_of_key = True
                self.said.put("warning: a request came with another key than this gateway's; "
                              "if the key is new, restart the gateway\n")
            raise Refusal(401, "the key is missing or wrong; send it as "
                          "`Authorization: Bearer KEY` or `x-api-key: KEY`")

    def show(self) -> dict[str, Any]:
        """Return nodes, slots, the queue and totals, for `/fleet`."""
        places, waiting = self.scheduler.show()
        models = [{"route": model.name, "node": model.node, "model": model.ollama_model,
                   "alias": model.alias, "context": model.context,
                   **places[model.name]} for model in self.fleet.models.values()]
        nodes = [{"name": node.name, "endpoint": node.endpoint,
                  **self.ledger.totals[node.name]}
                 for node in self.fleet.nodes.values()]
        return {"schema": "subagent-fleet/fleet/2",
                "fleet": self.fleet.name, "waiting": waiting,
                "config": fleet_digest(self.fleet), "nodes": nodes, "models": models,
                "left_house": self.ledger.left_house,
                "sessions": self.scheduler.show_sessions()}
