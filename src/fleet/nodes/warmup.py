"""Loading, unloading and pulling models, and looking meanwhile."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.address import split_endpoint
from fleet.config.names import find_models
from fleet.config.node import fix_for_reason
from fleet.findings.checks import fix_for_missing
from fleet.nodes.probe import ask_loaded, ask_node, explain_failure, probe, sign
from fleet.plan.routes import fits_context
from fleet.speech.backend import PullStep
from fleet.speech.cloud import backend_of
from fleet.start.constants import PROBE_TIMEOUT_SECONDS, PULL_STALL_SECONDS, TICK_SECONDS
from fleet.start.errors import NodeFailure
from fleet.start.record import Record, replace
from fleet.text.phrases import some_of
from fleet.world.child import run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from fleet.config.node import LoadedModel
    from fleet.config.sections import Fleet, Model, Node
    from fleet.world.world import World


# A load says nothing until it ends, so a long one is looked at:
# what does its machine hold now?
LOAD_LOOK_SECONDS = 2.0
BUSY_SECONDS = 6.0  # another model leaves, or the new one is listed, within this
HUNG_SECONDS = 15.0  # a machine that answers nothing for so long is left
BUSY_FIX = "wait until that ends, or give the model a machine of its own"


class Warmth:
    """One `model` on one `node`: what is done with it now, and how that ended."""

    def __init__(self, node: Node, model: Model) -> None:
        self.node, self.model = node, model
        # Asking, loading, busy, not answering, unloading, pulling, done.
        self.stage = "waiting"
        self.began = self.seconds = 0.0
        self.pulled = self.size = 0  # bytes of a download
        self.reason = self.detail = self.fix = ""
        self.loaded: LoadedModel | None = None
        self.rivals: tuple[str, ...] = ()  # what its machine holds instead, while it is busy

    @property
    def ok(self) -> bool:
        """Whether nothing has failed so far."""
        return not self.reason

    @property
    def state(self) -> str:
        """What became of it: ok, not answering, busy or failed; its stage until it ends."""
        if self.stage != "done":
            return self.stage
        words = {"": "ok", "timeout": "not answering", "unreachable": "not answering",
                 "busy": "busy"}
        return words.get(self.reason, "failed")

    @property
    def wait(self) -> str:
        """For whom it waits on a busy machine."""
        return f"{some_of(self.rivals, 3)} seems to be in use there"

    def fail(self, failure: NodeFailure) -> None:
        """Note what went wrong and its fix."""
        self.reason = failure.reason
        self.detail = failure.detail or failure.reason
        self.fix = failure.fix or fix_for_reason(failure.reason, self.node.provider)


class WarmUp(Record):
    """How models are warmed: for how long each may take, and what is done instead."""

    seconds: float | None = None  # None: the model's own timeout
    busy_seconds: float = float("inf")  # how long others may keep a machine from loading
    pull: bool = False
    unload: bool = False
    fleet: Fleet | None = None  # whose models they are


def warm_nodes(world: World, groups: Mapping[str, Sequence[Warmth]],
               how: WarmUp) -> Iterator[tuple[Any, Any]]:
    """Run the Warmths of each node, nodes in parallel; yield as `run_together` does."""
    def warm(warmths: Sequence[Warmth]) -> None:
        # Whoever does not answer this has taken five seconds, not the minutes of a load.
        time_step(_ask_first, warmths[0], world, how)
        for warmth in warmths[1:]:
            warmth.reason, warmth.detail = warmths[0].reason, warmths[0].detail
            warmth.fix = warmths[0].fix

        for warmth in warmths:
            for step in (load_model, _see_loaded):
                if warmth.ok:
                    time_step(step, warmth, world, how)
            warmth.stage = "done"
        # What is in memory together shows only when all are loaded.
        for warmth in warmths[:-1]:
            if warmth.ok:
                time_step(_see_loaded, warmth, world, how)

    jobs = {name: lambda warmths=warmths: warm(warmths) for name, warmths in groups.items()}
    return run_together(world, jobs)


def time_step(step: Callable[[Warmth, World, WarmUp], None], warmth: Warmth, world: World,
               how: WarmUp) -> None:
    warmth.began = world.clock()
    try:
        step(warmth, world, how)
    except NodeFailure as failure:
        warmth.fail(explain_failure(failure, backend_of(warmth.node)))
    warmth.seconds += world.clock() - warmth.began


def _ask_first(warmth: Warmth, world: World, how: WarmUp) -> None:
    """Ask a machine whether it is there, before anything is asked of it that takes long."""
    warmth.stage = "asking"
    seconds = min(PROBE_TIMEOUT_SECONDS, how.seconds or PROBE_TIMEOUT_SECONDS)
    until = world.clock() + seconds
    try:
        ask_node(world, warmth.node, backend_of(warmth.node).identify(), deadline=until)
    except NodeFailure as failure:
        if failure.reason != "timeout":
            raise
        raise NodeFailure("timeout", f"no answer within {seconds:g} s") from None


def load_model(warmth: Warmth, world: World, how: WarmUp) -> None:
    """Load or unload a model; first download one that its node lacks, if that is wished."""
    if warmth.model.cloud:
        place = "ollama.com"
        if warmth.node.provider != "ollama":
            place = split_endpoint(warmth.node.endpoint).host
        warmth.detail = f"runs at {place}, nothing to load"
        return

    try:
        _ask_to_load(warmth, world, how)
    except NodeFailure as failure:
        words = backend_of(warmth.node).load_with_prompt(warmth.model)
        if failure.reason == "http 400" and words and not how.unload:
            until = world.clock() + (how.seconds or warmth.model.timeout)
            ask_node(world, warmth.node, words, deadline=until)
            return
        if failure.reason != "http 404":
            raise
        if how.unload:
            warmth.detail = "not there"
            return
        if not how.pull:
            until = world.clock() + PROBE_TIMEOUT_SECONDS
            state = probe(world, warmth.node, until, [warmth.model.name])
            fix = fix_for_missing(how.fleet, warmth.model, state)
            raise NodeFailure(failure.reason, failure.detail, fix=fix) from None
        _pull(warmth, world)
        _ask_to_load(warmth, world, how)


def _ask_to_load(warmth: Warmth, world: World, how: WarmUp) -> None:
    """Load or unload a model, and say why where that takes too long."""
    seconds = how.seconds or warmth.model.timeout
    backend = backend_of(warmth.node)
    warmth.stage = "unloading" if how.unload else "loading"

    try:
        if backend.loads_twice and not _makes_room(warmth, world, how):
            return
        _send_load(warmth, world, how)
        if not how.unload:
            _await_load(warmth, world, seconds)
    except NodeFailure as failure:
        if failure.reason != "timeout" or warmth.stage == "not answering":
            raise
        if warmth.stage == "busy":
            raise NodeFailure("busy", warmth.wait, fix=BUSY_FIX) from None
        verb = "unloaded" if how.unload else "loaded"
        fix = f"look at {backend.title}'s log there, or give it longer: --timeout 900"
        raise NodeFailure("slow", f"not {verb} within {seconds:g} s", fix=fix) from None


def _makes_room(warmth: Warmth, world: World, how: WarmUp) -> bool:
    """Tell whether to ask for anything; unload a model whose context does not fit."""
    model = warmth.model
    listed = ask_loaded(world, warmth.node)
    if listed is None:
        return True
    loaded = find_models(listed, model.ollama_model)
    if how.unload:
        return bool(loaded)
    for instance in loaded:
        if fits_context(warmth.node.provider, instance.context, model.context):
            return False
    if loaded:
        _send_load(warmth, world, replace(how, unload=True))
    return True


def _send_load(warmth: Warmth, world: World, how: WarmUp) -> None:
    """Ask to load a model, and look from time to time at what its machine holds meanwhile."""
    request = backend_of(warmth.node).load(warmth.model, unload=how.unload)
    stage = warmth.stage
    began = answered = looked = world.clock()
    until = began + (how.seconds or warmth.model.timeout)
    jobs = {"load": lambda: ask_node(world, warmth.node, request, deadline=until)}
    # Where this gives up, the request goes on: the model is loaded when its turn comes.
    for key, outcome in run_together(world, jobs):
        if isinstance(outcome, NodeFailure):
            raise outcome
        if key is not None:
            warmth.detail = outcome or warmth.detail
            continue
        now = world.clock()
        if now < looked + LOAD_LOOK_SECONDS:
            continue

        try:
            is_busy = (_is_busy(warmth, world) and not how.unload
                       and now >= began + BUSY_SECONDS)
            warmth.stage, answered = "busy" if is_busy else stage, now
        except NodeFailure as failure:
            if failure.reason in ("timeout", "unreachable"):
                warmth.stage = "not answering"
        looked = world.clock()
        silence = looked - answered
        if warmth.stage == "not answering" and silence >= HUNG_SECONDS:
            raise NodeFailure("timeout", "it took the request, but has not answered for "
                              f"{silence:.0f} s")
        if warmth.stage == "busy" and now - began >= how.busy_seconds:
            raise NodeFailure("busy", warmth.wait, fix=BUSY_FIX)


def _is_busy(warmth: Warmth, world: World) -> bool:
    """Tell whether its machine holds other models, and this one is not even on its way."""
    model = warmth.model
    loaded = ask_loaded(world, warmth.node) or ()
    warmth.rivals = tuple(other.name for other in loaded)
    # A model that waits for others is not listed, and they are (0.32.15).
    return bool(loaded) and not any(match.context in (0, model.context) for match in
                                    find_models(loaded, model.ollama_model))


def _await_load(warmth: Warmth, world: World, seconds: float) -> None:
    """Wait for a load that goes on after its answer."""
    ask = backend_of(warmth.node).check_loading(warmth.model)
    until = world.clock() + seconds
    while ask:
        now = world.clock()
        if ask_node(world, warmth.node, ask, deadline=now + PROBE_TIMEOUT_SECONDS):
            return
        if now >= until:
            raise NodeFailure("timeout", "")
        world.sleep(TICK_SECONDS)


def _pull(warmth: Warmth, world: World) -> None:
    """Have the node download the model."""
    warmth.stage = "pulling"
    ask = sign(world, warmth.node, backend_of(warmth.node).pull(warmth.model))
    layers = {}
    step = PullStep()
    try:
        for step in world.ask_lines(warmth.node.endpoint, ask,
                                    stall_seconds=PULL_STALL_SECONDS):
            if step.total:
                layers[step.layer] = step
                warmth.pulled = sum(layer.completed for layer in layers.values())
                warmth.size = sum(layer.total for layer in layers.values())
    except NodeFailure as failure:
        if failure.reason != "timeout":
            raise
        what = f"the download made no progress for {PULL_STALL_SECONDS:g} s"
        raise NodeFailure("slow", what, fix="look at its network, and pull again") from None
    if not step.is_done:
        raise NodeFailure("bad answer", "the download ended without `success`")


def _see_loaded(warmth: Warmth, world: World, how: WarmUp) -> None:
    """Hold what the node says is loaded against what was wanted."""
    model = warmth.model
    if model.cloud or how.unload or model.keep_alive == 0:
        return

    backend = backend_of(warmth.node)
    ask = backend.list_loaded()
    loaded = ask_loaded(world, warmth.node)
    if loaded is None:
        return
    matches = find_models(loaded, model.ollama_model)
    if not matches:
        shown = some_of([other.name for other in loaded], 5) or "an empty list"
        raise NodeFailure("not loaded", f"{backend.title} loaded it, but "
                          f"{ask.path} shows only {shown}",
                          fix="move it to another node, or write a smaller `context:`")

    warmth.loaded = min(matches, key=lambda match: match.context != model.context)
    context = warmth.loaded.context
    if not fits_context(warmth.node.provider, context, model.context):
        raise NodeFailure("context", f"loaded with context {context}, not {model.context}",
                          fix=f"write `context: {context}` in models.{model.name}")
