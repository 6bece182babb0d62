"""Exit codes, names of files, deadlines and limits that several rooms agree on."""
from __future__ import annotations

# A constant with only one user stands beside that user.

EXIT_OK = 0
EXIT_PROBLEM = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 130

# Files, by the names people know.
CONFIG_NAMES = ("fleet.yaml", "fleet.yml", "fleet.json")
CONFIG_VARIABLE = "SUBAGENT_FLEET_CONFIG"
STATE_DIRECTORY = ".subagent-fleet"
MANIFEST_FILE = f"{STATE_DIRECTORY}/manifest.json"
LITELLM_FILE = "litellm_config.yaml"
LITELLM_LOG_FILE = f"{STATE_DIRECTORY}/litellm.log"
ENVIRONMENT_FILE = ".env.subagent-fleet"
TEXT_LIMIT_BYTES = 4 * 1024 * 1024
RECEIPTS_LIMIT_BYTES = 10 * 1024 * 1024

# How long to wait.
PROBE_TIMEOUT_SECONDS = 5.0
INIT_TIMEOUT_SECONDS = 2.0
CONNECT_SECONDS = 3.0  # a sleeping laptop costs this, not the whole deadline
SEND_SECONDS = 60.0
LEAVE_SECONDS = 0.02  # for a byte to arrive before the connection closes
PROBE_GRACE_SECONDS = 0.2  # so that an answer in time reaches the main thread
PULL_STALL_SECONDS = 120.0
TICK_SECONDS = 0.2

# How much to read.
ANSWER_LIMIT_BYTES = 8 * 1024 * 1024
IDLE_LIMIT = 8  # connections to a node that are kept
PROBE_LIMIT_BYTES = 1024 * 1024  # 2,400 models; decoded and parsed they take five times that
ENOUGH_BYTES = 256 * 1024  # the useful beginning of all that Ollama knows of a model
HEADER_LIMIT_BYTES = 64 * 1024
SHOW_LIMIT = 64  # models of one node that are asked for their capabilities

HOME_URL = "https://github.com/adityak74/subagent-fleet"
OTHER_PORT = "write another `port:` under project.gateway, or stop it"


def name_taken(port: int) -> str:
    """Return the finding for a port that another program uses."""
    return f"port {port} is in use by something else (`lsof -i :{port}` shows what)"


OLLAMA_PORT = 11434
OLLAMA_ENDPOINT = "http://localhost:11434"
# One address for each way out of a machine: the internet, private networks, Tailscale.
ROUTE_TARGETS = ("192.0.2.1", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.100.100.100")
TIERS = ("main", "opus", "sonnet", "haiku", "fable")

# Where a person's own subscription answers (Claude Code 2.1.326).
CLAUDE_ENDPOINT = "https://api.anthropic.com"
