"""A scriptable Ollama on loopback: the shapes are those of 0.32.15, only the words are made up."""
import http.server
import json
import socket
import threading
import time

FOREVER = "2318-12-01T10:00:00.123456789+01:00"


def full_name(name):
    """A model's name as Ollama keeps it."""
    return name if ":" in name.rsplit("/", 1)[-1] else name + ":latest"


class FakeNode:
    """What a test may set before and look at after.

    `models` {name: {capabilities, context, size, family, …}}, `loaded` {name: context}, `pullable` names,
    `answers` {path: (status, value)} or {path: function(payload) -> (status, value)} in place of
    what Ollama would say (a list is sent as NDJSON lines), `reply`: the text pieces of a chat,
    `delay`: seconds before each answer, `any_origin`: as under OLLAMA_ORIGINS=*. `requests` holds (path, payload) of all that came.
    """

    def __init__(self, models=None, host="127.0.0.1", port=0):
        self.models = {full_name(name): dict(told) for name, told in (models or {}).items()}
        self.loaded, self.pullable, self.answers = {}, set(), {}
        self.version, self.reply, self.delay = "0.32.15", ["PO", "NG"], 0
        self.gpu_percent, self.most_loaded, self.any_origin = 100, 3, False
        self.requests = []
        self.keys = []  # the Authorization of each request
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kind = type("Server", (http.server.ThreadingHTTPServer,), {
            "address_family": family, "daemon_threads": True, "request_queue_size": 128,
            "handle_error": lambda *_: None})
        self.server = kind((host, port), type("Handler", (_Handler,), {"node": self}))
        self.port = self.server.server_address[1]
        self.endpoint = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.005},
                         daemon=True).start()

    def close(self):
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()

    def asked(self, path):
        """The payloads that came to a path."""
        return [payload for found, payload in self.requests if found == path]

    # -- what Ollama answers --

    def answer(self, path, payload):
        """Return (status, value or list of lines)."""
        self.requests.append((path, payload))
        if path in self.answers:
            scripted = self.answers[path]
            return scripted(payload) if callable(scripted) else scripted
        if path == "/api/version":
            return 200, {"version": self.version}
        if path == "/api/tags":
            return 200, {"models": [self._tag(name) for name in self.models]}
        if path == "/api/ps":
            return 200, {"models": [self._loaded(name) for name in self.loaded]}
        name = full_name((payload or {}).get("model", "")).lower()
        if path == "/api/pull":
            return self._pull(name)
        if name not in self.models:
            return 404, {"error": f"model '{(payload or {}).get('model')}' not found"}
        return self._show(name) if path == "/api/show" else self._chat(name, payload)

    def _tag(self, name):
        told = self.models[name]
        found = {"name": name, "model": name, "modified_at": "2026-08-21T10:00:00Z",
                 "size": told.get("size", 4_700_000_000), "digest": "0" * 64,
                 "details": {"parent_model": "", "format": "gguf",
                             "family": told.get("family", "llama"),
                             "families": None, "parameter_size": told.get("parameters", "7.6B"),
                             "quantization_level": told.get("quantization", "Q4_K_M")},
                 "capabilities": ["completion"]}  # the real one misses the tools here, too
        if told.get("remote"):
            found.update(remote_host=told["remote"], remote_model=name)
        return found

    def _loaded(self, name):
        size = self.models[name].get("size", 4_700_000_000)
        return {"name": name, "model": name, "size": size, "digest": "0" * 64, "details": {},
                "expires_at": FOREVER, "size_vram": size * self.gpu_percent // 100,
                "context_length": self.loaded[name]}

    def _show(self, name):
        told = self.models[name]
        return 200, {"license": "", "details": self._tag(name)["details"], "model_info": {
            "general.architecture": "llama", "llama.context_length": told.get("context", 131072)},
            "capabilities": told.get("capabilities", ["completion", "tools"])}

    def _chat(self, name, payload):
        if payload.get("think") and "thinking" not in self.models[name].get("capabilities", ()):
            return 400, {"error": f"\"{payload['model']}\" does not support thinking"}
        done = {"model": payload["model"], "created_at": "2026-08-21T10:00:00Z", "done": True,
                "message": {"role": "assistant", "content": ""}}
        if payload.get("keep_alive") == 0:
            self.loaded.pop(name, None)
            return 200, {**done, "done_reason": "unload"}
        context = payload.get("options", {}).get("num_ctx", 4096)
        self.loaded.pop(name, None)
        self.loaded[name] = min(context, self.models[name].get("context", 131072))
        while len(self.loaded) > self.most_loaded:
            del self.loaded[next(iter(self.loaded))]
        if not payload["messages"]:
            return 200, {**done, "done_reason": "load"}
        text = self.reply
        lines = [{**done, "done": False, "message": {"role": "assistant", "content": piece}}
                 for piece in text]
        last = {**done, "done_reason": "stop", "prompt_eval_count": 7, "eval_count": len(text)}
        if payload.get("stream", True):
            return 200, [*lines, last]
        return 200, {**last, "message": {"role": "assistant", "content": "".join(text)}}

    def _pull(self, name):
        lines = [{"status": "pulling manifest"}]
        if name not in self.pullable:
            return 200, [*lines, {"error": "pull model manifest: file does not exist"}]
        self.models[name] = {}
        for layer, size in (("a", 1000), ("b", 3000)):
            lines += [{"status": f"pulling {layer}", "digest": f"sha256:{layer}", "total": size},
                      {"status": f"pulling {layer}", "digest": f"sha256:{layer}", "total": size,
                       "completed": size}]
        return 200, [*lines, {"status": "verifying sha256 digest"}, {"status": "success"}]


class _Handler(http.server.BaseHTTPRequestHandler):
    """Carries FakeNode's answers; anything with a foreign Origin is refused as Ollama does."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        payload = json.loads(self.rfile.read(length)) if length else None
        self.node.keys.append(self.headers.get("Authorization"))
        time.sleep(self.node.delay)
        if self.headers.get("Origin", "").startswith("https://") and not self.node.any_origin:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status, value = self.node.answer(self.path, payload)
        self.send_response(status)
        if self.node.any_origin:  # OLLAMA_ORIGINS=*
            self.send_header("Access-Control-Allow-Origin", "*")
        if isinstance(value, list):
            self._send_lines(value)
            return
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_HEAD = do_GET

    def _send_lines(self, lines):
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            text = json.dumps(line).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        """Say nothing: the tests look at `requests`."""
