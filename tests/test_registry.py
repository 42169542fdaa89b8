"""Passes by name, plugins from other packages, the entry point at `import tvm`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tvm

import relax_llm_passes as rlp
from relax_llm_passes import registry, report
from tests.small_modules import Alias

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def scratch():
    """Registrations made inside a test are gone after it."""
    rlp.list_passes()
    before = dict(registry._PASSES)
    yield
    registry._PASSES.clear()
    registry._PASSES.update(before)


def test_every_pass_has_a_name_a_stage_and_a_summary():
    passes = rlp.list_passes()
    assert {"CanonicalizeBindings", "LowerComposites", "ScheduleKernels"} <= {
        p.name for p in passes
    }
    order = [registry.STAGES.index(p.stage) for p in passes]
    assert order == sorted(order)
    assert all(p.summary for p in passes)


def test_unknown_pass_names_the_closest():
    with pytest.raises(rlp.UnknownNameError, match="did you mean 'CanonicalizeBindings'"):
        rlp.get_pass("CanonicalizeBinding")


def test_unknown_option_and_wrong_type():
    with pytest.raises(rlp.UnknownNameError, match="did you mean 'avoid'"):
        rlp.get_pass("LowerComposites", avoit=())
    with pytest.raises(rlp.InputError, match=r"LowerComposites\.avoid=3"):
        rlp.get_pass("LowerComposites", avoid=3)


def test_pass_is_a_tvm_pass_with_its_name():
    transform = rlp.get_pass("CanonicalizeBindings")
    assert isinstance(transform, tvm.transform.Pass)
    assert transform.info.name == "CanonicalizeBindings"
    assert transform.info.opt_level == 0  # TVM drops higher ones in silence


def test_a_pass_alone_reports_into_the_collector():
    with report.collect() as found:
        rlp.get_pass("CanonicalizeBindings")(Alias)
    assert [p.name for p in found.passes] == ["CanonicalizeBindings"]
    assert found.passes[0].seconds > 0


def _register(name="TestIdentity", summary="Change nothing."):
    @dataclass(frozen=True)
    class Options:
        size: int = 3

    def identity(mod, run):
        run.record.note(f"size {run.options.size}")
        return mod

    identity.__doc__ = summary
    return rlp.register_pass(name, stage="optional", options=Options)(identity)


def test_registering_again_from_the_same_place_replaces(scratch):
    _register()
    _register(summary="Another text.")
    found = [p for p in rlp.list_passes() if p.name == "TestIdentity"]
    assert [p.summary for p in found] == ["Another text."]


def test_registering_a_name_of_somebody_else_is_refused(scratch):
    with pytest.raises(rlp.InputError, match="is registered by relax_llm_passes"):
        _register("CanonicalizeBindings")


def test_unknown_stage(scratch):
    with pytest.raises(rlp.UnknownNameError, match="did you mean 'fuse'"):
        rlp.register_pass("X", stage="fuze")


def test_options_reach_the_pass(scratch):
    _register()
    with report.collect() as found:
        rlp.get_pass("TestIdentity", size=7)(Alias)
        rlp.get_pass("TestIdentity")(Alias)
    assert [p.notes for p in found.passes] == [["size 7"], ["size 3"]]


def test_tvm_sees_the_pass_by_name():
    seen = []

    @tvm.ir.instrument.pass_instrument
    class Names:
        def run_before_pass(self, mod, info):
            seen.append(str(info.name))

    timing = tvm.ir.instrument.PassTimingInstrument()
    with tvm.transform.PassContext(instruments=[Names(), timing]):
        rlp.get_pass("CanonicalizeBindings")(Alias)
        table = timing.render()
    assert seen == ["CanonicalizeBindings"]
    assert "CanonicalizeBindings" in table


def test_disabled_pass_of_the_context_is_honoured():
    # TVM asks for it in a Sequential; a pass that is called directly always runs.
    several = tvm.transform.Sequential([rlp.get_pass("CanonicalizeBindings")])
    with report.collect() as found:
        with tvm.transform.PassContext(disabled_pass=["CanonicalizeBindings"]):
            several(Alias)
        assert found.passes == []
        several(Alias)
    assert [p.name for p in found.passes] == ["CanonicalizeBindings"]


# --- in a fresh process, as users have it -----------------------------------------------------


def python(code: str, *path: Path) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def install(folder: Path, name: str, entry: str) -> None:
    """Write the metadata that an installer writes."""
    info = folder / f"{name}-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(f"[relax_llm_passes.plugins]\n{name} = {entry}\n")


def test_plugin_adds_a_pass_a_library_and_a_kernel(tmp_path):
    install(tmp_path, "relax_llm_plugin_demo", "relax_llm_plugin_demo:register")
    code = """
import tvm, relax_llm_passes as rlp
import numpy as np
from tests.small_modules import Relus, inputs
assert "MarkRelu" in [p.name for p in rlp.list_passes()]
assert "demolib" in [x.name for x in rlp.list_libraries()]
def compiled(target, **more):
    seq = rlp.default_pipeline(target, **more)
    ex = tvm.compile(Relus, seq.target, relax_pipeline=seq)
    x = 3 * inputs(4)[0]
    got = tvm.relax.VirtualMachine(ex, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(got, np.maximum(np.maximum(x, 0) - 1, 0), rtol=1e-6)
    return seq.report
print(dict(compiled("demolib, llvm").matched())["demo_relu:demo.relu"])
print(dict(compiled("llvm", passes="default,MarkRelu").matched())["demo_relu:demo.relu"])
print(dict(compiled("demolib, llvm", options={"MarkRelu": {"limit": 2}}).matched())["relu"])
print("relu" in compiled("demolib, llvm", passes="default,-MarkRelu").matched())
"""
    assert python(code, ROOT / "tests/plugin", tmp_path).split() == ["1", "2", "2", "False"]


def test_a_plugin_that_fails_is_named_and_left_out(tmp_path):
    install(tmp_path, "broken_plugin", "no_such_module:register")
    code = """
import warnings
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    import relax_llm_passes as rlp
    names = [p.name for p in rlp.list_passes()]
print("CanonicalizeBindings" in names, [str(w.message) for w in found])
"""
    out = python(code, tmp_path)
    assert out.startswith("True") and "'broken_plugin'" in out and "ModuleNotFoundError" in out


def test_the_name_works_with_no_import_of_the_package():
    code = """
import sys, tvm
heavy = [m for m in sys.modules if m.startswith("relax_llm_passes.") and "autoload" not in m]
print([m for m in heavy if m.endswith(("pipeline", "registry", "lower"))])
from tests.small_modules import Alias, call, expected, inputs
import numpy as np
ex = tvm.compile(Alias, tvm.target.Target({"kind": "llvm"}), relax_pipeline="relax_llm")
for n in (1, 6):
    x, w = inputs(n)
    np.testing.assert_allclose(call(ex, x, w), expected(x, w), rtol=1e-5, atol=1e-5)
from relax_llm_passes._autoload import register
register(); register()
print("ScheduleKernels" in [p.name for p in __import__("relax_llm_passes").list_passes()])
"""
    assert python(code).split() == ["[]", "True"]
