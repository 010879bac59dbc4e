import copy
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from runner import compare, record, report

RANK = {
    "rank": 0,
    "device": "cuda:0",
    "speed": {"step_ms": {"median": 11.0}, "samples_per_s": 3000.0},
    "phases_ms": {"data": 1.0, "forward": 3.0},
    "memory": {"peak_allocated_mib": 1234.0},
}
FULL = {
    "schema": 1,
    "status": "ok",
    "reason": None,
    "run": {"id": "r1"},
    "levers": {
        "global_batch_size": 64,
        "lr": 0.05,
        "precision": "fp32",
        "compile": "eager",
        "parallel": "ddp",
        "world_size": 2,
        "device": "cuda",
    },
    "speed": {
        "step_ms": {"median": 10.0, "mean": 10.5, "ci95": [10.25, 10.75]},
        "samples_per_s": 6095.0,
        "steps": 140,
        "warmup_steps": 10,
        "first_step_ms": 250.0,
        "compile_s": 0.0,
    },
    "phases_ms": {"data": 2.5, "transfer": None, "forward": 7.0, "other": 0.5},
    "memory": {"peak_allocated_mib": 2048.0, "peak_rss_mib": 512.0},
    "utilisation": {"gpu_util_pct": None, "cpu_util_pct": 55.0},
    "quality": {"loss": 0.5, "val/accuracy": 0.849, "val/num_samples": 2000},
    "remarks": ["the last batch is short"],
    "ranks": [],
    "diagnosis": {"verdict": "input", "confidence": "likely", "evidence": ["why"], "next": ["a.b=3"]},
}


def shown(renderable, width=160):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def put(root, name, **changes):
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text(json.dumps(FULL | changes))
    return directory


def levers(**changes):
    return {"levers": FULL["levers"] | changes}


def test_the_panel_says_each_figure_with_its_unit():
    printed = shown(report.panel(FULL, Path("out/r1")))
    for words in (
        "10.00 ms median, 10.50 ms mean (95 % interval 10.25 to 10.75)",
        "6,095 samples/s",
        "140 steps measured, 10 warm-up steps left out",
        "first step 250.0 ms, compilation 0.0 s",
        "accuracy 84.9 % on 2,000 validation samples",
        "2,048 MiB allocated",
        "GPU not measured",
        "CPU 55 %",
        "parallel=ddp x 2 device=cuda",
        "the last batch is short",
        "input (confidence: likely)",
        "next, untested: a.b=3",
        "out/r1",
    ):
        assert words in printed


def test_phases_have_ms_and_share_and_bars_as_long_as_it():
    lines = shown(report.panel(FULL, Path("r"))).split("\n")
    of = {phase: next(line for line in lines if f" {phase} " in line) for phase in ("data", "forward", "other")}
    assert of["data"].split()[-5:-1] == ["2.50", "ms", "25.0", "%"]
    assert "70.0 %" in of["forward"]
    assert "5.0 %" in of["other"]
    assert of["forward"].count("━") == 21  # 70 % of 30
    assert not any("transfer" in line for line in lines)


def test_the_panel_works_for_a_run_that_has_not_begun(tmp_path):
    begun = record.start(tmp_path, config={}, levers={}, run={"id": "x"}, environment={})
    printed = shown(report.panel(begun, tmp_path))
    assert "running" in printed
    assert "not measured" in printed
    failed = shown(report.panel(begun | {"status": "failed", "reason": "data.root: none"}, tmp_path))
    assert "failed: data.root: none" in failed


def test_several_ranks_have_a_row_each():
    printed = shown(report.panel(FULL | {"ranks": [RANK, RANK | {"rank": 1, "device": "cuda:1"}]}, Path("r")))
    row = next(line for line in printed.split("\n") if "cuda:1" in line)
    for cell in ("11.00 ms", "3,000", "25 %", "1,234 MiB"):
        assert cell in row
    assert "cuda:0" not in shown(report.panel(FULL | {"ranks": [RANK]}, Path("r")))


def test_markup_and_escape_sequences_in_a_record_are_not_obeyed(tmp_path):
    planted = "[bold]x[/nothing] \x1b[2J[link=file:///etc]y"
    hostile = FULL | {"reason": planted, "status": "failed", "remarks": [planted], "run": {"id": planted}}
    hostile |= levers(precision=planted, **{planted: 1}) | {"ranks": [RANK | {"device": planted}] * 2}
    for renderable in (
        report.panel(hostile, Path("[red]")),
        compare.table([(Path("[/a]"), hostile), (Path("b"), FULL)], Path()),
    ):
        printed = shown(renderable, width=400)
        assert "\x1b" not in printed
        assert "[bold]x[/nothing]" in printed


ODD = [None, True, "12", [], {}, [[1]], {"a": {}}, float("nan"), -5, 10**5000, 1e300]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_no_odd_value_anywhere_crashes(odd):
    full = FULL | {"ranks": [RANK, RANK]}
    for key, value in full.items():
        changed = [full | {key: odd}]
        changed += [full | {key: value | {inner: odd}} for inner in value] if isinstance(value, dict) else []
        for broken in changed:
            shown(report.panel(broken, Path("r")))
        shown(compare.table([(Path(str(i)), broken) for i, broken in enumerate([FULL, *changed])], Path()))
    for key in RANK:
        shown(report.panel(FULL | {"ranks": [RANK, RANK | {key: odd}, odd]}, Path("r")))


def test_runs_are_found_in_numeric_order_and_unreadable_ones_are_counted(tmp_path, capsys):
    for name in ("10", "2", "9"):
        put(tmp_path, name)
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "summary.json").write_text("{")
    assert [directory.name for directory, _ in compare.find_runs(tmp_path)] == ["2", "9", "10"]
    assert capsys.readouterr().err.startswith("1 left out")


def test_only_levers_that_differ_are_columns_and_several_get_a_caption(tmp_path):
    runs = [(tmp_path / "0", FULL), (tmp_path / "1", FULL | levers(precision="bf16"))]
    assert [column.header.plain for column in compare.table(runs, tmp_path).columns][:3] == [
        "run",
        "status",
        "precision",
    ]
    assert compare.table(runs, tmp_path).caption is None
    runs.append((tmp_path / "2", FULL | levers(lr=0.1)))
    assert "2 levers" in shown(compare.table(runs, tmp_path))
    many = [(tmp_path / "0", FULL), (tmp_path / "1", FULL | levers(**{f"data.x{i}": i for i in range(9)}))]
    assert len(compare.table(many, tmp_path).columns) == 2 + 8 + 5
    assert "data.x8" in shown(compare.table(many, tmp_path))


def test_a_failed_run_is_a_row_with_its_reason(tmp_path):
    failed = copy.deepcopy(FULL) | {"status": "oom", "reason": "no memory left", "speed": {}, "phases_ms": {}}
    failed |= {"memory": {"peak_rss_mib": 77.0}, "quality": {}}
    printed = shown(compare.table([(tmp_path / "a", FULL), (tmp_path / "b", failed)], tmp_path))
    first, second = (line for line in printed.split("\n") if "ok" in line or "oom" in line)
    for cell in ("10.00", "6,095", " 25 ", "2,048", "accuracy 84.9 %"):
        assert cell in first
    for cell in ("no memory left", " 77 ", " - "):
        assert cell in second


def test_the_word_report_prints_a_panel_for_one_run_and_a_table_for_several(tmp_path, capsys):
    first = put(tmp_path, "0")
    for path in (tmp_path, first, first / "summary.json"):
        assert report.main([str(path)]) == 0
        assert "140 steps measured" in capsys.readouterr().out
    put(tmp_path, "1", **levers(lr=0.1))
    assert report.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "samples/s" in printed
    assert "steps measured" not in printed


@pytest.mark.parametrize("word", [report, compare], ids=["report", "compare"])
def test_nothing_there_is_one_sentence_and_exit_code_2(word, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none", tmp_path / "summary.json"):
        assert word.main([str(path)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
    assert word.main(["--help"]) == 0
    assert word.main([]) == 2


def test_compare_as_json_has_a_row_a_run_and_names_each_run_once(tmp_path, capsys):
    put(tmp_path, "0")
    put(tmp_path, "1", status="failed", reason="why")
    assert compare.main([str(tmp_path), str(tmp_path / "0"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["status"], row["reason"], row["step_ms"], row["data_pct"]) for row in rows] == [
        ("ok", None, 10.0, 25.0),
        ("failed", "why", 10.0, 25.0),
    ]
