"""Trials: what is asked, how it is judged, what is kept of it, `bench` as a whole."""
import json

import pytest

import subagent_fleet as sf

MEASURED = sf.Measurement(
    node="mini", endpoint="http://10.0.0.2:11434", model="qwen3-coder:30b",
    date="2026-11-18T14:05:02Z", tokens=65536, load_seconds=4.2, prompt_rate=812.5,
    long_prompt_rate=640.0, answer_rate=58.1, first_token_seconds=0.3,
    tools=sf.Score(5, 6, "made one call of two"), context=sf.Score(3, 3),
    claims={"thinking": sf.Score(0, 1, "it did not think")},
    quality={"planner": sf.Score(4, 5)},
    failed=(sf.FailedAnswer("plan-config", "names no file", "Look around."),),
    versions={"ollama": "0.32.15", "subagent-fleet": "1.0.0"}, failure="")


def bench_file(*entries):
    """The bytes of a bench file with these entries."""
    return sf.render_report("bench", {"measurements": list(entries)}).encode()


# -- what is kept --

def test_measurement_is_read_back_as_it_was_written():
    assert sf.parse_measurements(bench_file(MEASURED)) == (MEASURED,)
    assert json.loads(bench_file(MEASURED))["schema"] == sf.BENCH_SCHEMA


@pytest.mark.parametrize("content", [
    None, b"", b"[]", b"{", b"nonsense", b'{"measurements": {}}', b'{"measurements": [1, null]}',
    b"[" * 100_000, b'{"measurements": [{"node": "a", "endpoint": 3, "model": "x"}]}',
    b'{"measurements": [{"node": "a\\u001b[2J", "endpoint": "http://a", "model": "x"}]}'])
def test_bench_file_that_is_none_holds_nothing(content):
    assert sf.parse_measurements(content) == ()


@pytest.mark.parametrize("field, value", [
    ("prompt_rate", -1), ("prompt_rate", True), ("answer_rate", "58"), ("load_seconds", 1e300),
    ("tools", {"passed": 7, "asked": 6}), ("tools", {"passed": 1}), ("tools", {"asked": 0}),
    ("context", [3, 3]), ("claims", [1]), ("quality", {"planner": 5}), ("versions", {"x": 1}),
    ("failed", {"trial": "x"}), ("failed", [{"trial": ""}, 3]), ("tokens", "many")])
def test_field_of_the_wrong_kind_counts_as_absent(field, value):
    entry = {**json.loads(bench_file(MEASURED))["measurements"][0], field: value}
    (measurement,) = sf.parse_measurements(bench_file(entry))
    empty = getattr(sf.Measurement("a", "b", "c"), field)
    assert getattr(measurement, field) == empty
    assert measurement.node == "mini" and measurement.first_token_seconds == 0.3


def test_bench_file_is_bounded_in_everything():
    entry = json.loads(bench_file(MEASURED))["measurements"][0]
    entry["failed"] = [{"trial": "t", "why": "w" * 9000, "answer": "a" * 9000}] * 500
    entry["versions"] = {f"v{number}": "1" * 500 for number in range(500)}
    measured = sf.parse_measurements(bench_file(*[entry] * 20))
    assert len(measured) == 20
    assert len(measured[0].failed) == sf.FAILED_ANSWERS_LIMIT
    assert len(measured[0].failed[0].answer) == sf.MEASURED_TEXT_LIMIT
    assert len(measured[0].versions) == 16
    small = {"node": "a", "endpoint": "http://a:1", "model": "x"}
    many = sf.parse_measurements(bench_file(*[small] * 2000))
    assert len(many) == sf.MEASUREMENTS_LIMIT


def test_latest_measurement_of_that_model_at_that_endpoint_is_found():
    later = sf.replace(MEASURED, date="2026-11-19T00:00:00Z", model="qwen3-coder:30B")
    elsewhere = sf.replace(MEASURED, endpoint="http://10.0.0.3:11434", date="2027")
    measured = (later, MEASURED, elsewhere)
    assert sf.find_measurement(measured, MEASURED.endpoint, "qwen3-coder:30b") is later
    assert sf.find_measurement(measured, "http://other:11434", "qwen3-coder:30b") is None
    assert sf.find_measurement(measured, MEASURED.endpoint, "qwen3:8b") is None


def test_bench_file_of_a_directory_is_read_and_never_followed_out(tmp_path):
    inside, outside = tmp_path / "fleet", tmp_path / "other"
    (inside / ".subagent-fleet").mkdir(parents=True)
    workspace = sf.Workspace(sf.World(), str(inside))
    assert sf.read_measurements(workspace) == ()

    outside.write_bytes(bench_file(MEASURED))
    place = inside / ".subagent-fleet" / "bench.json"
    place.symlink_to(outside)
    assert sf.read_measurements(workspace) == ()

    place.unlink()
    place.write_bytes(outside.read_bytes())
    assert sf.read_measurements(workspace) == (MEASURED,)

    place.write_bytes(b'{"measurements": [' + b"[]," * 200_000)
    assert sf.read_measurements(workspace) == ()


# -- the node's own counters --

def end_of(**last):
    """The End that Ollama's reader makes of a last line."""
    model = sf.Model("m", "n", "x", "x")
    line = {"message": {"content": ""}, "done": True, "done_reason": "stop", **last}
    return sf.Ollama().reader(sf.Talk("x", ()), model, 9).feed(json.dumps(line).encode())[-1].end


def test_times_of_the_node_are_read_from_its_last_line():
    end = end_of(load_duration=1_500_000_000, prompt_eval_count=1000,
                 prompt_eval_duration=2_000_000_000, eval_count=50, eval_duration=500_000_000)
    assert (end.load_seconds, end.prompt_seconds, end.answer_seconds) == (1.5, 2.0, 0.5)


@pytest.mark.parametrize("nanoseconds", [0, -5, "7", 1.5, True, 10 ** 30, None])
def test_time_that_no_request_takes_is_none(nanoseconds):
    end = end_of(load_duration=nanoseconds, eval_duration=nanoseconds)
    assert (end.load_seconds, end.prompt_seconds, end.answer_seconds) == (None, None, None)
