"""What the gateway costs: a fake node in its own process, the same client with and without it.

python3 tests/bench/gateway.py [--soak REQUESTS]     LiteLLM runs too if `litellm` is on the PATH
python3 tests/bench/gateway.py --backends            a row a kind of node
python3 tests/bench/gateway.py --dashboards ROUNDS   what two dashboards cost
python3 tests/bench/gateway.py --against ROUNDS [--reference COMMIT]
    in turns with the file as it was at a commit of git: what ours takes of what that took
python3 tests/bench/gateway.py --peer NAME=COMMAND [--rounds ROUNDS]
    other gateways in turns with ours, and LiteLLM if it is on the PATH: COMMAND starts one, with
    {port} where it shall listen and {node} as the node's address; it serves `bench-model` of
    Ollama's model `m` in Messages, with the key or without one; --peer again: one more
"""
import argparse
import contextlib
import json
import os
import pathlib
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEY = "sk-bench-0123456789abcdef0123456789"
SMALL = json.dumps({"model": "bench-model", "max_tokens": 16,
                    "messages": [{"role": "user", "content": "hi"}]}).encode()
WIRE = ROOT / "tests" / "cases" / "wire"
RECORDED = WIRE / "main-first.json"
# What OpenAI's dialects are asked: where their prompt goes, a recorded request, their longest.
DIALECTS = {
    "/v1/chat/completions": ("messages", "harnesses/qwen-code-0.24.4-chat-2.json", "max_tokens"),
    "/v1/responses": ("input", "harnesses/codex-0.169.0-responses-2.json", "max_output_tokens")}


# -- the fake node, in its own process --

def run_node(port):
    """Answer /api/chat with as many lines as num_predict asks for, as fast as sockets go."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(512)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer_node, args=(connection,), daemon=True).start()


def answer_node(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    asked = read_http(connection)
    while asked:
        head, body = asked
        request = json.loads(body or b"{}")
        count = min(request.get("options", request).get(
            "num_predict", request.get("max_tokens", 1)), 2000)
        words = [("word ", "text ")[number % 2] for number in range(count)]  # a hundred equal
        # ones in a row are a loop to LiteLLM, which then ends the stream
        parts = [{"message": {"role": "assistant", "content": word}, "done": False}
                 for word in words]
        parts.append({"message": {"role": "assistant", "content": ""}, "done": True,
                      "done_reason": "stop", "prompt_eval_count": 11, "eval_count": count})
        lines = [json.dumps({"model": "m", "created_at": "2026-01-01T00:00:00Z", **part}).encode()
                 + b"\n" for part in parts]
        if request.get("stream") is False:
            whole = {**parts[-1], "model": "m", "message": {"role": "assistant",
                                                            "content": "".join(words)}}
            lines = [json.dumps(whole).encode()]
        path = head.split(b" ")[1]
        if path.endswith(b"/completions") and not request.get("stream"):
            message = {"role": "assistant", "content": "".join(words)}
            lines = [json.dumps({
                "id": "c", "object": "chat.completion", "created": 0, "model": "m",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 11, "completion_tokens": count,
                          "total_tokens": 11 + count}}).encode()]
        elif path in SPEECHES:
            lines = [SPEECHES[path](part) for part in [None, *words, count]]
        kind = b"application/json" if len(lines) == 1 else b"application/x-ndjson"
        if path in SPEECHES and len(lines) > 1:
            kind = b"text/event-stream"
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked"
                           b"\r\n\r\n" % kind + chunk(lines[0]))
        for line in lines[1:]:  # one write a line, as a real node does
            connection.sendall(chunk(line))
        connection.sendall(b"0\r\n\r\n")
        asked = None if b"connection: close" in head.lower() else read_http(connection)
    connection.close()


def say_messages(part):
    """The beginning (None), a word or the end (a count) of an answer in Messages."""
    delta = {"type": "content_block_delta", "index": 0,
             "delta": {"type": "text_delta", "text": part}}
    events = [delta]
    if part is None:
        events = [{"type": "message_start", "message": {"usage": {"input_tokens": 11}}},
                  {"type": "content_block_start", "index": 0,
                   "content_block": {"type": "text", "text": ""}}]
    elif isinstance(part, int):
        events = [{"type": "content_block_stop", "index": 0},
                  {"type": "message_delta", "delta": {"stop_reason": "end_turn"},
                   "usage": {"output_tokens": part}}, {"type": "message_stop"}]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
                   for event in events).encode()


def say_chat(part):
    """The same as chunks of a Chat Completion."""
    choice = {"index": 0, "delta": {"content": part or ""}, "finish_reason": None}
    if not isinstance(part, int):
        return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()
    usage = {"prompt_tokens": 11, "completion_tokens": part}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}
    return b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(last).encode()


SPEECHES = {b"/v1/messages": say_messages, b"/v1/chat/completions": say_chat}
# What kinds of nodes are asked at which path; the other local ones speak as llama.cpp does.
BACKENDS = {"llamacpp": "/v1/chat/completions", "openai": "/v1/chat/completions",
            "anthropic": "/v1/messages"}


def chunk(line):
    return b"%x\r\n%b\r\n" % (len(line), line)


def read_http(connection):
    found = b""
    while b"\r\n\r\n" not in found:
        piece = connection.recv(65536)
        if not piece:
            return None
        found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    size = next((int(line.split(b":")[1]) for line in head.split(b"\r\n")
                 if line.lower().startswith(b"content-length:")), 0)
    while len(body) < size:
        body += connection.recv(65536)
    return head, body


# -- the client --

class Client:
    """One keep-alive connection that posts a body and reads the whole answer."""

    def __init__(self, port):
        self.port = port
        self.connection = None

    def post(self, path, body):
        """Send a body and read the whole answer; return when its first bytes came."""
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.sendall((f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
                                 f"Authorization: Bearer {KEY}\r\nContent-Type: application/json"
                                 f"\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body)
        found = self.connection.recv(65536)
        while b"\r\n\r\n" not in found:
            found += self.connection.recv(65536)
        head, _, rest = found.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        assert status == 200, (status, rest[:300])
        while not rest:
            rest = self.connection.recv(65536)
        first = time.perf_counter()
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            tail = rest[-7:]
            while not tail.endswith(b"\n0\r\n\r\n"):
                tail = (tail + self.connection.recv(65536))[-7:]
        else:
            size = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
            while len(rest) < size:
                rest += self.connection.recv(65536)
        if b"connection: close" in lower:
            self.connection.close()
            self.connection = None
        return first


def median_ms(port, path, body, *, times=200):
    client, took = Client(port), []
    for _ in range(times):
        began = time.perf_counter()
        client.post(path, body)
        took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


def first_ms(port, path, body, *, times=100):
    """The milliseconds until the first bytes of an answer's body."""
    client, took = Client(port), []
    for _ in range(times):
        began = time.perf_counter()
        took.append((client.post(path, body) - began) * 1000)
    return statistics.median(took)


def rate(port, body, *, path="/v1/messages", clients=8, seconds=4.0):
    """Requests a second that so many clients get, each with a connection of its own."""
    counts, until = [0] * clients, time.perf_counter() + seconds

    def work(index):
        client = Client(port)
        while time.perf_counter() < until:
            client.post(path, body)
            counts[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


# -- the gateways --

def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port, process, *, seconds):
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
                probe.sendall(b"GET /health/liveliness HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                              b"Connection: close\r\n\r\n" % port)
                if b" 200 " in probe.recv(64):
                    return time.perf_counter() - began
        except OSError:
            time.sleep(0.005)
        assert process.poll() is None, "the gateway has ended"
    raise AssertionError("the gateway does not answer")


def memory_mb(pid):
    told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], stdout=subprocess.PIPE, check=True)
    return int(told.stdout) / 1024


def held(pid):
    """Threads and open files of a process, where the system tells."""
    tasks, files = (f"/proc/{pid}/{name}" for name in ("task", "fd"))
    return (len(os.listdir(tasks)), len(os.listdir(files))) if os.path.isdir(tasks) else (0, 0)


def start_serve(directory, node_port, provider="ollama", script=ROOT / "subagent_fleet.py"):
    port = free_port()
    (directory / "fleet.yaml").write_text(
        f"project: {{name: bench, gateway: {{provider: builtin, port: {port}}}}}\n"
        f"nodes: {{a: {{endpoint: 'http://127.0.0.1:{node_port}', provider: {provider}}}}}\n"
        "models: {m: {node: a, ollama_model: m, litellm_alias: bench-model, context: 65536, "
        f"cloud: {str(provider == 'anthropic').lower()}, "
        "max_parallel: 8}}\nagents: {planner: {model: m, description: bench}}\n",
        encoding="utf-8")
    process = subprocess.Popen([sys.executable, "-S", str(script), "serve"],
                               cwd=str(directory), stdout=subprocess.DEVNULL,
                               env={**os.environ, "LITELLM_MASTER_KEY": KEY})
    return process, port, wait_for(port, process, seconds=20)


def start_litellm(directory, node_port, program):
    port = free_port()
    (directory / "litellm.yaml").write_text(json.dumps({
        "model_list": [{"model_name": "bench-model", "litellm_params": {
            "model": "ollama_chat/m", "api_base": f"http://127.0.0.1:{node_port}",
            "num_ctx": 65536}, "model_info": {"litellm_provider": "ollama_chat", "mode": "chat"}}],
        "general_settings": {"master_key": KEY}}), encoding="utf-8")
    process = subprocess.Popen(
        [program, "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)],
        cwd=str(directory), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    return process, port, wait_for(port, process, seconds=90)


def start_peer(directory, node_port, command):
    """Start a gateway that somebody installed; it is ready when it takes a connection."""
    port = free_port()
    words = shlex.split(command.replace("{port}", str(port)).replace(
        "{node}", f"http://127.0.0.1:{node_port}"))
    process = subprocess.Popen(words, cwd=str(directory), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    began = time.perf_counter()
    while time.perf_counter() - began < 60:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process, port, time.perf_counter() - began
        except OSError:
            time.sleep(0.005)
        assert process.poll() is None, "the peer has ended"
    raise AssertionError("the peer does not listen")


def measure(name, port, process, *, direct, ready, path="/v1/messages"):
    """Print one gateway's figures; return its requests a second."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["body"]
    recorded = json.dumps({**recorded, "model": "bench-model", "max_tokens": 16}).encode()
    long = {"model": "bench-model", "max_tokens": 500, "stream": True,
            "messages": [{"role": "user", "content": "hi"}]}
    small = median_ms(port, path, SMALL) - direct["small"]
    large = median_ms(port, path, recorded, times=100) - direct["recorded"]
    stream = median_ms(port, path, json.dumps(long).encode(), times=20)
    rates = rate(port, SMALL, path=path)
    print(f"{name}: ready in {ready:.2f} s, added {small:.2f} ms (small), {large:.2f} ms "
          f"(recorded), {(stream - direct['stream']) / 500:.4f} ms a chunk, {rates:.0f} "
          f"requests/s with 8 clients, {memory_mb(process.pid):.0f} MB", flush=True)
    return rates


def measure_dialect(port, node_port, path, *, direct):
    """Print what a request of one of OpenAI's dialects costs."""
    prompt, name, longest = DIALECTS[path]
    recorded = {**json.loads((WIRE / name).read_text(encoding="utf-8"))["body"],
                "model": "bench-model", longest: 16}
    small = {"model": "bench-model", prompt: [{"role": "user", "content": "hi"}]}
    bare = json.dumps({**recorded, "options": {"num_predict": 16}}).encode()
    added = {
        "small": median_ms(port, path, json.dumps({**small, longest: 16}).encode())
        - direct["small"],
        "recorded": median_ms(port, path, json.dumps(recorded).encode(), times=100)
        - median_ms(node_port, "/api/chat", bare, times=100)}
    stream = json.dumps({**small, longest: 500, "stream": True}).encode()
    chunk_ms = (median_ms(port, path, stream, times=20) - direct["stream"]) / 500
    print(f"serve {path}: added {added['small']:.2f} ms (small), {added['recorded']:.2f} ms "
          f"(recorded), {chunk_ms:.4f} ms a chunk", flush=True)


def measure_backend(directory, node_port, provider):
    """Print what a node of another kind costs: the same Messages client, with and without."""
    path = BACKENDS[provider]
    process, port, _ = start_serve(directory, node_port, provider)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["body"]
    asked = {"small": json.loads(SMALL), "recorded": {**recorded, "model": "bench-model",
                                                      "max_tokens": 16, "stream": True},
             "stream": {**json.loads(SMALL), "max_tokens": 500, "stream": True}}
    added = {}
    for name, request in asked.items():
        body, times = json.dumps(request).encode(), {"small": 200, "recorded": 100, "stream": 20}
        added[name] = median_ms(port, "/v1/messages", body, times=times[name]) \
            - median_ms(node_port, path, body, times=times[name])
    print(f"serve before {provider}: added {added['small']:.2f} ms (small), "
          f"{added['recorded']:.2f} ms (recorded), {added['stream'] / 500:.4f} ms a chunk, "
          f"{memory_mb(process.pid):.0f} MB", flush=True)
    process.terminate()
    process.wait(20)


class Watcher:
    """A `ui` with a page open: who reads what it tells and shows it to nobody."""

    def __init__(self, directory):
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(ROOT / "subagent_fleet.py"), "ui", "--port", "0",
             "--no-open"], cwd=str(directory), stdout=subprocess.PIPE,
            env={**os.environ, "LITELLM_MASTER_KEY": KEY})
        told = self.process.stdout.readline().decode()
        port, token = told.split("127.0.0.1:")[1].strip().split("/?token=")
        self.connection = socket.create_connection(("127.0.0.1", int(port)), timeout=60)
        self.connection.sendall(
            f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Cookie: subagent_fleet_{port}={token}\r\n\r\n".encode())
        while b'"followed":true' not in self.connection.recv(65536):
            pass
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with contextlib.suppress(OSError):
            while self.connection.recv(65536):
                pass

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        self.connection.close()


def processor_us(pid):
    """What processor time a process has taken, where the system tells; else 0."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stream:
        fields = stream.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK")
    return 0


def figures(port, process):
    """What one round measures; less is better. On a busy machine only the last one holds still."""
    long = {"model": "bench-model", "max_tokens": 500, "stream": True,
            "messages": [{"role": "user", "content": "hi"}]}
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["body"]
    recorded = json.dumps({**recorded, "model": "bench-model", "max_tokens": 16}).encode()
    before, rates = processor_us(process.pid), rate(port, SMALL, clients=2, seconds=2.0)
    taken = (processor_us(process.pid) - before) / (rates * 2.0)
    return {"ms small": median_ms(port, "/v1/messages", SMALL),
            "ms recorded": median_ms(port, "/v1/messages", recorded, times=100),
            "ms stream of 500": median_ms(port, "/v1/messages", json.dumps(long).encode(), times=20),
            "s a thousand": 1000 / rates, "us of processor a request": taken}


def compare_watched(directory, port, process, rounds):
    """Measure in turns without and with two dashboards; the medians say what these cost."""
    alone, watched = [], []
    for number in range(rounds):
        alone.append(figures(port, process))
        with contextlib.ExitStack() as ending:
            for _ in range(2):
                ending.enter_context(contextlib.closing(Watcher(directory)))
            time.sleep(1.0)
            watched.append(figures(port, process))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    for name in alone[0]:
        before, after = (statistics.median(each[name] for each in found)
                         for found in (alone, watched))
        print(f"{name}: {before:.3f} alone, {after:.3f} with two dashboards "
              f"({100 * (after / before - 1):+.1f} %)", flush=True)


def look(port, node_port, process):
    """One round of what a gateway adds to its node, and takes; less is better."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["body"]
    chat = {"model": "m", "messages": [], "stream": True}
    asked = {"small": (json.loads(SMALL), {**chat, "options": {"num_predict": 16}}, 150),
             "recorded": ({**recorded, "model": "bench-model", "max_tokens": 16},
                          {**recorded, "options": {"num_predict": 16}}, 60),
             "500 words": ({**json.loads(SMALL), "max_tokens": 500, "stream": True},
                           {**chat, "options": {"num_predict": 500}}, 20)}
    added = {}
    for name, (request, bare, times) in asked.items():
        before = processor_us(process.pid)
        added[f"ms added, {name}"] = \
            median_ms(port, "/v1/messages", json.dumps(request).encode(), times=times) \
            - median_ms(node_port, "/api/chat", json.dumps(bare).encode(), times=times)
    # On a busy machine only what the processor did holds still.
    added["us of processor a chunk"] = (processor_us(process.pid) - before) / 500 / times
    request, bare, _ = asked["500 words"]
    short = json.dumps({**request, "max_tokens": 16}).encode()
    added["ms added, first event"] = first_ms(port, "/v1/messages", short) - first_ms(
        node_port, "/api/chat", json.dumps({**bare, "options": {"num_predict": 16}}).encode())
    before, rates = processor_us(process.pid), rate(port, SMALL, seconds=2.0)
    added["us of processor a request"] = (processor_us(process.pid) - before) / (rates * 2.0)
    added["ms a request, 8 clients"] = 1000 / rates
    return added


def compare_reference(directory, node_port, commit, rounds, started):
    """Print what ours takes of what the file took at a commit: medians of rounds in turns."""
    found = {}
    text = subprocess.run(["git", "-C", str(ROOT), "show", f"{commit}:subagent_fleet.py"],
                          stdout=subprocess.PIPE, check=True).stdout
    for name, script in (("then", directory / "then.py"), ("now", ROOT / "subagent_fleet.py")):
        if name == "then":
            script.write_bytes(text)
        (directory / name).mkdir()
        process, port, ready = start_serve(directory / name, node_port, script=script)
        started.append(process)
        found[name] = {"s until ready, the first time": [ready], "process": process, "port": port}
        process.terminate()
        process.wait(20)
        process, port, ready = start_serve(directory / name, node_port, script=script)
        started.append(process)
        found[name].update({"s until ready": [ready], "MB idle": [memory_mb(process.pid)],
                            "process": process, "port": port})
    for _ in range(rounds):
        for each in found.values():
            for what, value in look(each["port"], node_port, each["process"]).items():
                each.setdefault(what, []).append(value)
    for what in found["now"]:
        if what not in ("process", "port"):
            then, now = (statistics.median(found[name][what]) for name in ("then", "now"))
            print(f"{what}: {then:.3f} at {commit}, {now:.3f} now: {now / then:.2f}", flush=True)


def compare_peers(directory, node_port, commands, rounds, started):
    """Measure several gateways in turns; print a table of medians, one column a gateway."""
    begin = {"serve": lambda place: start_serve(place, node_port)}
    for command in commands:
        name, _, words = command.partition("=")
        begin[name] = lambda place, words=words: start_peer(place, node_port, words)
    program = shutil.which("litellm")
    if program:
        begin["litellm"] = lambda place: start_litellm(place, node_port, program)
    processes, rows = {}, {}
    for name, start in begin.items():
        (directory / name).mkdir()
        process, port, ready = start(directory / name)
        started.append(process)
        median_ms(port, "/v1/messages", SMALL, times=20)
        processes[name] = process, port
        rows.setdefault("s until ready", {})[name] = [ready]
        rows.setdefault("MB idle", {})[name] = [memory_mb(process.pid)]
    for number in range(rounds):
        for name, (process, port) in processes.items():
            figures = look(port, node_port, process)
            for clients in (1, 8, 64):
                figures[f"requests a second, {clients} clients"] = rate(
                    port, SMALL, clients=clients, seconds=2.0)
            figures["MB at work"] = memory_mb(process.pid)
            for what, value in figures.items():
                rows.setdefault(what, {}).setdefault(name, []).append(value)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    print("| | " + " | ".join(processes) + " |\n|---" + "|---:" * len(processes) + "|")
    for what, found in rows.items():
        print(f"| {what} | " + " | ".join(
            f"{statistics.median(found[name]):.4g}" for name in processes) + " |", flush=True)


def soak(port, process, count):
    """Send many requests; print what is left of them, and fail when something is."""
    before, began = memory_mb(process.pid), time.perf_counter()
    done = 0
    while done < count:
        done += int(rate(port, SMALL, seconds=1.0))
    time.sleep(0.5)
    after, (threads, files) = memory_mb(process.pid), held(process.pid)
    print(f"serve: {done} requests in {time.perf_counter() - began:.0f} s: {before:.1f} MB before, "
          f"{after:.1f} MB after (goal 40; compiling the file alone takes most of it), "
          f"{threads} threads, {files} files", flush=True)
    assert after - before <= 10 and threads <= 1 and files <= 8, "something is left over"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", type=int)
    parser.add_argument("--soak", type=int, default=10_000)
    parser.add_argument("--backends", action="store_true", help="only: a row a kind of node")
    parser.add_argument("--dashboards", type=int, metavar="ROUNDS",
                        help="only: what two dashboards cost")
    parser.add_argument("--against", type=int, metavar="ROUNDS", help="only: then and now")
    parser.add_argument("--reference", default="a3c56a7", metavar="COMMIT")
    parser.add_argument("--peer", metavar="NAME=COMMAND", action="append",
                        help="only: another gateway in turns with ours")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.node:
        return run_node(options.node)
    node_port, started = free_port(), []
    node = subprocess.Popen([sys.executable, __file__, "--node", str(node_port)])
    started.append(node)
    with tempfile.TemporaryDirectory() as place:
        try:
            time.sleep(0.5)
            recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["body"]
            recorded = json.dumps({**recorded, "options": {"num_predict": 16}}).encode()
            chat = {"model": "m", "messages": [], "stream": True}
            direct = {"small": median_ms(node_port, "/api/chat", json.dumps(
                {**chat, "options": {"num_predict": 16}}).encode()),
                "recorded": median_ms(node_port, "/api/chat", recorded, times=100),
                "stream": median_ms(node_port, "/api/chat", json.dumps(
                    {**chat, "options": {"num_predict": 500}}).encode(), times=20)}
            print("direct: " + ", ".join(f"{k} {v:.2f} ms" for k, v in direct.items()), flush=True)
            if options.backends:
                for provider in BACKENDS:
                    measure_backend(pathlib.Path(place), node_port, provider)
                return None
            if options.against:
                compare_reference(pathlib.Path(place), node_port, options.reference,
                                  options.against, started)
                return None
            if options.peer:
                compare_peers(pathlib.Path(place), node_port, options.peer, options.rounds,
                              started)
                return None
            serve, port, ready = start_serve(pathlib.Path(place), node_port)
            started.append(serve)
            if options.dashboards:
                compare_watched(pathlib.Path(place), port, serve, options.dashboards)
                return None
            ours = measure("serve", port, serve, direct=direct, ready=ready)
            for path in DIALECTS:
                measure_dialect(port, node_port, path, direct=direct)
            for provider in BACKENDS:
                measure_backend(pathlib.Path(place), node_port, provider)
            soak(port, serve, options.soak)
            program = shutil.which("litellm")
            if program:
                other, port, ready = start_litellm(pathlib.Path(place), node_port, program)
                started.append(other)
                theirs = measure("litellm", port, other, direct=direct, ready=ready)
                print(f"serve answers {ours / theirs:.1f} times as many requests a second")
            else:
                print("litellm is not on the PATH: not compared")
        finally:
            for process in started:
                process.terminate()
                process.wait(20)


if __name__ == "__main__":
    sys.exit(main())
