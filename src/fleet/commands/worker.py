"""`worker`: open this machine to the fleet."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fleet.cli.rows import SET_UP, TIMEOUT, command
from fleet.cli.say import exit_status
from fleet.config.address import address_kind, split_endpoint
from fleet.config.sections import Node
from fleet.findings.files import check_worker
from fleet.nodes.probe import probe_nodes
from fleet.plan.candidates import rank_models
from fleet.plan.roles import MAIN_CONTEXT_TOKENS
from fleet.plan.starter import plan_worker_block
from fleet.start.record import Record
from fleet.steps.machines import SERVER_SETUPS, look_for_servers, own_endpoint
from fleet.text.phrases import quote_shell, some_of
from fleet.text.tables import format_finding, format_fix, format_table, format_words, wrap_text
from fleet.text.terminal import PLAIN, Cell, mark
from fleet.text.yaml_dump import dump_yaml
from fleet.workspace.config import look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.config.node import NodeState
    from fleet.text.terminal import Look
    from fleet.world.world import World


class WorkerSetup(Record):
    """How Ollama gets its settings on a system: the first lines, one for each, the last lines."""

    before: str
    line: str
    after: str = ""


WORKER_SETTINGS = {
    "OLLAMA_HOST": "0.0.0.0:{port}",
    "OLLAMA_CONTEXT_LENGTH": str(MAIN_CONTEXT_TOKENS),
    "OLLAMA_KEEP_ALIVE": "-1",
    "OLLAMA_NUM_PARALLEL": "1",
    "OLLAMA_NO_CLOUD": "1",
    "OLLAMA_MAX_LOADED_MODELS": "{models}",
}
WORKER_SETUPS = {
    "darwin": WorkerSetup(
        before="""\
In the Ollama app: Settings > Expose Ollama to the network. Or in Terminal on the Mac itself
(this is lost when the Mac restarts):

""",
        line='  launchctl setenv {name} "{value}"\n',
        after="  killall Ollama; open -a Ollama\n"),
    "systemd": WorkerSetup(
        before="""\
Run `sudo systemctl edit ollama` and paste this where the file says so:

  [Service]
""",
        line='  Environment="{name}={value}"\n',
        after="\nThen: sudo systemctl restart ollama\n"),
    "docker": WorkerSetup(
        before="""\
Stop the running container, then start it like this (add `--gpus=all` for a GPU):

  docker run -d --name ollama --restart unless-stopped -v ollama:/ollama \\
    -e OLLAMA_MODELS=/ollama/models \\
""",
        line="    -e {name}={value} \\\n",
        after="    -p {address}:{port}:{port} ollama/ollama\n"),
    "shell": WorkerSetup(
        before="""\
Stop Ollama, then start it like this:

""",
        line="  {name}={value} \\\n",
        after="  ollama serve\n"),
}
SECURITY_WARNING = """\
Ollama has no login: whoever reaches it can use, change and delete its models.
Do not expose Ollama or LiteLLM to the public internet. Use LAN, firewall, Tailscale, or WireGuard.
"""


def format_setup(system: str, state: NodeState, reached: Sequence[NodeState]) -> str:
    """Return what to type on this system to open its Ollama to the fleet."""
    port = split_endpoint(state.endpoint).port
    words = {
        "port": port,
        "models": len(rank_models(state)) or 1,
        "address": reached[0].name if reached else "0.0.0.0",
    }
    setup = WORKER_SETUPS[system]
    text = setup.before
    for name, value in WORKER_SETTINGS.items():
        text += setup.line.format(name=name, value=value.format(**words))
    return text + setup.after.format(**words)


def format_server(server: Mapping[str, Any], look: Look = PLAIN) -> str:
    """Return which server answers on this machine, and how to open it if it is closed."""
    state = server["node"]
    names = some_of([model.name for model in state.models], 5) or "no model"
    words = f"{state.runs} runs here ({state.endpoint}) with {names}"
    if server["open"]:
        words += f"; it answers at {some_of(server['open'], 3)}"
    text = format_words([Cell(words)], look, indent="  ")
    if not server["open"]:
        text += format_fix(f"to open it to the fleet, {server['setup']}", look)
    return text


def format_worker(report: Mapping[str, Any], look: Look = PLAIN) -> str:
    """Return everything that `worker` says; the part to paste comes last."""
    state = report["ollama"]
    text = ""
    if state.online:
        names = ", ".join(model.name for model in state.models) or "no model"
        sentence = Cell(f"Ollama {state.version} runs here with {names}")
        text = format_words([sentence], look, indent="  ")
    text += "".join(format_server(server, look) for server in report["servers"])
    rows = []
    for address in report["addresses"]:
        answers = mark("yes", "ok", look) if address["open"] else mark("no", "bad", look)
        rows.append((address["address"], address["kind"], answers))

    block = {key: value for key, value in report["fleet"].items() if value}
    where = "On the machine that has the fleet, "
    if "models" in block:
        name, node = next(iter(block["nodes"].items()))
        machine = quote_shell(node["endpoint"].replace("http://", ""))
        where += f"type `subagent-fleet add {quote_shell(name)}={machine}`, or "
    keys = " and ".join(f"`{key}:`" for key in block)
    table = "No address of this machine is in a network that others can reach.\n"
    if rows:
        table = format_table(("Address", "Kind", "Ollama answers there"), rows, look=look)
    return "\n".join(filter(None, (
        text, table,
        *(format_finding(finding, look=look) for finding in report["findings"]),
        "Recommended settings for a machine of the fleet:\n",
        wrap_text(report["setup"], look),
        wrap_text(SECURITY_WARNING, look),
        wrap_text(f"{where}put these lines under the {keys} of its fleet.yaml:\n", look),
        dump_yaml(block))))


@command("worker", "show how to add this machine", TIMEOUT,
         group=SET_UP, examples=("worker",))
def cmd_worker(options: Namespace, world: World) -> int:
    name, addresses = world.own_names()
    others = list(filter(address_kind, addresses))
    port = split_endpoint(own_endpoint(world)).port
    nodes = {address: Node(address, f"http://{address}:{port}")
             for address in ("127.0.0.1", *others)}
    here, *reached = probe_nodes(world, nodes, options.timeout).values()

    program = find_ollama(world)
    system = find_system(world, in_docker=here.online and not program)
    findings = check_worker(program, here, reached)
    servers = look_for_servers(world, others, options.timeout)
    server = [here, *reached]
    if servers and not here.online:
        findings = []  # Ollama is not needed
        server = servers[0]
    report = {
        "servers": [{"node": state, "open": [other.name for other in opened],
                     "setup": SERVER_SETUPS[state.provider]} for state, *opened in servers],
        "ollama": here,
        "addresses": [{"address": state.name, "kind": address_kind(state.name),
                       "open": state.online} for state in reached],
        "findings": findings,
        "setup": format_setup(system, here, reached),
        "fleet": plan_worker_block(name, server[0], server[1:])}

    world.out(format_worker(report, look_of(world)))
    return exit_status(findings)


def find_ollama(world: World) -> str:
    """Return where Ollama is installed, or an empty string."""
    app = "/Applications/Ollama.app"
    return world.which("ollama") or (app if world.kind_of(app) == "directory" else "")


def find_system(world: World, *, in_docker: bool) -> str:
    """Return the key of WORKER_SETUPS that fits the way Ollama runs on this machine."""
    if in_docker and world.which("docker"):  # it answers, but is not installed
        return "docker"
    if sys.platform == "darwin":
        return "darwin"
    return "systemd" if world.which("systemctl") else "shell"
