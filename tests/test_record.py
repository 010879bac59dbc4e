"""The record: summaries from hand-written rows against hand sums, and the schema against a golden file."""

import json
import math
from pathlib import Path

import pytest

from runner import record

GOLDEN = json.loads((Path(__file__).parent / "golden" / "record_schema_1.json").read_text())
OPAQUE = {"config", "levers", "compile", "environment"}  # their keys are the run's own


def a_row(step, **columns):
    row = dict.fromkeys(GOLDEN["steps"])
    row |= {"step": step, "epoch": 0, "is_warmup": False, "samples": 8, "skipped": False, "step_ms": 10.0}
    return row | {"compile_ms": 0.0, "loss": 1.0, "shape_is_new": False, "fetch_ms": 0.0} | columns


def a_run(directory, *ranks, **totals):
    """A directory with a started summary and, for each rank, its rows and totals."""
    facts = {key.removeprefix("run."): None for key in GOLDEN["summary"] if key.startswith("run.")}
    record.start(directory, config={}, levers={}, run=facts, environment={})
    for rank, rows in enumerate(ranks):
        with record.JsonLines(directory / f"steps.{rank}.jsonl") as lines:
            lines.write(rows)
        wall_s = {"steps": 3.0, "evaluation": 0.5, "checkpoint": 0.25, "logging": 0.125}
        content = {"rank": rank, "device": "cpu", "memory": {"peak_rss_mib": 100.0 + rank}, "wall_s": wall_s}
        record.write_json(directory / f"rank.{rank}.json", content | {"first_step_at": 12.0} | totals)


def close(directory, **changes):
    ending = {"status": "ok", "reason": None, "started_at": 10.0, "ended_at": 20.0, "utilisation": {}}
    return record.summarise(directory, **(ending | changes))


def paths(node, prefix=""):
    """Every key of a nested record, dotted; a list's entries share the key `[]`."""
    if isinstance(node, list):
        return {path for item in node if isinstance(item, dict) for path in paths(item, f"{prefix}[]")} | {prefix}
    if not isinstance(node, dict) or prefix in OPAQUE:
        return {prefix}
    return {path for key, item in node.items() for path in paths(item, f"{prefix}.{key}" if prefix else key)}


def test_the_summarys_keys_are_those_of_schema_1(tmp_path):
    a_run(tmp_path, [a_row(0)])
    found = paths(close(tmp_path))
    assert record.SCHEMA == 1
    assert sorted(found) == sorted(GOLDEN["summary"])


def test_a_steps_lines_keys_and_their_order_are_those_of_schema_1():
    from runner.measure import recorder

    assert list(recorder._row(0, 0, False)) == GOLDEN["steps"]


def test_a_run_that_has_not_begun_has_every_key_already(tmp_path):
    a_run(tmp_path)
    summary = record.read_summary(tmp_path)
    assert summary["status"] == "running"
    assert paths(summary) == {path for path in GOLDEN["summary"] if not path.startswith("ranks[]")}
    assert summary["speed"]["step_ms"] == dict.fromkeys(("median", "mean", "p05", "p95", "ci95"))


def test_one_ranks_figures_are_the_hand_sums(tmp_path):
    rows = [
        a_row(0, step_ms=10.0, data_ms=1.0, forward_ms=4.0, other_ms=5.0, delay_ms=1.0, loss=3.0, tokens=80),
        a_row(1, step_ms=20.0, data_ms=3.0, forward_ms=12.0, other_ms=5.0, delay_ms=2.0, loss=2.0, tokens=80),
        a_row(2, step_ms=60.0, data_ms=2.0, forward_ms=50.0, other_ms=8.0, delay_ms=6.0, loss=1.0, tokens=80),
    ]
    a_run(tmp_path, rows)
    summary = close(tmp_path)
    speed = summary["speed"]
    assert speed["step_ms"]["median"] == 20.0
    assert speed["step_ms"]["mean"] == pytest.approx(30.0)
    assert speed["samples_per_s"] == pytest.approx(24 / 0.090)
    assert speed["tokens_per_s"] == pytest.approx(240 / 0.090)
    assert speed["delay_pct"] == pytest.approx(10.0)
    assert speed["first_step_ms"] == 10.0
    assert summary["phases_ms"]["data"] == pytest.approx(2.0)
    assert summary["phases_ms"]["forward"] == pytest.approx(22.0)
    assert summary["phases_ms"]["other"] == pytest.approx(6.0)
    assert summary["phases_ms"]["backward"] is None
    assert summary["quality"]["loss"] == pytest.approx(2.0)
    assert summary["blocks"] == [10.0, 20.0, 60.0]
    assert summary == record.read_summary(tmp_path)


def test_a_phase_that_only_some_steps_have_counts_as_nothing_in_the_others(tmp_path):
    a_run(tmp_path, [a_row(0, communication_ms=6.0), a_row(1), a_row(2)])
    assert close(tmp_path)["phases_ms"]["communication"] == pytest.approx(2.0)


def test_of_two_ranks_samples_are_summed_times_are_rank_0s_and_memory_is_the_largest(tmp_path):
    zero = [a_row(0, step_ms=10.0, samples=6, loss=1.0), a_row(1, step_ms=30.0, samples=6, loss=1.0)]
    one = [a_row(0, step_ms=100.0, samples=2, loss=5.0), a_row(1, step_ms=100.0, samples=2, loss=5.0)]
    a_run(tmp_path, zero, one)
    summary = close(tmp_path)
    assert summary["speed"]["step_ms"]["mean"] == pytest.approx(20.0)
    assert summary["speed"]["samples_per_s"] == pytest.approx(16 / 0.040)
    assert [rank["speed"]["samples_per_s"] for rank in summary["ranks"]] == pytest.approx([12 / 0.040, 4 / 0.200])
    assert summary["quality"]["loss"] == pytest.approx((6 * 1.0 + 2 * 5.0) / 8)
    assert summary["memory"]["peak_rss_mib"] == 101.0


def test_the_ranks_stand_in_order_also_beyond_nine(tmp_path):
    a_run(tmp_path, *[[a_row(0)] for _ in range(11)])
    assert [rank["rank"] for rank in close(tmp_path)["ranks"]] == list(range(11))


def test_warm_up_and_steps_that_compiled_are_left_out(tmp_path):
    rows = [
        a_row(0, step_ms=900.0, is_warmup=True, compile_ms=800.0),
        a_row(1, step_ms=500.0, is_warmup=True),
        a_row(2, step_ms=10.0),
        a_row(3, step_ms=700.0, compile_ms=600.0),
        a_row(4, step_ms=30.0),
    ]
    a_run(tmp_path, rows)
    summary = close(tmp_path)
    assert summary["speed"]["steps"] == 2
    assert summary["speed"]["warmup_steps"] == 2
    assert summary["speed"]["step_ms"]["mean"] == pytest.approx(20.0)
    assert summary["speed"]["compile_s"] == pytest.approx(1.4)
    assert summary["speed"]["first_step_ms"] == 900.0
    assert summary["blocks"] == [10.0, 30.0]
    assert summary["wall_s"]["compile"] == pytest.approx(1.4)
    assert summary["wall_s"]["steps"] == pytest.approx(3.0 - 1.4)


def test_a_run_with_no_measured_step_has_nulls_and_no_error(tmp_path):
    a_run(tmp_path, [a_row(0, is_warmup=True)])
    speed = close(tmp_path)["speed"]
    assert speed["steps"] == 0
    assert speed["step_ms"]["mean"] is None
    assert speed["samples_per_s"] is None


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    a_run(tmp_path, [a_row(0), a_row(1)])
    with (tmp_path / "steps.0.jsonl").open("a") as file:
        file.write(json.dumps(a_row(2))[:40])
    summary = close(tmp_path, status="failed", reason="killed")
    assert summary["speed"]["steps"] == 2
    assert (summary["status"], summary["reason"]) == ("failed", "killed")


def test_a_run_that_left_nothing_can_be_closed(tmp_path):
    a_run(tmp_path)
    summary = close(tmp_path, status="failed", reason="no rank began")
    assert summary["ranks"] == []
    assert summary["wall_s"]["total"] == summary["wall_s"]["other"] == 10.0


def test_the_wall_times_add_up_to_the_run(tmp_path):
    a_run(tmp_path, [a_row(0)])
    wall = close(tmp_path)["wall_s"]
    assert wall["startup"] == 2.0
    assert wall["other"] == pytest.approx(10.0 - 2.0 - 3.0 - 0.5 - 0.25 - 0.125)
    assert sum(value for key, value in wall.items() if key != "total" and value is not None) == pytest.approx(10.0)


def test_blocks_are_at_most_ten_of_equal_size():
    assert record.blocks([]) == []
    assert record.blocks([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert record.blocks([float(i) for i in range(20)]) == [2 * i + 0.5 for i in range(10)]
    assert record.blocks([float(i) for i in range(25)]) == [2 * i + 0.5 for i in range(10)]


def test_the_interval_is_students_over_the_blocks(tmp_path):
    a_run(tmp_path, [a_row(i, step_ms=value) for i, value in enumerate((10.0, 12.0, 14.0, 16.0))])
    half = 3.182 * math.sqrt(20 / 3) / 2  # t(3), variance 20/3, root of 4 blocks
    assert close(tmp_path)["speed"]["step_ms"]["ci95"] == pytest.approx([13 - half, 13 + half])


def test_one_step_has_no_interval(tmp_path):
    a_run(tmp_path, [a_row(0)])
    assert close(tmp_path)["speed"]["step_ms"]["ci95"] is None


@pytest.mark.parametrize(
    ("step_ms", "first"),
    [
        ([10.0] * 19, None),
        ([10.0] * 20, 0),
        ([50.0] * 8 + [10.0] * 32, 4),  # of ten steps from 4 on, six are steady
        ([50.0] * 25 + [10.0] * 15, None),  # the median of the last half is 10; 12 is the last allowed start
        ([10.4] * 20 + [10.0] * 20, 0),
    ],
)
def test_the_first_steady_step_is_where_ten_steps_median_meets_the_last_halfs(step_ms, first):
    if first == 4:  # at 3 the ten are half and half, so their median, 30, is not steady yet
        assert record.steady_from(step_ms[:]) == 4
    assert record.steady_from(step_ms) == first


def test_a_write_that_fails_midway_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    record.write_json(path, {"old": 1})

    def half(self, text):
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="disk full"):
        record.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}


def test_what_json_has_no_word_for_becomes_null(tmp_path):
    path = tmp_path / "a.json"
    record.write_json(path, {"a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}, "e": (math.nan,)})
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 1.0], "c": {"d": None}, "e": [None]}
    with record.JsonLines(tmp_path / "a.jsonl") as lines:
        lines.write([{"loss": math.nan}])
    assert record.read_lines(tmp_path / "a.jsonl") == [{"loss": None}]


def test_a_diverged_runs_null_losses_are_not_averaged(tmp_path):
    a_run(tmp_path, [a_row(0, loss=2.0), a_row(1, loss=math.nan)])
    assert close(tmp_path, status="diverged")["quality"]["loss"] == 2.0


def test_what_is_not_a_summary_is_refused(tmp_path):
    (tmp_path / "summary.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="not a run's summary"):
        record.read_summary(tmp_path)
    with pytest.raises(FileNotFoundError):
        record.read_summary(tmp_path / "nowhere")
