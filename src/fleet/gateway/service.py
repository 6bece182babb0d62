"""One request, from a client to a machine and back."""
from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from fleet.gateway.client import Client, login_headers
from fleet.gateway.queue import PATIENCE_SECONDS, pass_over
from fleet.gateway.receipts import FailedTry, OpenReceipt, Passed, describe_place
from fleet.gateway.seats import link_turns
from fleet.nodes.probe import explain_failure
from fleet.nodes.relay import relay
from fleet.speech.cloud import HandedBack, backend_of
from fleet.speech.talk import RETRY_STATUSES, NoField, NoImages, PromptTooLong, Refusal
from fleet.start.errors import NodeFailure
from fleet.world.wire import ClientGone

if TYPE_CHECKING:
    from fleet.config.sections import Model, Node
    from fleet.gateway.seats import Ticket
    from fleet.gateway.server import Server
    from fleet.nodes.relay import Translation
    from fleet.speech.answer import End
    from fleet.speech.dialect import Dialect
    from fleet.speech.talk import Talk
    from fleet.world.exchange import Exchange
    from fleet.world.visitor import Visitor


# `server` reads a request, checks its key and parses it. These lead it on, in this order:
#
#   run          files the receipt at the end, however it went
#   _enter       puts the request in the queue of the models that can do what it needs
#   _answer      asks one of them after the other, until one has answered
#   _await_slot  waits for a slot
#   _ask         sends the request, and passes each line of the answer on to the client
#   _learn       keeps what the answer took
#
# Example: mini is asked and does not answer. `_take_failure` lets mini rest and puts the request
# back in the queue, and `_answer` asks studio. If the client already had a word from mini, the
# answer would end there with an error.

# A node that has been silent for this long is asked whether it still answers.
SILENCE_SECONDS = 10.0

IMPATIENT_SECONDS = 60.0  # for a client that does not stream: pings cannot keep it waiting

CLIENT_SECONDS = 0.2  # how often a waiting request checks whether its client is still there


class Service:
    """Answers one request, from its Talk to the last byte."""

    def __init__(self, server: Server, visitor: Visitor, dialect: Dialect, talk: Talk) -> None:
        self._server, self._scheduler, self._world = server, server.scheduler, server.world
        self._talk, self._headers = talk, visitor.headers
        self._conversation = conversation = dialect.conversation(visitor.headers, talk)
        answer_id = server.world.token(12)
        self._client = Client(server.world, visitor, dialect, talk, answer_id)
        self._translations: dict[str, Translation] = {}  # by model
        self._receipt = OpenReceipt(server.log, server.world, {
            "id": f"req_{answer_id}", "session": conversation.session,
            "agent_id": conversation.agent, "alias": talk.alias})

    def run(self) -> None:
        """Answer the request; the receipt is filed however it ends."""
        ticket = self._enter()
        server, outcome = self._server, "error"
        try:
            self._answer(ticket)
            outcome = "ok"
        except ClientGone:
            outcome = "stopped" if server.stops else "left"
            raise
        except PromptTooLong as too_long:
            outcome = "prompt_too_long"
            self._client.refuse(too_long)
        except Exception as error:  # even a bug is reported to the client, in its dialect
            refusal = server.refusal_of(error)
            outcome = "stopped" if server.stops else refusal.kind
            self._client.refuse(refusal)
        finally:
            self._scheduler.leave(ticket)
            server.file(self._receipt.close(outcome, ticket.waits_for))

    def _enter(self) -> Ticket:
        """Put the request in the queue for the models that can do what it needs."""
        server, talk = self._server, self._talk
        candidates = self._scheduler.candidates[talk.alias]
        models = [model for group in candidates for model in group]
        shown = [model for model in models if server.can_show(model, talk)]
        first = self._translate((shown or models)[0])  # may refuse it before it waits
        candidates, self._receipt.passed = pass_over(
            candidates, lambda model: server.lacks(model, talk, first.weight))
        self._receipt.step("wait")
        return self._scheduler.enter(
            talk.alias, self._conversation, candidates, prompt=link_turns(talk, first.estimate),
            patience=PATIENCE_SECONDS if self._client.is_stream else IMPATIENT_SECONDS)

    def _answer(self, ticket: Ticket) -> None:
        """Ask one candidate after the other until one has answered."""
        while True:
            model = self._await_slot(ticket)
            try:
                self._ask(ticket, self._translate(model))
                return
            except (NoImages, NoField) as refusal:  # ask the same model again, without it
                self._adapt(model, refusal)
            except PromptTooLong as refusal:  # ask one that holds more
                self._find_larger(ticket, model, refusal)
            except Refusal as refusal:  # hand it to the client, or ask another one
                self._take_refusal(ticket, model, refusal)
            except NodeFailure as failure:  # ask another one
                self._take_failure(ticket, model, failure)
            self._client.begin()

    def _translate(self, model: Model) -> Translation:
        """Return the request to this model; made once for each candidate."""
        if model.name not in self._translations:
            self._translations[model.name] = self._server.translate(self._talk, model)
        return self._translations[model.name]

    def _adapt(self, model: Model, refusal: NoImages | NoField) -> None:
        """Note what a model's node does not take; refuse if the request did not have it."""
        # Look at what was sent: another request may have taught the same since then.
        sent = self._translations.pop(model.name)
        known = self._server.learned[model.name]
        if isinstance(refusal, NoField):
            was_sent = refusal.name in sent.fields
            known.unknown.update({refusal.name} & {*sent.fields})
        else:
            was_sent = bool(sent.talk.images())
            known.takes_images = known.takes_images and not was_sent
        if self._client.has_content or not was_sent:
            raise refusal

    def _find_larger(self, ticket: Ticket, model: Model, refusal: PromptTooLong) -> None:
        """Leave a model whose context is too small for larger ones, or refuse."""
        self._receipt.said.append(f"{model.node}: {refusal.what}")  # only numbers, in our words
        # Without this one: its node may hold less than the file says.
        able = [[other for other in group
                 if other is not model and other.context > refusal.maximum]
                for group in ticket.candidates]
        if self._client.has_content or not any(able):
            raise refusal
        self._receipt.passed += (Passed(model.name, "context"),)
        self._scheduler.move_on(ticket, able)

    def _take_refusal(self, ticket: Ticket, model: Model, refusal: Refusal) -> None:
        """Hand back a refusal that the client must fix; after any other, skip the node."""
        self._note(model, refusal.reason or refusal.what, f"{refusal.http} {refusal.kind}")
        # A cloud's refusal goes to the client if it is final, or no other model is left.
        is_last = sum(map(len, ticket.candidates)) == 1
        is_final = isinstance(refusal, HandedBack) and (refusal.is_final or is_last)
        if refusal.http == 400 or is_final:
            raise refusal
        self._go_on(ticket, model, refusal.kind, refusal)

    def _take_failure(self, ticket: Ticket, model: Model, failure: NodeFailure) -> None:
        """Let a failed node rest, and ask another one."""
        why = explain_failure(failure,
                              backend_of(self._server.fleet.nodes[model.node])).reason
        self._note(model, failure.detail or why, why)
        problem = Refusal(529, f"node {model.node}: {why}; no other is left")
        if self._client.has_content:
            problem = Refusal(500, f"node {model.node}: {why}, in the middle of the answer")
        self._go_on(ticket, model, why, problem)

    def _note(self, model: Model, words: str, kind: str) -> None:
        """Keep why a node failed; a cloud's words may hold a login or prompt, so only the kind."""
        if self._receipt.values["cloud"] and model.name in self._scheduler.clouds:
            words = kind
        self._receipt.said.append(f"{model.node}: {words}")

    def _go_on(self, ticket: Ticket, model: Model, why: str, refusal: Refusal) -> None:
        """Leave a model that failed for the next one, or refuse if none is left."""
        is_missing = refusal.http == 404
        self._receipt.fail(model.node, why)
        seconds = self._scheduler.fail(ticket, why, is_missing=is_missing,
                                       is_over=self._client.has_content)
        self._server.tell_rest(model.node, model.name if is_missing else "", seconds, why)
        if not any(ticket.candidates):
            if refusal.http in RETRY_STATUSES:
                refusal.retry_seconds = self._scheduler.rest_seconds(ticket.alias)
            raise refusal

    def _await_slot(self, ticket: Ticket) -> Model:
        """Wait in the queue; return the model that may be asked."""
        began = self._world.clock()
        woken = threading.Event()
        ticket.wake = woken.set  # set first, then look: the slot may have come before
        while not (ticket.model or ticket.silent or self._server.stops
                   or woken.wait(CLIENT_SECONDS)):
            self._client.wait(None, 0)
        if ticket.silent:
            said = [f"{node}: {why}" for node, why in ticket.silent.items()]
            self._receipt.failures += [FailedTry(node, why)
                                       for node, why in ticket.silent.items()]
            self._receipt.said += said
            raise Refusal(529, f"node {', node '.join(said)}; no other is left",
                          retry_seconds=self._scheduler.rest_seconds(ticket.alias))
        if not ticket.model:
            raise Refusal(529, "the gateway is stopping")
        self._receipt.read(ticket.model, self._world.clock() - began)
        return ticket.model

    def _ask(self, ticket: Ticket, translation: Translation) -> None:
        """Send the request to the model's node, and each line of its answer to the client."""
        node, model, values = translation.node, translation.model, self._receipt.values
        has_images = bool(translation.talk.images())  # each server counts an image differently
        values.update(describe_place(model), context=model.context,
                      digest=self._server.learned[model.name].digest,
                      sent_tokens=0 if has_images else translation.estimate)
        backend = backend_of(node)
        if self._talk.answer_format and not backend.takes_formats:
            raise Refusal(400, f"response_format: {backend.title} takes none from this "
                          "dialect; ask for JSON in the prompt, or another model")
        exchange, reader = translation.send(
            self._world, login_headers(node, self._headers, self._server.key),
            functools.partial(self._await_node, node))
        # Even if another one answers in the end, this one has the prompt.
        values["cloud"] |= model.name in self._scheduler.clouds
        is_new, is_whole = True, False
        try:
            for deltas in relay(exchange, reader, translation, self._world.clock):
                if reader.has_begun:
                    self._receipt.write(len(deltas))
                end = self._client.write(deltas)
                if deltas and is_new:
                    is_new = False
                    self._server.study_later(node.name)
                    if self._scheduler.succeed(ticket):
                        # Say it now: the end of the answer may be minutes away.
                        self._server.tell_rest(node.name)
                if end:
                    self._learn(ticket, translation, end)
                    is_whole = not end.stop
            self._client.end()
        finally:
            if is_whole:
                exchange.keep()
            else:
                exchange.leave()

    def _await_node(self, node: Node, exchange: Exchange) -> None:
        """Wait for more from a node; if it is silent, ask whether it answers at all.

        A slow model gets its time, a hung machine does not.
        """
        while self._receipt.values["first_byte_seconds"] is None:
            look_at = self._world.clock() + SILENCE_SECONDS
            if look_at >= exchange.deadline:
                break
            if self._client.wait(exchange, look_at):
                return
            # `refused` may be a program that is stopping and still finishes its answers.
            if self._server.look(node) in ("timeout", "unreachable"):
                raise NodeFailure("timeout", "it accepted the connection but did not answer")
        self._client.wait(exchange, exchange.deadline)

    def _learn(self, ticket: Ticket, translation: Translation, end: End) -> None:
        """Learn what stayed warm, and how many bytes a token has.

        A server that counts only uncached tokens teaches neither.
        """
        values, tokens = self._receipt.values, end.input_tokens
        values.update(input_tokens=tokens, output_tokens=end.output_tokens,
                      broken_calls=end.broken_calls)
        if values["first_byte_seconds"] is None:  # the answer was empty
            self._receipt.mark("first_byte_seconds")
        if not tokens or end.stop:
            return
        seconds = end.prompt_seconds
        if seconds is None:
            seconds = values["first_byte_seconds"] - values["asked_seconds"]
        warm, again, why = self._scheduler.learn(ticket, end, seconds)
        values.update(cached_tokens=warm, read_again_tokens=again, read_again_why=why)
        if values["sent_tokens"] and 0.5 <= translation.weight / tokens <= 16:
            self._server.learned[translation.model.name].ratio = translation.weight / tokens
