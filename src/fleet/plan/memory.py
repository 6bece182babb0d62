"""What fits a machine, how many conversations stay warm there, what to pull."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.names import billions
from fleet.config.node import NodeModel
from fleet.config.sections import Model
from fleet.plan.measured import is_older
from fleet.plan.roles import MAIN_CONTEXT_TOKENS
from fleet.start.gate import LatePattern

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.config.node import NodeState


# A server of models keeps 16 bits for each key and value (llama-server b10488, which Ollama
# 0.32.15 runs): of every token in the layers that see all, of a window and the batch it reads
# in those that see only the last, a state where there is neither. Besides it keeps prompts in
# main memory.

ROUGH_TOKEN_BYTES = 12_000  # of a token of context, for each billion parameters
LARGEST_MODEL_BYTES = 1 << 50  # what says it is larger says nothing
WORKING_SHARE = 1.1  # of the weights: what a server needs to work with them
BATCH_TOKENS = 512  # that are read at once, beside a window
WINDOW_STEP = 256
CHECKPOINT_TOKENS = 8192  # so often a window or a state is kept, as it cannot be wound back
USUAL_CACHE_GB = 8.59  # of main memory for prompts: 8 GiB a loaded model
_PARAMETERS = LatePattern(r"(\d{1,6}(?:\.\d{1,6})?)([MBT])")
_PARAMETER_UNITS = {"M": 0.001, "B": 1.0, "T": 1000.0}

# Where the metadata do not say it by layer: one in so many sees everything; the others see a
# window, or keep a state.
WINDOW_PATTERNS = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2,
                   "gptoss": 2}
STATE_PATTERNS = {"qwen35": 4, "qwen35moe": 4, "qwen3next": 4}
LAYERS_LIMIT = 1_000
_BY_LAYER = ("attention.head_count_kv", "attention.sliding_window_pattern")


def unread_layers(known: Mapping[str, Any]) -> list[str]:
    """Return the keys that differ by layer and were left out: Ollama empties long lists."""
    names = (f"{known.get('general.architecture')}.{key}" for key in _BY_LAYER)
    return [name for name in names if name in known and known[name] in (None, [])]


class Metadata:
    """What the file of a model says of it; numbers without sense count as absent."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known
        self.kind = str(known.get("general.architecture"))
        self.layers = self.number("block_count") - self.number("attention.shared_kv_layers")

    def number(self, key: str) -> int:
        value = self.known.get(f"{self.kind}.{key}")
        return value if type(value) is int and 0 < value < 1_000_000 else 0

    def heads(self) -> list[int]:
        """Return how many heads of keys and values each layer has; none where unclear."""
        value = self.known.get(f"{self.kind}.attention.head_count_kv")
        counts = value[:self.layers] if isinstance(value, list) else [value] * self.layers
        heads = [count for count in counts if type(count) is int and 0 <= count < 100_000]
        return heads if len(heads) == self.layers else []

    def sees_window(self, layer: int) -> bool:
        """Tell whether a layer sees only the last tokens."""
        pattern = self.known.get(f"{self.kind}.attention.sliding_window_pattern",
                                 WINDOW_PATTERNS.get(self.kind))
        if isinstance(pattern, list):
            return layer < len(pattern) and bool(pattern[layer])
        return type(pattern) is int and pattern > 0 and (layer + 1) % pattern != 0

    def widths(self, behind: str = "") -> int:
        """Return the values that a head keeps of a token, its key and its value."""
        widths = sum(
            self.number(f"attention.{name}{behind}") or self.number(f"attention.{name}")
            for name in ("key_length", "value_length"))
        heads = self.number("attention.head_count")
        if not widths and heads:  # they share the embedding
            return self.number("embedding_length") // heads * 2
        return widths

    def state_bytes(self) -> int:
        """Return the bytes of a layer without keys, such as Mamba's: 32 bits each."""
        inner, size = self.number("ssm.inner_size"), self.number("ssm.state_size")
        rows = max(self.number("ssm.conv_kernel") - 1, 0)
        return 4 * (rows * (inner + 2 * self.number("ssm.group_count") * size) + inner * size)


def plan_cache(known: Mapping[str, Any]) -> dict[str, int]:
    """Return the memory of a model's context, from `model_info` of `/api/show`.

    `token_bytes` for each token and `window_bytes` once a slot; nothing where it is not told.
    """
    model = Metadata(known)
    if not 0 < model.layers <= LAYERS_LIMIT or unread_layers(known):
        return {}

    # Latent attention keeps a key of this rank for all heads, and no values.
    rank = model.number("attention.kv_lora_rank")
    if rank and model.number("attention.key_length_mla"):
        return {
            "token_bytes": model.layers * (rank + model.number("rope.dimension_count")) * 2}

    window = model.number("attention.sliding_window")
    cells = -(-(window + BATCH_TOKENS) // WINDOW_STEP) * WINDOW_STEP
    interval = model.number("full_attention_interval") or STATE_PATTERNS.get(model.kind, 0)
    token_bytes = window_bytes = 0
    for layer, heads in enumerate(model.heads()):
        if interval and (layer + 1) % interval:
            window_bytes += model.state_bytes()
        elif window and model.sees_window(layer):
            window_bytes += cells * heads * model.widths("_swa") * 2
        else:
            token_bytes += heads * model.widths() * 2
    return {"token_bytes": token_bytes, "window_bytes": window_bytes} if token_bytes else {}


def plan_gigabytes(model: NodeModel, context: int, slots: int = 1) -> float:
    """Return about how much memory a model takes: its weights, room to work, its context."""
    if not model.token_bytes:  # a guess is not multiplied
        slots = min(slots, 1)
    return (_weight_bytes(model) + slots * _prompt_bytes(model, context)) / 1e9


def plan_fitting_context(model: NodeModel, gigabytes: float, slots: int = 1) -> int:
    """Return the context that so much memory has room for, in whole 1,024; 0 for none."""
    room = (gigabytes * 1e9 - _weight_bytes(model)) / slots - model.window_bytes
    each = _prompt_bytes(model, 1) - model.window_bytes
    return max(int(room / each) // 1024 * 1024, 0) if each else 0


def plan_warm(model: NodeModel, context: int, slots: int, cache_gb: float) -> int | None:
    """Return how many conversations of this length stay warm; None: the metadata do not tell.

    Those in the slots, and those whose prompts the server keeps in main memory: there it
    needs room for one more, as it stores what a slot holds before it takes another out.
    """
    if not model.token_bytes:
        return None
    return slots + max(int(cache_gb / plan_kept_gigabytes(model, context)) - 1, 0)


def plan_kept_gigabytes(model: NodeModel, context: int) -> float:
    """Return the bytes of a conversation in a server's main memory."""
    checkpoints = context // CHECKPOINT_TOKENS * model.window_bytes
    return (_prompt_bytes(model, context) + checkpoints) / 1e9


def plan_prompt_cache(state: NodeState, told: float | None = None) -> float:
    """Return how many GB of prompts a server keeps in main memory per model, if not told."""
    if told is not None:
        return told
    is_llama = state.provider == "llamacpp" or (
        state.provider == "ollama"
        and not is_older(state.version, "0.30"))  # before, there is none
    return USUAL_CACHE_GB if is_llama else 0.0


# What to pull where no model will do, the strongest first: as ollama.com had them in
# November 2026.
PULLS = (
    NodeModel("gpt-oss:120b", 65_369_818_941, token_bytes=36_864, window_bytes=28_311_552),
    NodeModel("qwen3-coder:30b", 18_556_701_140, token_bytes=98_304),
    NodeModel("gpt-oss:20b", 13_793_441_244, token_bytes=24_576, window_bytes=18_874_368),
    NodeModel("qwen3:8b", 5_225_388_164, token_bytes=147_456),
    NodeModel("qwen3:4b", 2_497_293_931, token_bytes=147_456))
USABLE_SHARE = 0.75  # of a machine's memory: a Mac gives its GPU no more


def plan_pull(gigabytes: float | None) -> str:
    """Return the strongest model that holds Claude Code's prompt in so much memory, or ""."""
    if not gigabytes:
        return SMALL_PLACEHOLDER
    fitting = [model.name for model in PULLS
               if plan_fitting_context(model, gigabytes) >= MAIN_CONTEXT_TOKENS]
    return fitting[0] if fitting else ""


def tell_pull(gigabytes: float | None) -> str:
    """Return what to pull for this memory; if nothing fits, the need of the smallest."""
    pull = plan_pull(gigabytes)
    if pull:
        return f"`ollama pull {pull}`"
    needed = int(plan_gigabytes(PULLS[-1], MAIN_CONTEXT_TOKENS)) + 1
    return f"{PULLS[-1].name}, the smallest suitable model, needs {needed} GB"


def _weight_bytes(model: NodeModel) -> float:
    """Return the memory of a model's weights and buffers, from its size or its name."""
    size = model.size or parameters_of(model) * BYTES_A_BILLION
    return min(size, LARGEST_MODEL_BYTES) * WORKING_SHARE


def parameters_of(model: NodeModel) -> float:
    """Return a model's parameters in billions, by its node or else its name; 0: unknown."""
    match = _PARAMETERS.fullmatch(model.parameters)
    told = float(match[1]) * _PARAMETER_UNITS[match[2]] if match else billions(model.name)
    return min(told, 1_000_000)


def _prompt_bytes(model: NodeModel, tokens: int) -> float:
    """Return the memory of a conversation, from the node's facts or the model's size."""
    each = model.token_bytes or ROUGH_TOKEN_BYTES * parameters_of(model)
    return model.window_bytes + each * tokens


# At four bits a weight, where neither name nor node tell the parameters.
BYTES_A_BILLION = 6e8

# How `init` serves a model of one size; the names are placeholders.
STARTER_MODELS = {
    # 2.1.326 compacts 32768 before its first turn.
    "heavy": Model("heavy-coder", "", "qwen3-coder:30b", "claude-sonnet-local", context=65536,
                   timeout=600),
    "small": Model("small-coder", "", "qwen3:8b", "claude-haiku-local", MAIN_CONTEXT_TOKENS)}
SMALL_PLACEHOLDER = STARTER_MODELS["small"].ollama_model


NOTE_START = "For "  # how each note of ours above a model begins
