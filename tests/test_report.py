"""Reports: what matched, what was refused and why, as text and JSON."""

from __future__ import annotations

import json

import relax_llm_passes as rlp
from relax_llm_passes.report import PassRecord, Refusal, Report
from tests.small_modules import Alias


def sample() -> Report:
    report = Report("llvm")
    first = report.add(PassRecord("FuseThing", 0.002, fuses=True))
    first.match("thing", 1, "main", "lv1")
    first.match("thing", 1, "main", "lv9")
    first.refuse("the axis is 2, expected 1", "thing", "main", "lv3")
    for i in range(4):
        first.refuse(Refusal("shared", "thing", "main", f"lv{10 + i}"))
    report.add(PassRecord("FuseOther", 0.001, fuses=True))
    report.add(PassRecord("LegalizeOps", 0.003))
    report.add(PassRecord("FuseOff", fuses=True)).note("disabled")
    return report


def test_a_refusal_is_false_and_says_where():
    refusal = Refusal("too wide", "gemm", "main", "lv3")
    assert not refusal
    assert str(refusal) == "gemm at main.lv3: too wide"
    assert str(Refusal("why")) == "why"


def test_text_says_what_was_asked_for_and_matched_nothing():
    lines = sample().to_text(times=False).splitlines()
    assert lines[0] == "target llvm"
    assert any(line.startswith("FuseThing") and "thing 2" in line for line in lines)
    assert any(line.startswith("FuseOther") and "matched nothing" in line for line in lines)
    assert not any(line.startswith("LegalizeOps") and "nothing" in line for line in lines)
    assert any("note: disabled" in line for line in lines)
    assert any("main.lv3: the axis is 2, expected 1" in line for line in lines)
    assert any("main.lv10: shared (4 times" in line for line in lines)


def test_text_limits_the_reasons():
    text = sample().to_text(refusals=1)
    assert "expected 1" in text and "shared" not in text and "1 other reasons" in text


def test_json_has_everything():
    data = json.loads(sample().to_json())
    assert data["target"] == "llvm"
    first = data["passes"][0]
    assert first["matched"] == {"thing": 2}
    assert first["bindings"] == {"thing": ["main.lv1", "main.lv9"]}
    assert len(first["refused"]) == 5
    assert first["refused"][0] == {
        "reason": "the axis is 2, expected 1",
        "kind": "thing",
        "function": "main",
        "binding": "lv3",
    }


def test_totals():
    report = sample()
    assert report.matched()["thing"] == 2 and not report.matched("FuseOther")
    assert len(report.refused()) == 5 and report.refused("FuseOther") == []
    assert abs(report.seconds - 0.006) < 1e-9


def test_a_pipeline_reports_each_pass_once_and_in_order():
    pipeline = rlp.default_pipeline("llvm")
    pipeline(Alias)
    ran = [p.name for p in pipeline.report.passes]
    assert ran == [s.name for s in pipeline.steps(pipeline.target)]
    first = pipeline.report
    pipeline(Alias)
    assert pipeline.report is not first and len(pipeline.report.passes) == len(first.passes)


def test_nested_collectors_do_not_mix():
    from relax_llm_passes.report import collect, current

    assert current() is None
    with collect() as outer:
        with collect() as inner:
            rlp.get_pass("CanonicalizeBindings")(Alias)
        assert current() is outer
    assert len(inner.passes) == 1 and not outer.passes
