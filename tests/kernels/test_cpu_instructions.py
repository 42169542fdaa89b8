"""Which instructions other processors' kernels are made of, and what the pair products compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm

from relax_llm_passes.kernels.cpu_bf16_dot import AVX512_BF16
from relax_llm_passes.kernels.cpu_gemm import gemm_kernel
from relax_llm_passes.kernels.cpu_spec import GemmSpec, QuantSpec
from relax_llm_passes.kernels.cpu_tiles import cpu_tiles
from relax_llm_passes.targets import parse_target

from .cpu_gemm_cases import NATIVE, Case

ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]}
ARM_DOT = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}
BF16 = ("bfloat16",) * 3
INT4 = QuantSpec(4, 32, 7, activation_bits=8)


def _assembly(spec: GemmSpec, target: object) -> str:
    target = parse_target(target)
    return tvm.compile(gemm_kernel(spec, target), target=target).mod.inspect_source("asm")


@pytest.mark.parametrize(
    "target, words",
    [
        ("llvm -mcpu=sapphirerapids", ["vfmadd", "zmm"]),
        ("llvm -mcpu=znver4", ["vfmadd", "zmm"]),
        (ARM, ["fmla", ".4s"]),
    ],
)
@pytest.mark.parametrize("m", [1, 64])
def test_fp32_takes_the_widest_vectors(target: object, words: list[str], m: int) -> None:
    lines = _assembly(GemmSpec((m,), 96, 80), target).splitlines()
    assert any(all(word in line for word in words) for line in lines)


@pytest.mark.parametrize("m", [1, 64])
def test_bf16_pairs_where_the_processor_has_them(m: int) -> None:
    spec = GemmSpec((m,), 96, 256, "NK", *BF16)
    assert "vdpbf16ps" in _assembly(spec, "llvm -mcpu=sapphirerapids")
    assert "vdpbf16ps" not in _assembly(spec, "llvm -mcpu=skylake-avx512")
    mixed = GemmSpec((m,), 96, 256, "NK", "float32", "bfloat16", "float32")
    assert "vdpbf16ps" not in _assembly(mixed, "llvm -mcpu=sapphirerapids")


@pytest.mark.parametrize(
    "target, word",
    [
        ("llvm -mcpu=haswell", "vpmaddubsw"),
        ("llvm -mcpu=alderlake", "vpdpbusd"),
        ("llvm -mcpu=znver4", "vpdpbusd"),
        (ARM_DOT, "sdot"),
    ],
)
@pytest.mark.parametrize("layout", ["NK", "KN"])
def test_products_of_bytes(target: object, word: str, layout: str) -> None:
    spec = GemmSpec((1,), 64, 512, layout, "float16", "uint32", "float16", quant=INT4)
    assert word in _assembly(spec, target)
    exact = replace(spec, quant=replace(INT4, activation_bits=0))
    assert word not in _assembly(exact, target)


# What `vdpbf16ps` does but for denormals, with the vectors of this machine.
_EMULATED = """
define linkonce_odr <L x float> @relax_llm_dot_bf16(<L x float> %s, <L x i32> %a, <L x i32> %b) {
  %al = shl <L x i32> %a, splat (i32 16)
  %bl = shl <L x i32> %b, splat (i32 16)
  %ah = and <L x i32> %a, splat (i32 -65536)
  %bh = and <L x i32> %b, splat (i32 -65536)
  %afl = bitcast <L x i32> %al to <L x float>
  %bfl = bitcast <L x i32> %bl to <L x float>
  %afh = bitcast <L x i32> %ah to <L x float>
  %bfh = bitcast <L x i32> %bh to <L x float>
  %x = fmul <L x float> %afl, %bfl
  %y = fmul <L x float> %afh, %bfh
  %t = fadd <L x float> %s, %x
  %r = fadd <L x float> %t, %y
  ret <L x float> %r
}
"""


@pytest.mark.parametrize("layout, k", [("NK", 2), ("NK", 150), ("NK", 4102), ("KN", 33)])
def test_pair_products_compute_the_product(layout: str, k: int) -> None:
    tiles = cpu_tiles(NATIVE)
    tiles = replace(tiles, bf16_dot=_EMULATED.replace("L", str(tiles.lanes)))
    case = Case(GemmSpec(("m",), 2 * tiles.columns + 5, k, layout, *BF16), tiles=tiles)
    for m in (0, 1, 3, 20):
        case.check((m,), seed=m)


def test_several_kernels_share_the_imported_function() -> None:
    target = parse_target("llvm -mcpu=sapphirerapids")
    specs = [GemmSpec((1,), 96, k, "NK", *BF16) for k in (256, 512)]
    module = tvm.IRModule({spec.key(): gemm_kernel(spec, target) for spec in specs})
    assembly = tvm.compile(module, target=target).mod.inspect_source("asm")
    assert assembly.count("vdpbf16ps") >= 2
    assert not any("call" in x and "dot_bf16" in x for x in assembly.splitlines())


def test_the_imported_text_is_for_one_processor_feature() -> None:
    assert cpu_tiles(parse_target("llvm -mcpu=znver4")).bf16_dot == AVX512_BF16
    assert cpu_tiles(parse_target("llvm -mcpu=znver3")).bf16_dot == ""
