import copy
import json

import pytest

from runner.diagnose import clean, diagnose, load, main, shares_pct, text
from runner.errors import BadInput

PHASES = {"data": 1.0, "transfer": None, "forward": 3.0, "backward": 4.0, "optimizer": 1.5, "other": 0.5}


def summary(**changes):
    """A run of 40 steps of 10 ms: 10 % data, 70 % forward and backward, 15 % optimizer."""
    content = {
        "schema": 1,
        "status": "ok",
        "reason": None,
        "config": {"batch": {"global_batch_size": 64}},
        "levers": {"precision": "fp32", "compile": "eager", "data.loader.num_workers": 2, "optimizer.fused": None},
        "speed": {"steps": 40, "delay_pct": 1.0, "step_ms": {"median": 10.0}},
        "phases_ms": dict(PHASES),
        "wall_s": {"evaluation": 1.0, "checkpoint": 1.0, "logging": 1.0, "total": 100.0},
        "memory": {},
        "compile": {},
        "environment": {},
    }
    content = copy.deepcopy(content)
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(value, dict) else value
    return content


def phases(**changes):
    return {"phases_ms": PHASES | changes}


def test_shares_are_of_the_known_phases_and_sum_to_100():
    assert shares_pct(summary()) == {"data": 10, "forward": 30, "backward": 40, "optimizer": 15, "other": 5}


def test_a_short_run_is_unknown_and_says_how_many_steps_are_missing():
    found = diagnose(summary(speed={"steps": 29}))
    assert (found["verdict"], found["confidence"], found["next"]) == ("unknown", "unknown", [])
    assert "1 more" in found["evidence"][0]
    assert diagnose(summary(speed={"steps": 30}))["verdict"] == "compute"


def test_a_run_without_phases_is_unknown():
    assert diagnose(summary(phases_ms=dict.fromkeys(PHASES)))["verdict"] == "unknown"


def test_forward_and_backward_of_70_pct_are_compute_and_bf16_needs_hardware_that_has_it():
    assert diagnose(summary())["verdict"] == "compute"
    assert diagnose(summary())["next"] == ["compile=default"]
    assert diagnose(summary(environment={"has_native_bf16": False}))["next"] == ["compile=default"]
    assert diagnose(summary(environment={"has_native_bf16": True}))["next"] == ["precision=bf16", "compile=default"]
    tried = summary(environment={"has_native_bf16": True}, levers={"precision": "bf16", "compile": "default"})
    assert diagnose(tried)["next"] == []


def test_data_above_40_pct_is_input_and_two_workers_more_are_the_next_override():
    found = diagnose(summary(**phases(data=9.0)))  # 9 of 18
    assert (found["verdict"], found["confidence"]) == ("input", "likely")
    assert found["next"] == ["data.loader.num_workers=4"]
    assert "50 %" in found["evidence"][0]
    auto = diagnose(summary(**phases(data=9.0), levers={"data.loader.num_workers": "auto"}))
    assert (auto["verdict"], auto["next"]) == ("input", [])


def test_data_of_exactly_40_pct_is_mentioned_only():
    found = diagnose(summary(**phases(data=6.0)))  # 6 of 15; forward and backward 7 of 15
    assert found["verdict"] == "mixed"
    assert any("40 %" in sentence and "data" in sentence for sentence in found["evidence"])


def test_an_optimizer_of_35_pct_is_the_verdict_and_fused_is_not_advised_twice():
    fat = phases(optimizer=4.6)  # 4.6 of 13.1
    assert diagnose(summary(**fat))["verdict"] == "optimizer"
    assert diagnose(summary(**fat))["next"] == ["optimizer.fused=true"]
    assert diagnose(summary(**fat, levers={"optimizer.fused": True}))["next"] == []


def test_recompilations_are_the_verdict_with_the_first_reason():
    found = diagnose(summary(compile={"recompile_reasons": ["size mismatch at 0", "again"]}))
    assert (found["verdict"], found["next"]) == ("recompile", ["compile=dynamic"])
    assert "2 reasons" in found["evidence"][0]
    assert "size mismatch at 0" in found["evidence"][0]


@pytest.mark.parametrize(
    ("wall_s", "verdict"),
    [
        ({"evaluation": 49.0, "checkpoint": 1.0, "logging": 0.0}, "compute"),
        ({"evaluation": 50.0, "checkpoint": 1.0, "logging": 0.0}, "evaluation"),
        ({"evaluation": 5.0, "checkpoint": 1.0, "logging": 50.0}, "logging"),
    ],
)
def test_more_than_half_of_the_wall_time_beside_the_steps_is_a_verdict(wall_s, verdict):
    assert diagnose(summary(wall_s=wall_s))["verdict"] == verdict


def test_a_delay_of_10_pct_makes_the_confidence_contended():
    assert diagnose(summary(speed={"delay_pct": 9.9}))["confidence"] == "likely"
    found = diagnose(summary(speed={"delay_pct": 12.0}))
    assert (found["verdict"], found["confidence"]) == ("compute", "contended")
    assert any("12 %" in sentence for sentence in found["evidence"])


def test_memory_near_its_limit_advises_half_the_micro_batch_at_the_same_global_batch():
    levers = {"micro_batch_size": 64, "global_batch_size": 64}
    near = {"peak_reserved_mib": 92.0, "device_total_mib": 100.0}
    found = diagnose(summary(memory=near, levers=levers))
    assert "batch.micro_batch_size=32 batch.accumulation_steps=null" in found["next"]
    assert found["verdict"] == "compute"
    below = diagnose(summary(memory=near | {"peak_reserved_mib": 91.0}, levers=levers))
    assert not any("micro_batch_size" in override for override in below["next"])
    derived = summary(status="oom", speed={"steps": 0}, levers=levers, config={"batch": {"global_batch_size": None}})
    assert diagnose(derived)["next"] == [
        "batch.global_batch_size=64 batch.micro_batch_size=32 batch.accumulation_steps=null"
    ]


ODD = [None, True, "12", "\x1b[2J", [], {}, [[1]], {"a": {}}, float("nan"), float("inf"), -5, 10**400, 10**5000, 1e300]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_no_odd_value_anywhere_crashes(odd):
    for key, value in summary().items():
        diagnose(summary() | {key: odd})
        if isinstance(value, dict):
            for inner in value:
                diagnose(summary() | {key: value | {inner: odd}})
    assert diagnose({})["verdict"] == "unknown"


def test_text_holds_nothing_that_a_terminal_obeys():
    planted = "a\x1b[31mred\x1b[0m\x1b]0;title\x07\r\n\x9b2J\u202eb\ud800\x00"
    assert text(planted) == "ared 2Jb"
    assert clean({"k\x07": [planted, float("nan"), 10**5000]}) == {"k": ["ared 2Jb", None, None]}


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 200_000, '{"schema": ' + "9" * 6000 + "}", "\ud800"])
def test_a_file_that_is_no_summary_is_one_sentence(tmp_path, capsys, content):
    (tmp_path / "summary.json").write_text(content, errors="surrogatepass")
    with pytest.raises(BadInput):
        load(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_word_prints_the_verdict_and_says_that_overrides_are_untested(tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps(summary()))
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "verdict: compute (confidence: likely)" in printed
    assert "(untested): compile=default" in printed
    assert main([str(tmp_path / "summary.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == diagnose(summary())
    assert main([str(tmp_path / "none")]) == 2
    assert main(["--help"]) == 0
