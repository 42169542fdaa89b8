"""`explain --cuda`: counters of a module's kernels, beside those of TVM's default pipeline."""

import pytest

from benchmarks import cuda_counters
from relax_llm_passes.cli import main
from relax_llm_passes.cuda_on_cpu import Compared, comparison_table

MODULE = """
from tvm.script import ir as I
from tvm.script import relax as R

@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((1, 64), "float32"), w: R.Tensor((32, 64), "float32")):
        with R.dataflow():
            wt = R.permute_dims(w, axes=[1, 0])
            y = R.matmul(x, wt, out_dtype="float32")
            z = R.nn.relu(y)
            R.output(z)
        return z
"""


def test_explain_compares_with_tvm(tmp_path, capsys):
    path = tmp_path / "m.py"
    path.write_text(MODULE)
    assert main(["explain", str(path), "--target", "cuda -arch=sm_90", "--cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["kernel", "n", "blocks", "threads"]
    assert any(line.startswith("gemv_NK_1_32_64") for line in lines)
    header = next(i for i, line in enumerate(lines) if line.startswith("graph "))
    rows = {}
    for line in lines[header + 1 : header + 3]:
        name = "TVM's default" if "TVM's default" in line else "this package"
        launches, barriers, over = line.split(name)[1].split()[:3]
        rows[name] = int(launches), int(barriers), float(over)
    # TVM copies the transposed weight: it is read, written and read again.
    assert rows["this package"] == (1, 0, 1.0)
    assert rows["TVM's default"][0] == 2 and rows["TVM's default"][2] > 2.5


def row(**options):
    totals = {"launches": 3, "barriers": 7, "bytes_over_minimum": 1.5, "least_bytes": 64,
              "global_read_sectors": 4, "global_write_sectors": 2, "lane_use": 0.5,
              "conflicts": 0.25}  # fmt: skip
    return Compared("g", "p", totals, **options)


def test_the_table_says_what_failed_and_what_differs():
    rows = [row(equal=True), row(equal=False), Compared("g", "q", failed="Error: why")]
    text = comparison_table(rows)
    assert [line.split() for line in text.splitlines()][1:] == [
        ["g", "p", "3", "7", "1.50", "3.00", "50", "0.25", "yes"],
        ["g", "p", "3", "7", "1.50", "3.00", "50", "0.25", "NO"],
        ["g", "q", "Error:", "why"],
    ]
    markdown = comparison_table(rows, markdown=True).splitlines()
    assert markdown[1].startswith("| --- |") and all(line.count("|") == 10 for line in markdown)


def test_the_readme_keeps_its_place_for_the_table(tmp_path, monkeypatch):
    copy = tmp_path / "README.md"
    copy.write_text(cuda_counters.README.read_text())
    monkeypatch.setattr(cuda_counters, "README", copy)
    cuda_counters.write_readme("| new |")
    cuda_counters.write_readme("| newer |")
    text = copy.read_text()
    assert text.count("| newer |") == 1 and "| new |" not in text
    assert all(text.count(mark) == 1 for mark in cuda_counters.MARKS)
    copy.write_text("no marks")
    with pytest.raises(ValueError, match="no place for the table"):
        cuda_counters.write_readme("| new |")
