"""A scriptable Ollama on loopback: the product's own simulated node, and what tests script of it."""
import time

import subagent_fleet as sf

FOREVER = sf.FOR_EVER


class FakeNode(sf.SimulatedNode):
    """What a test may set before and look at after.

    `models` {name: {capabilities, context, size, family, …}}, `loaded` {name: context}, `pullable` names,
    `answers` {path: (status, value)} or {path: function(payload) -> (status, value)} in place of
    what Ollama would say (a list is sent as NDJSON lines), `words`: the text pieces of a chat,
    `delay`: seconds before each answer, `any_origin`: as under OLLAMA_ORIGINS=*. `requests` holds (path, payload) of all that came.
    """

    def __init__(self, models=None, host="127.0.0.1", port=0, listening=None):
        self.answers, self.delay, self.words = {}, 0, ["PO", "NG"]
        self.requests = []
        self.keys = []  # the Authorization of each request
        world = sf.World()
        if listening:  # a socket that listens already: nobody who asks meanwhile is refused
            listening.setblocking(False)
            world.listen = lambda host, port: sf.Listener(listening, world.clock)
        super().__init__(world, models or {}, host=host, port=port)

    def asked(self, path):
        """The payloads that came to a path."""
        return [payload for found, payload in self.requests if found == path]

    def reply(self, payload):
        return [{"content": piece} for piece in self.words]

    def count(self, payload):
        return 7

    def answer(self, path, payload):
        self.requests.append((path, payload))
        if path not in self.answers:
            return super().answer(path, payload)
        said = self.answers[path]
        if callable(said):
            said = said(payload)
        return said if isinstance(said, sf.NodeAnswer) else sf.NodeAnswer(*said)

    def _respond(self, visitor, method, target, headers):
        self.keys.append(headers.get("authorization"))
        time.sleep(self.delay)
        super()._respond(visitor, method, target, headers)
