"""The text form of pipelines."""

from __future__ import annotations

import pytest

import relax_llm_passes as rlp
from relax_llm_passes.spec import parse_pass_config, split_spec


def names(**options) -> list[str]:
    pipeline = rlp.default_pipeline("llvm", **options)
    return [s.name for s in pipeline.steps(pipeline.target)]


DEFAULT = names()


def test_split_keeps_braces_together():
    assert split_spec("default, A{x=1,y=2} ,-B") == ["default", "A{x=1,y=2}", "-B"]
    for text in ("A{x=1", "A}x", "A{x}}"):
        with pytest.raises(rlp.InputError, match=r"'}'|closed"):
            split_spec(text)


def test_default_has_every_stage_in_order():
    pipeline = rlp.default_pipeline("llvm")
    stages = [s.stage for s in pipeline.steps(pipeline.target)]
    assert stages[0] == "clean" and stages[-1] == "finish"
    parts = rlp.stages("llvm")
    assert sum(map(len, parts.values())) == len(DEFAULT)


def test_without_a_pass_and_without_a_stage():
    assert names(passes="default,-FuseOps") == [n for n in DEFAULT if n != "FuseOps"]
    without = names(passes="default,-finish")
    assert without == DEFAULT[: len(without)] and "CallTIRRewrite" not in without
    assert names(disabled=["FuseOps"]) == names(passes="default,-FuseOps")


def test_pieces_come_in_pipeline_order():
    clean = [str(p.info.name) for p in rlp.stages("llvm")["clean"]]
    assert "CanonicalizeBindings" in clean and names(passes="clean") == clean
    assert names(passes="LegalizeOps,clean") == [*clean, "LegalizeOps"]
    assert names(passes="default,clean") == DEFAULT


def test_removed_and_asked_for_again():
    assert names(passes="default,-FuseOps,FuseOps") == DEFAULT


@pytest.mark.parametrize("text", ["default,-FuseOpz", "FuseOpz", "default,FuseOpz{a=1}"])
def test_unknown_pass(text):
    with pytest.raises(rlp.UnknownNameError, match="did you mean 'FuseOps'"):
        names(passes=text)


def test_unknown_disabled_pass_and_options_of_one():
    with pytest.raises(rlp.UnknownNameError, match="did you mean 'FuseOps'"):
        names(disabled=["FuseOpz"])
    with pytest.raises(rlp.UnknownNameError, match="LowerComposites"):
        names(options={"LowerComposite": {}})


@pytest.mark.parametrize("text", ["a b", "default,{x=1}", "--X", "ScheduleKernels{avoid}"])
def test_text_that_cannot_be_read(text):
    with pytest.raises(rlp.InputError):
        names(passes=text)


def test_wrong_type():
    with pytest.raises(rlp.InputError, match="expected text"):
        rlp.default_pipeline("llvm", passes=["default"])


def test_inline_options_and_pass_config_agree(monkeypatch):
    config = parse_pass_config(["ScheduleKernels.avoid=Matmul+GEMV"])
    assert config == {"ScheduleKernels": {"avoid": ("Matmul", "GEMV")}}
    pipeline = rlp.default_pipeline("llvm", passes="default,ScheduleKernels{avoid=CpuLoops}")
    from tests.small_modules import Alias

    pipeline(Alias)
    assert "CpuLoops" not in pipeline.report.matched("ScheduleKernels")
    pipeline = rlp.default_pipeline(
        "llvm", options=parse_pass_config(["ScheduleKernels.avoid=CpuLoops"])
    )
    pipeline(Alias)
    assert "CpuLoops" not in pipeline.report.matched("ScheduleKernels")


@pytest.mark.parametrize("item", ["ScheduleKernels.avoid", "avoid=1", "=", "."])
def test_pass_config_form(item):
    with pytest.raises(rlp.InputError, match=r"expected Pass\.option=value"):
        parse_pass_config([item])
