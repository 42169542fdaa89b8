"""TVM's own CUDA kernels on the CPU: equal to float64 in five thread orders, checks silent."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm import kv_cache

from relax_llm_passes.cuda_on_cpu import run_module

rng = np.random.default_rng(11)
DTYPES = ["float32", "float16", "bfloat16"]
# A few roundings of the result's type: the sums are fp32, or fp16 halves in TVM's fp16 softmax.
UNIT = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}


def array(shape, dtype, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    )


def module(body, **tensors):
    class M(nn.Module):
        def forward(self, **kwargs):
            return body(**kwargs)

    # nn.Module reads the signature, so give it one with the tensors' names.
    names = ", ".join(tensors)
    scope = {"body": body}
    exec(f"def forward(self, {names}): return body({names})", scope)
    M.forward = scope["forward"]
    spec = {"forward": {k: nn.spec.Tensor(list(s), d) for k, (s, d) in tensors.items()}}
    return M().export_tvm(spec=spec)[0]


def run(mod, *inputs, **options):
    r = run_module(mod, inputs, function="forward", **options)
    assert r.report == []
    return r


def close(got, want, dtype, roundings):
    want = np.asarray(want, "f8")
    error = np.abs(got.astype("f8") - want).max() / np.abs(want).max()
    assert error <= roundings * UNIT[dtype], error


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(dtype):
    # bf16 reductions are lowered to a volatile tree without __syncwarp: right in lockstep only.
    options = {"lockstep": True, "races": False} if dtype == "bfloat16" else {}
    x = array((5, 300), dtype, 3)
    mod = module(lambda x: nn.op.softmax(x, -1), x=(("n", 300), dtype))
    r = run(mod, x, **options)
    e = np.exp(x.astype("f8") - x.astype("f8").max(-1, keepdims=True))
    close(r.outputs[0], e / e.sum(-1, keepdims=True), dtype, 32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_layer_norm(dtype):
    x, w, b = array((3, 260), dtype), array(260, dtype), array(260, dtype)
    mod = module(
        lambda x, w, b: nn.op.layer_norm(x, normalized_shape=260, weight=w, bias=b),
        x=(("n", 260), dtype), w=((260,), dtype), b=((260,), dtype))  # fmt: skip
    X = x.astype("f8")
    want = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-5)
    close(run(mod, x, w, b).outputs[0], want * w.astype("f8") + b.astype("f8"), dtype, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype):
    x, w = array((3, 260), dtype), array(260, dtype)
    mod = module(
        lambda x, w: nn.op.rms_norm(x, w, axes=-1), x=(("n", 260), dtype), w=((260,), dtype)
    )
    X = x.astype("f8")
    want = X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-5) * w.astype("f8")
    close(run(mod, x, w).outputs[0], want, dtype, 8)


def test_group_norm():
    x, w, b = array((1, 3, 96), "float32"), array(96, "float32"), array(96, "float32")
    mod = module(
        lambda x, w, b: nn.op.group_norm(x, 4, w, b, eps=1e-5, channel_axis=2, axes=[]),
        x=((1, "n", 96), "float32"), w=((96,), "float32"), b=((96,), "float32"))  # fmt: skip
    X = x.astype("f8").reshape(1, 3, 4, 24)
    want = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-5)
    r = run(mod, x, w, b)
    close(r.outputs[0], want.reshape(x.shape) * w + b, "float32", 64)  # E[x^2] - E[x]^2
    assert r.stats[0].blocks == 3 and r.stats[0].barriers_per_block > 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv(dtype):
    options = {"lockstep": True, "races": False} if dtype == "bfloat16" else {}
    x, w = array((1, 256), dtype), array((96, 256), dtype)
    mod = module(
        lambda x, w: nn.op.matmul(x, nn.op.permute_dims(w)),
        x=((1, 256), dtype),
        w=((96, 256), dtype),
    )
    mod = relax.transform.FuseTransposeMatmul()(mod)
    # products and partial sums are rounded to the type before they are added: sqrt(256) roundings
    close(run(mod, x, w, **options).outputs[0], x.astype("f8") @ w.astype("f8").T, dtype, 64)


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_matmul(dtype, request):
    if dtype == "float16":
        request.getfixturevalue("tensor_intrinsics")
    # large enough for dlight's tensor-core rule
    n, k, m = (128, 128, 128) if dtype == "float16" else (64, 64, 96)
    if dtype == "int8":
        x, w = (rng.integers(-128, 128, s).astype("int8") for s in ((n, k), (k, m)))
    else:
        x, w = array((n, k), dtype), array((k, m), dtype)
    out = {"float16": "float32", "int8": "int32"}.get(dtype, dtype)
    mod = module(
        lambda x, w: nn.op.matmul(x, w, out_dtype=out), x=(("n", k), dtype), w=((k, m), dtype)
    )
    r = run(mod, x, w, orders=2)
    want = x.astype("f8") @ w.astype("f8")
    if dtype == "int8":
        assert np.array_equal(r.outputs[0], want)
    else:
        close(r.outputs[0], want, "float32" if dtype == "float16" else dtype, 64)
    if dtype == "float16":  # dlight's tensor-core kernel: wmma and dynamic shared memory
        assert any(s.dynamic_shared > 0 and s.warp_operations > 0 for s in r.stats)


def paged_attention(dtype):
    """One decode step over TVM's paged KV cache, with its own CUDA kernels."""
    heads, kv_heads, dim, past, page = 4, 2, 32, 19, 16

    class Model(nn.Module):
        def create(self, max_batch_size: tvm.tirx.Var, max_total: tvm.tirx.Var,
                   prefill_chunk: tvm.tirx.Var, page_size: tvm.tirx.Var):  # fmt: skip
            return kv_cache.TIRPagedKVCache(
                attn_kind="mha", max_batch_size=max_batch_size, max_total_seq_len=max_total,
                prefill_chunk_size=prefill_chunk, page_size=page_size, support_sliding_window=0,
                layer_partition=relax.ShapeExpr([0, 1]), num_hidden_layers=1,
                num_attention_heads=heads, num_key_value_heads=kv_heads, qk_head_dim=dim,
                v_head_dim=dim, mla_original_qk_head_dim=0, mla_original_v_head_dim=0,
                rope_mode=kv_cache.RopeMode.NONE, rope_scale=1, rope_theta=10000,
                rope_scaling={}, rope_ext_factors=relax.prim_value(0), rotary_dim=dim,
                enable_disaggregation=False, dtype=dtype, target=_target())  # fmt: skip

        def attend(self, qkv: nn.Tensor, cache: kv_cache.PagedKVCache):
            return cache.attention_with_fused_qkv(0, qkv, heads, sm_scale=dim**-0.5), cache

    spec = {
        "create": {"max_batch_size": int, "max_total": int, "prefill_chunk": int, "page_size": int},
        "attend": {"qkv": nn.spec.Tensor([1, "n", heads + 2 * kv_heads, dim], dtype),
                   "cache": nn.spec.Object(object_type=kv_cache.PagedKVCache)},
    }  # fmt: skip
    return Model().export_tvm(spec=spec)[0], heads, kv_heads, dim, past, page


def _target():
    from relax_llm_passes.cuda_on_cpu import cuda_target

    return cuda_target()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_paged_attention(dtype, tensor_intrinsics):
    from relax_llm_passes.cuda_on_cpu import configure, findings, install

    install()
    mod, heads, kv_heads, dim, past, page = paged_attention(dtype)
    target = _target()
    ex = tvm.compile(mod, target, relax_pipeline=relax.get_default_pipeline(target))
    vm = relax.VirtualMachine(ex, tvm.cuda(0))
    qkv = array((1, past + 1, heads + 2 * kv_heads, dim), dtype)
    add = tvm.get_global_func("vm.builtin.kv_state_add_sequence")
    begin = tvm.get_global_func("vm.builtin.kv_state_begin_forward")
    end = tvm.get_global_func("vm.builtin.kv_state_end_forward")
    shape = tvm_ffi_shape
    results = []
    for order, seed in (("ascending", 1), ("descending", 1), ("random", 1), ("random", 2)):
        configure(order=order, seed=seed, checks=order == "ascending")
        cache = vm["create"](shape([1]), shape([64]), shape([64]), shape([page]))
        add(cache, 0)
        outputs = []
        for first, count in ((0, past), (past, 1)):
            begin(cache, shape([0]), shape([count]))
            x = tvm.runtime.tensor(np.ascontiguousarray(qkv[:, first : first + count]), tvm.cuda(0))
            outputs.append(np.array(vm["attend"](x, cache)[0].numpy()))
            end(cache)
        assert findings() == []
        results.append(np.concatenate(outputs, 1))
    configure()
    assert all(np.array_equal(results[0], r) for r in results[1:])
    q, k, v = np.split(qkv[0].astype("f8"), [heads, heads + kv_heads], axis=1)
    k, v = (a.repeat(heads // kv_heads, 1) for a in (k, v))
    scores = np.einsum("shd,thd->hst", q, k) * dim**-0.5
    scores[:, np.triu(np.ones((past + 1, past + 1), bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("hst,thd->shd", p / p.sum(-1, keepdims=True), v)
    close(results[0].reshape(past + 1, heads, dim), want, dtype, 16)


def tvm_ffi_shape(values):
    import tvm_ffi

    return tvm_ffi.Shape(values)


def test_removing_a_barrier_from_a_tvm_kernel_is_found():
    from relax_llm_passes.cuda_on_cpu import cuda_target, run_cuda_source
    from relax_llm_passes.cuda_on_cpu.nvcc import cuda_sources

    target = cuda_target()
    mod = module(lambda x: nn.op.softmax(x, -1), x=((2, 300), "float32"))
    ex = tvm.compile(mod, target, relax_pipeline=relax.get_default_pipeline(target))
    (source,) = cuda_sources(ex)
    x = array((2, 300), "float32")
    out = np.zeros_like(x)
    signature = source[source.index("softmax_kernel(") :]
    arguments = [out, x] if signature.index("T_softmax") < signature.index("x_ptr") else [x, out]

    def launch(text):
        return run_cuda_source(text, "softmax_kernel", 2, 256, arguments)

    assert launch(source).report == []
    assert source.count("__syncthreads();") == 6
    caught = 0
    for i in range(6):
        at = -1
        for _ in range(i + 1):
            at = source.index("__syncthreads();", at + 1)
        broken = source[:at] + " " * 16 + source[at + 16 :]
        caught += any(f.kind == "shared-race" for f in launch(broken).report)
    # The barrier after the last use of a buffer orders nothing.
    assert caught >= 4
