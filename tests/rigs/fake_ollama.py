"""A scriptable Ollama on loopback: the product's own simulated node, and what tests script of it."""
import time

import subagent_fleet as sf

FOREVER = sf.FOR_EVER


class FakeNode(sf.SimulatedNode):
    """What a test may set before and look at after.

    `models` {name: {capabilities, context, size, family, …}}, `loaded` {name: context}, `pullable` names,
    `answers` {path: (status, value)} or {path: function(payload) -> (status, value)} in place of
    what Ollama would say (a list is sent as NDJSON lines), `words`: the text pieces of a chat,
    `delay`: seconds before each answer. `requests` holds (path, payload) of all that came.
    """

    def __init__(self, models=None, host="127.0.0.1", port=0, listening=None):
        self.answers, self.delay, self.words = {}, 0, ["PO", "NG"]
        self.requests = []
        self.keys = []  # the Authorization of each request
        self.pullable, self.gpu_percent, self.most_loaded = set(), 100, 3
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
        if path == "/api/pull" and path not in self.answers:
            return self._pull(sf.full_model_name(payload["model"]))
        if path not in self.answers:
            return super().answer(path, payload)
        said = self.answers[path]
        if callable(said):
            said = said(payload)
        return said if isinstance(said, sf.NodeAnswer) else sf.NodeAnswer(*said)

    def _respond(self, visitor, method, target, headers):
        self.keys.append(headers.get("authorization"))
        time.sleep(self.delay)
        if headers.get("origin", "").startswith("https://"):
            visitor.reply(403, b"")
            return
        super()._respond(visitor, method, target, headers)

    def _tag(self, name):
        remote = self.models[name].get("remote")
        more = {"remote_host": remote, "remote_model": name} if remote else {}
        return {**super()._tag(name), **more}

    def _show_loaded(self, name):
        shown = super()._show_loaded(name)
        return {**shown, "size_vram": shown["size"] * self.gpu_percent // 100}

    def _chat(self, name, payload):
        if payload.get("think") and "thinking" not in self.models[name].get("capabilities", ()):
            return sf.NodeAnswer(400, {"error": f'"{payload["model"]}" does not support thinking'})
        if payload.get("keep_alive") == 0:
            self.loaded.pop(name, None)
            return sf.NodeAnswer(200, {
                "model": payload["model"], "created_at": "2026-08-21T10:00:00Z", "done": True,
                "message": {"role": "assistant", "content": ""}, "done_reason": "unload"})
        return super()._chat(name, payload)

    def _load(self, name, payload):
        """Load a model; the one held longest makes room."""
        super()._load(name, payload)
        while len(self.loaded) > self.most_loaded:
            del self.loaded[next(iter(self.loaded))]

    def _pull(self, name):
        lines = [{"status": "pulling manifest"}]
        if name not in self.pullable:
            return sf.NodeAnswer(200, [*lines, {"error": "pull model manifest: file does not exist"}])
        self.models[name] = {}
        for layer, size in (("a", 1000), ("b", 3000)):
            step = {"status": f"pulling {layer}", "digest": f"sha256:{layer}", "total": size}
            lines += [step, {**step, "completed": size}]
        return sf.NodeAnswer(200, [*lines, {"status": "verifying sha256 digest"}, {"status": "success"}])
