# from typing import TypeVar
# from tvm.script import ir as I
# from tvm.script import tirx as T
# from tvm.tirx.layout import Axis
# from tvm.script import relax as R

past = TypeVar("past")
vocab_size = TypeVar("vocab_size")
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def fused_rope(qkv: T.Buffer(("seq_len", 8, 16), "float16"), position_map: T.Buffer((seq_len,), "int32", offset_factor=1), q: T.Buffer((seq_len, 4, 16), "float16"), k: T.Buffer((seq_len, 2, 16), "float16"), v: T.Buffer((seq_len, 2, 16), "float16")):
        seq_len = T.int32()
        T.func_attr({"op_pattern": 8, "tirx.noalias": True})
        # with T.sblock("root"):
        for iters_0, iters_1, iters_2 in T.grid(seq_len, 8, 16):
            with T.sblock("llama_fused_rope"):
                s, h, d = T.axis.remap("SSS", [iters_0, iters_1, iters_2])
                T.reads(position_map[s], qkv[s, h, d - 8:d - 8 + 17])
                T.writes(q[s, h, d], k[s, h - 4, d], v[s, h - 6, d])
                if h < 4:
                    freq = T.float32()
                    q[s, h, d] = T.if_then_else(d < 16, T.Let(T.Cast("float16", T.cos(freq) * T.Cast("float32", qkv[s, h, d]) + T.sin(freq) * T.Cast("float32", T.if_then_else(d < 8, qkv[s, h, d + 8] * T.float16(-1.0), qkv[s, h, d - 8]))), where={freq: T.Cast("float32", position_map[s]) / T.pow(T.float32(10000.0), T.Cast("float32", d * 2 % 16) / T.float32(16.0))}), qkv[s, h, d])
                else:
                    if h < 6:
                        freq = T.float32()
                        k[s, h - 4, d] = T.if_then_else(d < 16, T.Let(T.Cast("float16", T.cos(freq) * T.Cast("float32", qkv[s, h, d]) + T.sin(freq) * T.Cast("float32", T.if_then_else(d < 8, qkv[s, h, d + 8] * T.float16(-1.0), qkv[s, h, d - 8]))), where={freq: T.Cast("float32", position_map[s]) / T.pow(T.float32(10000.0), T.Cast("float32", d * 2 % 16) / T.float32(16.0))}), qkv[s, h, d])
                    else:
                        v[s, h - 6, d] = qkv[s, h, d]

    @R.function
    def decode(input_ids: R.Tensor((1, 1), dtype="int32"), positions: R.Tensor((1,), dtype="int32"), key_0: R.Tensor((1, past, 2, 16), dtype="float16"), value_0: R.Tensor((1, past, 2, 16), dtype="float16"), key_1: R.Tensor((1, past, 2, 16), dtype="float16"), value_1: R.Tensor((1, past, 2, 16), dtype="float16"), model_model_embed_tokens_weight: R.Tensor((vocab_size, 64), dtype="float16"), model_model_layers_0_self_attn_qkv_proj_weight: R.Tensor((128, 64), dtype="float16"), model_model_layers_0_self_attn_o_proj_weight: R.Tensor((64, 64), dtype="float16"), model_model_layers_0_mlp_gate_up_proj_weight: R.Tensor((320, 64), dtype="float16"), model_model_layers_0_mlp_down_proj_weight: R.Tensor((64, 160), dtype="float16"), model_model_layers_0_input_layernorm_weight: R.Tensor((64,), dtype="float16"), model_model_layers_0_post_attention_layernorm_weight: R.Tensor((64,), dtype="float16"), model_model_layers_1_self_attn_qkv_proj_weight: R.Tensor((128, 64), dtype="float16"), model_model_layers_1_self_attn_o_proj_weight: R.Tensor((64, 64), dtype="float16"), model_model_layers_1_mlp_gate_up_proj_weight: R.Tensor((320, 64), dtype="float16"), model_model_layers_1_mlp_down_proj_weight: R.Tensor((64, 160), dtype="float16"), model_model_layers_1_input_layernorm_weight: R.Tensor((64,), dtype="float16"), model_model_layers_1_post_attention_layernorm_weight: R.Tensor((64,), dtype="float16"), model_model_norm_weight: R.Tensor((64,), dtype="float16"), model_lm_head_weight: R.Tensor((vocab_size, 64), dtype="float16")) -> R.Tuple(R.Tensor((1, 1, vocab_size), dtype="float32"), R.Tensor((1, "past + 1", 2, 16), dtype="float16"), R.Tensor((1, "past + 1", 2, 16), dtype="float16"), R.Tensor((1, "past + 1", 2, 16), dtype="float16"), R.Tensor((1, "past + 1", 2, 16), dtype="float16")):
        R.func_attr({"num_input": 6})
        cls = Module
        with R.dataflow():
            reshape: R.Tensor((1,), dtype="int32") = R.reshape(input_ids, R.shape([1]))
            take: R.Tensor((1, 64), dtype="float16") = R.take(model_model_embed_tokens_weight, reshape, axis=0, mode="fast")
            reshape1: R.Tensor((1, 1, 64), dtype="float16") = R.reshape(take, R.shape([1, 1, 64]))
            rms_norm: R.Tensor((1, 1, 64), dtype="float16") = R.nn.rms_norm(reshape1, model_model_layers_0_input_layernorm_weight, axes=[-1], epsilon=1.0000000000000001e-05)
            permute_dims: R.Tensor((64, 128), dtype="float16") = R.permute_dims(model_model_layers_0_self_attn_qkv_proj_weight, axes=None)
            matmul: R.Tensor((1, 1, 128), dtype="float16") = R.matmul(rms_norm, permute_dims, out_dtype=None)
            reshape2: R.Tensor((1, 1, 8, 16), dtype="float16") = R.reshape(matmul, R.shape([1, 1, 8, 16]))
            reshape3: R.Tensor((1, 8, 16), dtype="float16") = R.reshape(reshape2, R.shape([1, 8, 16]))
            lv = R.call_tir(cls.fused_rope, (reshape3, positions), out_ty=[R.Tensor((1, 4, 16), dtype="float16"), R.Tensor((1, 2, 16), dtype="float16"), R.Tensor((1, 2, 16), dtype="float16")])
            fused_rope_0: R.Tensor((1, 4, 16), dtype="float16") = lv[0]
            fused_rope_1: R.Tensor((1, 2, 16), dtype="float16") = lv[1]
            fused_rope_2: R.Tensor((1, 2, 16), dtype="float16") = lv[2]
            reshape4: R.Tensor((1, 1, 2, 16), dtype="float16") = R.reshape(fused_rope_1, R.shape([1, 1, 2, 16]))
            concat: R.Tensor((1, past + 1, 2, 16), dtype="float16") = R.concat((key_0, reshape4), axis=1)
            permute_dims1: R.Tensor((1, 2, past + 1, 16), dtype="float16") = R.permute_dims(concat, axes=[0, 2, 1, 3])
            reshape5: R.Tensor((1, 1, 2, 16), dtype="float16") = R.reshape(fused_rope_2, R.shape([1, 1, 2, 16]))
            concat1: R.Tensor((1, past + 1, 2, 16), dtype="float16") = R.concat((value_0, reshape5), axis=1)
            permute_dims2: R.Tensor((1, 2, past + 1, 16), dtype="float16") = R.permute_dims(concat1, axes=[0, 2, 1, 3])
            repeat: R.Tensor((1, 4, past + 1, 16), dtype="float16") = R.repeat(permute_dims1, repeats=2, axis=1)
            repeat1: R.Tensor((1, 4, past + 1, 16), dtype="float16") = R.repeat(permute_dims2, repeats=2, axis=1)
            reshape6: R.Tensor((1, 1, 4, 16), dtype="float16") = R.reshape(fused_rope_0, R.shape([1, 1, 4, 16]))
            permute_dims3: R.Tensor((1, 4, 1, 16), dtype="float16") = R.permute_dims(reshape6, axes=[0, 2, 1, 3])
            permute_dims4: R.Tensor((1, 4, 16, past + 1), dtype="float16") = R.permute_dims(repeat, axes=[0, 1, 3, 2])
            matmul1: R.Tensor((1, 4, 1, past + 1), dtype="float16") = R.matmul(permute_dims3, permute_dims4, out_dtype=None)
            mul: R.Tensor((1, 4, 1, past + 1), dtype="float16") = R.multiply(matmul1, R.const(0.25, "float16"))
            astype: R.Tensor((1, 4, 1, past + 1), dtype="float32") = R.astype(mul, dtype="float32")
            softmax: R.Tensor((1, 4, 1, past + 1), dtype="float32") = R.nn.softmax(astype, axis=-1)
            astype1: R.Tensor((1, 4, 1, past + 1), dtype="float16") = R.astype(softmax, dtype="float16")
            matmul2: R.Tensor((1, 4, 1, 16), dtype="float16") = R.matmul(astype1, repeat1, out_dtype=None)
            permute_dims5: R.Tensor((1, 1, 4, 16), dtype="float16") = R.permute_dims(matmul2, axes=[0, 2, 1, 3])
            reshape7: R.Tensor((1, 1, 64), dtype="float16") = R.reshape(permute_dims5, R.shape([1, 1, 64]))
            permute_dims6: R.Tensor((64, 64), dtype="float16") = R.permute_dims(model_model_layers_0_self_attn_o_proj_weight, axes=None)
            matmul3: R.Tensor((1, 1, 64), dtype="float16") = R.matmul(reshape7, permute_dims6, out_dtype=None)
            add: R.Tensor((1, 1, 64), dtype="float16") = R.add(matmul3, reshape1)
            rms_norm1: R.Tensor((1, 1, 64), dtype="float16") = R.nn.rms_norm(add, model_model_layers_0_post_attention_layernorm_weight, axes=[-1], epsilon=1.0000000000000001e-05)
            permute_dims7: R.Tensor((64, 320), dtype="float16") = R.permute_dims(model_model_layers_0_mlp_gate_up_proj_weight, axes=None)
            matmul4: R.Tensor((1, 1, 320), dtype="float16") = R.matmul(rms_norm1, permute_dims7, out_dtype=None)
            split: R.Tuple(R.Tensor((1, 1, 160), dtype="float16"), R.Tensor((1, 1, 160), dtype="float16")) = R.split(matmul4, indices_or_sections=2, axis=-1)
            split_0: R.Tensor((1, 1, 160), dtype="float16") = split[0]
            split_1: R.Tensor((1, 1, 160), dtype="float16") = split[1]
            silu: R.Tensor((1, 1, 160), dtype="float16") = R.nn.silu(split_0)
            mul1: R.Tensor((1, 1, 160), dtype="float16") = R.multiply(silu, split_1)
            permute_dims8: R.Tensor((160, 64), dtype="float16") = R.permute_dims(model_model_layers_0_mlp_down_proj_weight, axes=None)
            matmul5: R.Tensor((1, 1, 64), dtype="float16") = R.matmul(mul1, permute_dims8, out_dtype=None)
            add1: R.Tensor((1, 1, 64), dtype="float16") = R.add(matmul5, add)
            rms_norm2: R.Tensor((1, 1, 64), dtype="float16") = R.nn.rms_norm(add1, model_model_layers_1_input_layernorm_weight, axes=[-1], epsilon=1.0000000000000001e-05)
            permute_dims9: R.Tensor((64, 128), dtype="float16") = R.permute_dims(model_model_layers_1_self_attn_qkv_proj_weight, axes=None)
            matmul6: R.Tensor((1, 1, 128), dtype="float16") = R.matmul(rms_norm2, permute_dims9, out_dtype=None)
            reshape8: R.Tensor((1, 1, 8, 16), dtype="float16") = R.reshape(matmul6, R.shape([1, 1, 8, 16]))
            reshape9: R.Tensor((1, 8, 16), dtype="float16") = R.reshape(reshape8, R.shape([1, 8, 16]))
            lv1 = R.call_tir(cls.fused_rope, (reshape9, positions), out_ty=[R.Tensor((1, 4, 16), dtype="float16"), R.Tensor((1, 2, 16), dtype="float16"), R.Tensor((1, 2, 16), dtype="float16")])
            fused_rope_01: R.Tensor((1, 4, 16), dtype="float16") = lv1[0]
            fused_rope_11: R.Tensor((1, 2, 16), dtype="float16") = lv1[1]
            fused_rope_21: R.Tensor((1, 2, 16), dtype="float16") = lv1[2]
            reshape10: R.Tensor((1, 1, 2, 16), dtype="float16") = R.reshape(fused_rope_11, R.shape([1, 1, 2, 16]))
            concat2: R.Tensor((1, past + 1, 2, 16), dtype="float16") = R.concat((key_1, reshape10), axis=1)
            permute_dims10: R.Tensor((1, 2, past + 1, 16), dtype="float16") = R.permute_dims(concat2, axes=[0, 2, 1, 3])
            reshape11: R.Tensor((1, 1, 2, 16), dtype="float16") = R.reshape(fused_rope_21, R.shape([1, 1, 2, 16]))
            concat3: R.Tensor((1, past + 1, 2, 16), dtype="float16") = R.concat((value_1, reshape11), axis=1)
            permute_dims11: R.Tensor((1, 2, past + 1, 16), dtype="float16") = R.permute_dims(concat3, axes=[0, 2, 1, 3])
            repeat2: R.Tensor((1, 4, past + 1, 16), dtype="float16") = R.repeat(permute_dims10, repeats=2, axis=1)
            repeat3: R.Tensor((1, 4, past + 1, 16), dtype="float16") = R.repeat(permute_dims11, repeats=2, axis=1)
            reshape12: R.Tensor((1, 1, 4, 16), dtype="float16") = R.reshape(fused_rope_01, R.shape([1, 1, 4, 16]))
            permute_dims12: R.Tensor((1, 4, 1, 16), dtype="float16") = R.permute_dims(reshape12, axes=[0, 2, 1, 3])
            permute_dims13: R.Tensor((1, 4, 16, past + 1), dtype="float16") = R.permute_dims(repeat2, axes=[0, 1, 3, 2])
            matmul7: R.Tensor((1, 4, 1, past + 1), dtype="float16") = R.matmul(permute_dims12, permute_dims13, out_dtype=None)
            mul2: R.Tensor((1, 4, 1, past + 1), dtype="float16") = R.multiply(matmul7, R.const(0.25, "float16"))
            astype2: R.Tensor((1, 4, 1, past + 1), dtype="float32") = R.astype(mul2, dtype="float32")
            softmax1: R.Tensor((1, 4, 1, past + 1), dtype="float32") = R.nn.softmax(astype2, axis=-1)
            astype3: R.Tensor((1, 4, 1, past + 1), dtype="float16") = R.astype(softmax1, dtype="float16")
            matmul8: R.Tensor((1, 4, 1, 16), dtype="float16") = R.matmul(astype3, repeat3, out_dtype=None)
            permute_dims14: R.Tensor((1, 1, 4, 16), dtype="float16") = R.permute_dims(matmul8, axes=[0, 2, 1, 3])
            reshape13: R.Tensor((1, 1, 64), dtype="float16") = R.reshape(permute_dims14, R.shape([1, 1, 64]))
            permute_dims15: R.Tensor((64, 64), dtype="float16") = R.permute_dims(model_model_layers_1_self_attn_o_proj_weight, axes=None)
            matmul9: R.Tensor((1, 1, 64), dtype="float16") = R.matmul(reshape13, permute_dims15, out_dtype=None)
            add2: R.Tensor((1, 1, 64), dtype="float16") = R.add(matmul9, add1)
            rms_norm3: R.Tensor((1, 1, 64), dtype="float16") = R.nn.rms_norm(add2, model_model_layers_1_post_attention_layernorm_weight, axes=[-1], epsilon=1.0000000000000001e-05)
            permute_dims16: R.Tensor((64, 320), dtype="float16") = R.permute_dims(model_model_layers_1_mlp_gate_up_proj_weight, axes=None)
            matmul10: R.Tensor((1, 1, 320), dtype="float16") = R.matmul(rms_norm3, permute_dims16, out_dtype=None)
            split1: R.Tuple(R.Tensor((1, 1, 160), dtype="float16"), R.Tensor((1, 1, 160), dtype="float16")) = R.split(matmul10, indices_or_sections=2, axis=-1)
            split_01: R.Tensor((1, 1, 160), dtype="float16") = split1[0]
            split_11: R.Tensor((1, 1, 160), dtype="float16") = split1[1]
            silu1: R.Tensor((1, 1, 160), dtype="float16") = R.nn.silu(split_01)
            mul3: R.Tensor((1, 1, 160), dtype="float16") = R.multiply(silu1, split_11)
            permute_dims17: R.Tensor((160, 64), dtype="float16") = R.permute_dims(model_model_layers_1_mlp_down_proj_weight, axes=None)
            matmul11: R.Tensor((1, 1, 64), dtype="float16") = R.matmul(mul3, permute_dims17, out_dtype=None)
            add3: R.Tensor((1, 1, 64), dtype="float16") = R.add(matmul11, add2)
            rms_norm4: R.Tensor((1, 1, 64), dtype="float16") = R.nn.rms_norm(add3, model_model_norm_weight, axes=[-1], epsilon=1.0000000000000001e-05)
            permute_dims18: R.Tensor((64, vocab_size), dtype="float16") = R.permute_dims(model_lm_head_weight, axes=None)
            matmul12: R.Tensor((1, 1, vocab_size), dtype="float16") = R.matmul(rms_norm4, permute_dims18, out_dtype=None)
            astype4: R.Tensor((1, 1, vocab_size), dtype="float32") = R.astype(matmul12, dtype="float32")
            gv: R.Tuple(R.Tensor((1, 1, vocab_size), dtype="float32"), R.Tensor((1, past + 1, 2, 16), dtype="float16"), R.Tensor((1, past + 1, 2, 16), dtype="float16"), R.Tensor((1, past + 1, 2, 16), dtype="float16"), R.Tensor((1, past + 1, 2, 16), dtype="float16")) = astype4, concat, concat1, concat2, concat3
            R.output(gv)
        return gv
