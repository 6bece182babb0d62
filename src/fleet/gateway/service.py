"""One request, from a client to a machine and back."""
from __future__ import annotations

import functools
import re
import threading
from typing import TYPE_CHECKING

from fleet.gateway.queue import PATIENCE_SECONDS, pass_over
from fleet.gateway.receipts import FailedTry, OpenReceipt, Passed
from fleet.gateway.reception import QUIET_SECONDS
from fleet.gateway.seats import link_turns
from fleet.nodes.probe import explain_failure
from fleet.nodes.relay import relay
from fleet.speech.cloud import HANDED_BACK, HandedBack, backend_of
from fleet.speech.messages import Messages
from fleet.speech.talk import RETRY_STATUSES, NoField, NoImages, PromptTooLong, Refusal, Reply
from fleet.start.errors import NodeFailure
from fleet.world.wire import ClientGone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet.config.sections import Model, Node
    from fleet.gateway.seats import Ticket
    from fleet.gateway.server import Server
    from fleet.nodes.relay import Translation
    from fleet.speech.answer import Delta, End
    from fleet.speech.dialect import Conversation, Dialect
    from fleet.speech.talk import Talk
    from fleet.world.exchange import Exchange
    from fleet.world.visitor import Visitor


# A node that says nothing for so long is asked whether it still answers.
SILENCE_SECONDS = 10.0

IMPATIENT_SECONDS = 60.0  # of a client that does not stream: no ping tells it that we live

CLIENT_SECONDS = 0.2  # so often who waits for a slot looks whether its client is still there

# Of an answer that goes on are sent although more is there: its client may read.
OUT_BYTES = 4096



class Login:
    """What a client shows of itself, for the cloud its request may go to. Kept nowhere."""

    def __init__(self, headers: Mapping[str, str], key: str) -> None:
        self._headers = {name: value for name, value in headers.items()
                         if name.startswith("anthropic-") or name == "x-app"}
        if "user-agent" in headers:
            self._headers["User-Agent"] = headers["user-agent"]  # instead of this program's
        self._logins = {}
        for name in ("authorization", "x-api-key"):
            value = headers.get(name, "")
            # The gateway's key stays here.
            if value and value.rpartition(" ")[2].strip() != key:
                self._logins[name] = value

    def headers_for(self, node: Node) -> dict[str, str]:
        """Return the headers that go to a node; of any but Anthropic's none."""
        if node.provider != "anthropic":
            return {}
        if not node.auth:
            return dict(self._headers)
        if not self._logins:
            raise HandedBack(Reply(401, {}, _NO_LOGIN), "no login came")
        return {**self._headers, **self._logins}


_NO_LOGIN = (
    b'{"type":"error","error":{"type":"authentication_error","message":"this model is '
    b"answered with your own login, and none came: type /login, and start by "
    b'`subagent-fleet launch claude`"}}')


def describe_place(model: Model) -> dict[str, str]:
    """Return where a request goes, as its receipt keeps it when fleet.yaml has changed."""
    return {"route": model.name, "node": model.node, "model": model.ollama_model}


class Service:
    """Answers one request, from its Talk to the last byte."""

    def __init__(self, server: Server, visitor: Visitor, dialect: Dialect, talk: Talk,
                 conversation: Conversation, login: Login) -> None:
        self._server, self._world, self._visitor = server, server.world, visitor
        self._dialect, self._talk, self._login = dialect, talk, login
        self._id, began = self._world.token(12), self._world.clock()
        self._id_header = f"request-id: req_{self._id}\r\n"
        self._translations: dict[str, Translation] = {}  # by model
        self._writer = dialect.writes(talk, self._id)
        self._out = bytearray()  # of an answer: what was written and not yet sent
        # What the client has: the headers, and some of an answer that cannot be taken back.
        self._has_headers = self._has_content = False
        self._number = 0  # of the event that was sent last
        self._ping_at = (began + QUIET_SECONDS if self._writer.is_stream
                         else float("inf"))
        self._whole: Exchange | None = None  # its node has said all

        self._conversation = conversation
        self._receipt = OpenReceipt(server.log, server.world, {
            "id": f"req_{self._id}", "session": conversation.session,
            "agent_id": conversation.agent, "alias": talk.alias})

    def run(self) -> None:
        """Answer the request; the receipt is filed however it ends."""
        scheduler, outcome = self._server.scheduler, "error"
        candidates = scheduler.candidates[self._talk.alias]
        models = [model for group in candidates for model in group]
        shown = [model for model in models if self._server.can_show(model, self._talk)]
        first = self._translate((shown or models)[0])  # refused before it waits
        candidates, self._receipt.passed = pass_over(
            candidates, lambda model: self._server.lacks(model, self._talk, first.weight))
        self._receipt.step("wait")
        ticket = scheduler.enter(
            self._talk.alias, self._conversation, candidates,
            prompt=link_turns(self._talk, first.estimate),
            patience=PATIENCE_SECONDS if self._writer.is_stream else IMPATIENT_SECONDS)
        try:
            self._answer(ticket)
            outcome = "ok"
        except ClientGone:
            outcome = "stopped" if self._server.stops else "left"
            raise
        except Exception as error:  # of a bug, too, the client is told in its dialect
            refusal = self._server.refusal_of(error)
            outcome = "stopped" if self._server.stops else refusal.kind
            if isinstance(refusal, PromptTooLong):
                outcome = "prompt_too_long"
            self._refuse(refusal)
        finally:
            scheduler.leave(ticket)
            if self._whole:
                self._whole.keep()
            self._server.file(self._receipt.close(outcome, ticket.waits_for))

    def _answer(self, ticket: Ticket) -> None:
        """Ask one candidate after the other until one has answered; send what is left."""
        while True:
            model = self._await_slot(ticket)
            try:
                self._ask(ticket, self._translate(model))
                break
            except (NoImages, NoField) as refusal:  # the same model is asked again, without it
                self._adapt(model, refusal)
            except PromptTooLong as refusal:  # one that holds more is asked
                self._find_larger(ticket, model, refusal)
            except Refusal as refusal:  # it is the client's, or another one is asked
                self._take_refusal(ticket, model, refusal)
            except NodeFailure as failure:  # another one is asked
                self._take_failure(ticket, model, failure)
            self._out.clear()

        if self._writer.is_stream:
            self._flush(last=True)
        else:
            self._visitor.reply(200, bytes(self._out), head=self._id_header)

    def _translate(self, model: Model) -> Translation:
        """Return the talk as this model is asked it; made once for each candidate."""
        if model.name not in self._translations:
            self._translations[model.name] = self._server.translate(self._talk, model)
        return self._translations[model.name]

    def _adapt(self, model: Model, refusal: NoImages | NoField) -> None:
        """Note what a model's node does not take; refuse where it was not in the request."""
        # What was sent, not what is known: another request may have learned it since then.
        sent = self._translations.pop(model.name)
        known = self._server.learned[model.name]
        if isinstance(refusal, NoField):
            was_sent = refusal.name in sent.fields
            known.unknown.update({refusal.name} & {*sent.fields})
        else:
            was_sent = bool(sent.talk.images())
            known.takes_images = known.takes_images and not was_sent
        if self._has_content or not was_sent:
            raise refusal

    def _find_larger(self, ticket: Ticket, model: Model, refusal: PromptTooLong) -> None:
        """Leave a model whose context is too small for those of a larger one, or refuse."""
        self._receipt.said.append(f"{model.node}: {refusal.what}")  # numbers, in our words
        # Not itself: its node may hold less than the file says.
        able = [[other for other in group
                 if other is not model and other.context > refusal.maximum]
                for group in ticket.candidates]
        if self._has_content or not any(able):
            raise refusal
        self._receipt.passed += (Passed(model.name, "context"),)
        self._server.scheduler.move_on(ticket, able)

    def _take_refusal(self, ticket: Ticket, model: Model, refusal: Refusal) -> None:
        """Hand back a refusal that the client must fix; after others the node is skipped."""
        self._note(model, refusal.reason or refusal.what, f"{refusal.http} {refusal.kind}")
        # A cloud's is for the client where it is final, or nobody else is left.
        is_last = sum(map(len, ticket.candidates)) == 1
        is_final = isinstance(refusal, HandedBack) and (refusal.is_final or is_last)
        if refusal.http == 400 or is_final:
            raise refusal
        self._go_on(ticket, model, refusal.kind, refusal)

    def _take_failure(self, ticket: Ticket, model: Model, failure: NodeFailure) -> None:
        """Let a node rest that failed."""
        why = explain_failure(failure,
                              backend_of(self._server.fleet.nodes[model.node])).reason
        self._note(model, failure.detail or why, why)
        problem = Refusal(529, f"node {model.node}: {why}; no other is left")
        if self._has_content:
            problem = Refusal(500, f"node {model.node}: {why}, in the middle of the answer")
        self._go_on(ticket, model, why, problem)

    def _note(self, model: Model, words: str, kind: str) -> None:
        """Keep why a node failed, of a cloud only the kind: it may hold a login or prompt."""
        if self._receipt.values["cloud"] and model.name in self._server.scheduler.clouds:
            words = kind
        self._receipt.said.append(f"{model.node}: {words}")

    def _go_on(self, ticket: Ticket, model: Model, why: str, refusal: Refusal) -> None:
        """Leave a model that failed for the next; where none is left, refuse."""
        is_missing = refusal.http == 404
        self._receipt.failures.append(FailedTry(model.node, why))
        self._receipt.values["first_byte_seconds"] = None  # the node that answers will set it
        seconds = self._server.scheduler.fail(ticket, why, is_missing=is_missing,
                                              is_over=self._has_content)
        self._receipt.step("wait", node=model.node, why=why)
        self._server.tell_rest(model.node, model.name if is_missing else "", seconds, why)
        if not any(ticket.candidates):
            if refusal.http in RETRY_STATUSES:
                refusal.retry_seconds = self._server.scheduler.rest_seconds(ticket.alias)
            raise refusal

    def _await_slot(self, ticket: Ticket) -> Model:
        """Wait in the queue; return the model that may be asked."""
        began = self._world.clock()
        while not ticket.model:
            if self._server.stops:
                raise Refusal(529, "the gateway is stopping")
            if ticket.silent:
                self._receipt.failures += [FailedTry(node, why)
                                           for node, why in ticket.silent.items()]
                said = [f"{node}: {why}" for node, why in ticket.silent.items()]
                self._receipt.said += said
                seconds = self._server.scheduler.rest_seconds(ticket.alias)
                raise Refusal(529, f"node {', node '.join(said)}; no other is left",
                              retry_seconds=seconds)
            woken = threading.Event()
            ticket.wake = woken.set  # and only then, whether it came before
            while not (ticket.model or ticket.silent or self._server.stops
                       or woken.wait(CLIENT_SECONDS)):
                self._wait(None, 0)
        self._receipt.mark("asked_seconds")
        values = self._receipt.values
        waited = (values["waited_seconds"] or 0.0) + self._world.clock() - began
        values["waited_seconds"] = round(waited, 3)
        self._receipt.step("read", **describe_place(ticket.model))
        return ticket.model

    def _ask(self, ticket: Ticket, translation: Translation) -> None:
        """Send the request to the model's node, and its answer to the client."""
        node, model = translation.node, translation.model
        place, values = describe_place(model), self._receipt.values
        values.update(place, context=model.context, first_byte_seconds=None,
                      digest=self._server.learned[model.name].digest)
        backend = backend_of(node)
        if self._talk.answer_format and not backend.takes_formats:
            raise Refusal(400, f"response_format: {backend.title} takes none from this "
                          "dialect; ask for JSON in the prompt, or another model")
        has_images = bool(translation.talk.images())  # what a machine counts for one, it knows
        values["sent_tokens"] = 0 if has_images else translation.estimate
        self._receipt.tokens = 0
        self._writer = self._dialect.writes(self._talk, self._id)
        if self._has_headers:
            self._writer.begin()  # which the client has
            self._writer.number = self._number
        exchange, reader = translation.send(
            self._world, self._login.headers_for(node),
            functools.partial(self._await_node, node))
        # Whoever answers in the end: the prompt has been there.
        values["cloud"] |= model.name in self._server.scheduler.clouds
        is_new = True
        try:
            for deltas in relay(exchange, reader, translation, self._world.clock):
                if reader.has_begun:
                    self._receipt.write(len(deltas), **place)
                end = self._write(deltas)
                if deltas and is_new:
                    is_new = False
                    self._server.study_later(node.name)
                    if self._server.scheduler.succeed(ticket):
                        # Now: the last word may be minutes away.
                        self._server.tell_rest(node.name)
                if end:
                    if values["first_byte_seconds"] is None:  # it said nothing
                        self._receipt.mark("first_byte_seconds")
                    self._learn(translation, end, ticket)
                    self._whole = None if end.stop else exchange
        finally:
            if not self._whole:
                exchange.leave()

    def _write(self, deltas: list[Delta]) -> End | None:
        """Write what was said; return the End, if any."""
        out, writer = self._out, self._writer
        for delta in deltas:
            if delta.end:
                out += writer.end(delta.end)
                return delta.end
            out += writer.write(delta)
        if len(out) > OUT_BYTES:
            self._flush()
        return None

    def _learn(self, translation: Translation, end: End, ticket: Ticket) -> None:
        """Learn what stayed warm, and how many bytes a token has.

        Who counts only uncached tokens teaches nothing of that.
        """
        receipt, tokens = self._receipt.values, end.input_tokens
        receipt.update(input_tokens=tokens, output_tokens=end.output_tokens,
                       broken_calls=end.broken_calls)
        if not tokens or end.stop:
            return
        seconds = end.prompt_seconds
        if seconds is None:
            seconds = receipt["first_byte_seconds"] - receipt["asked_seconds"]
        warm, again, why = self._server.scheduler.learn(ticket, end, seconds)
        receipt.update(cached_tokens=warm, read_again_tokens=again, read_again_why=why)
        if receipt["sent_tokens"] and 0.5 <= translation.weight / tokens <= 16:
            self._server.learned[translation.model.name].ratio = translation.weight / tokens

    def _flush(self, more: bytes = b"", *, last: bool = False) -> None:
        """Send what was written; the first time with headers and what opens the stream."""
        chunk, head = bytes(self._out) + more, ""
        self._has_content = self._has_content or bool(self._out)
        self._out.clear()
        if not self._has_headers:
            self._has_headers = True
            head = ("Content-Type: text/event-stream; charset=utf-8\r\n"
                    f"Cache-Control: no-cache\r\n{self._id_header}")
            chunk = self._writer.begin() + chunk
        self._number = self._writer.number
        self._visitor.stream(chunk, head=head, last=last)
        self._ping_at = self._world.clock() + QUIET_SECONDS

    def _refuse(self, refusal: Refusal) -> None:
        if self._has_headers:  # there is no HTTP status left to give
            self._flush(self._writer.fail(refusal), last=True)
            return

        head, body = retry_header(refusal), self._dialect.refuse(refusal)
        if isinstance(refusal, HandedBack) and isinstance(self._dialect, Messages):
            body = bytes(refusal.reply.body)
            head = "".join(f"{name}: {value}\r\n"
                           for name, value in refusal.reply.headers.items()
                           if HANDED_BACK.fullmatch(name) and re.fullmatch("[ -~]*", value))
        self._visitor.reply(refusal.http, body, head=self._id_header + head)

    def _await_node(self, node: Node, exchange: Exchange) -> None:
        """Wait for more from a node; one that is silent is asked whether it answers at all.

        A slow model is waited for, a hung machine is not.
        """
        while self._receipt.values["first_byte_seconds"] is None:
            look_at = self._world.clock() + SILENCE_SECONDS
            if look_at >= exchange.deadline:
                break
            if self._wait(exchange, look_at):
                return
            # `refused` may be a program that stops once it has answered what it took.
            if self._server.look(node) in ("timeout", "unreachable"):
                raise NodeFailure("timeout", "it accepted the connection but did not answer")
        self._wait(exchange, exchange.deadline)

    def _wait(self, exchange: Exchange | None, until: float) -> bool:
        """Wait while the client stays; pings keep it from giving up."""
        if self._out:
            self._flush()
        while True:
            now = self._world.clock()
            if now >= self._ping_at:
                self._flush(self._writer.ping())
            elif self._visitor.wait(exchange, min(until, self._ping_at) - now):
                return True
            elif self._world.clock() >= until:
                return False


def retry_header(refusal: Refusal) -> str:
    """Return the header line that says when to come back, where that helps."""
    if not refusal.retry_seconds:
        return ""
    return f"Retry-After: {refusal.retry_seconds}\r\n"
