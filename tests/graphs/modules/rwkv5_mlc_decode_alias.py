# from typing import TypeVar
# from tvm.script import ir as I
# from tvm.script import tirx as T
# from tvm.tirx.layout import Axis
# from tvm.script import relax as R

batch_size = TypeVar("batch_size")
seq_len = TypeVar("seq_len")
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def token_shift(att_x_0: T.Buffer((T.int64(1), T.int64(128)), "float32"), layer_norm1: T.Buffer((T.int64(1), T.int64(1), T.int64(128)), "float32"), compute: T.Buffer((T.int64(1), T.int64(1), T.int64(128)), "float32")):
        T.func_attr({"tirx.noalias": True})
        # with T.sblock("root"):
        for b, i, j in T.grid(T.int64(1), T.int64(1), T.int64(128)):
            with T.sblock("compute"):
                v_b, v_i, v_j = T.axis.remap("SSS", [b, i, j])
                T.reads(att_x_0[v_b, v_j], layer_norm1[v_b, v_i - T.int64(1), v_j])
                T.writes(compute[v_b, v_i, v_j])
                compute[v_b, v_i, v_j] = T.if_then_else(v_i == T.int64(0), att_x_0[v_b, v_j], layer_norm1[v_b, v_i - T.int64(1), v_j])

    @T.prim_func(s_tir=True)
    def wkv_func(r_buf: T.Buffer((batch_size, seq_len, 2, 64), "float32"), k_buf: T.Buffer((batch_size, seq_len, 2, 64), "float32"), v_buf: T.Buffer((batch_size, seq_len, 2, 64), "float32"), time_decay_buf: T.Buffer((2, 64), "float32"), time_faaaa_buf: T.Buffer((2, 64), "float32"), state_buf: T.Buffer((batch_size, 2, 64, 64), "float32"), out_buf: T.Buffer((batch_size, seq_len, 2, 64), "float32"), out_state_buf: T.Buffer((batch_size, 2, 64, 64), "float32")):
        T.func_attr({"op_pattern": 8, "tirx.noalias": True})
        # with T.sblock("root"):
        for b, h, i in T.grid(batch_size, 2, 64):
            for j in range(64):
                with T.sblock("init_state"):
                    vb, vh, vi, vj = T.axis.remap("SSSS", [b, h, i, j])
                    T.reads(state_buf[vb, vh, vi, vj])
                    T.writes(out_state_buf[vb, vh, vi, vj])
                    out_state_buf[vb, vh, vi, vj] = state_buf[vb, vh, vi, vj]
            for t in range(seq_len):
                with T.sblock("comput"):
                    vb = T.axis.spatial(batch_size, b)
                    vt = T.axis.opaque(seq_len, t)
                    vh, vi = T.axis.remap("SS", [h, i])
                    T.reads(k_buf[vb, vt, vh, 0:64], v_buf[vb, vt, vh, vi], out_buf[vb, vt, vh, vi], r_buf[vb, vt, vh, 0:64], time_faaaa_buf[vh, 0:64], out_state_buf[vb, vh, vi, 0:64], time_decay_buf[vh, 0:64])
                    T.writes(out_buf[vb, vt, vh, vi], out_state_buf[vb, vh, vi, 0:64])
                    out_buf[vb, vt, vh, vi] = T.float32(0.0)
                    for k in range(64):
                        x: T.let[T.float32] = k_buf[vb, vt, vh, k] * v_buf[vb, vt, vh, vi]
                        out_buf[vb, vt, vh, vi] = out_buf[vb, vt, vh, vi] + r_buf[vb, vt, vh, k] * (time_faaaa_buf[vh, k] * x + out_state_buf[vb, vh, vi, k])
                        out_state_buf[vb, vh, vi, k] = out_state_buf[vb, vh, vi, k] * time_decay_buf[vh, k] + x

    @R.function
    def decode(input_ids: R.Tensor((1, 1), dtype="int32"), att_x_0: R.Tensor((1, 128), dtype="float32"), att_kv_0: R.Tensor((1, 2, 64, 64), dtype="float32"), ffn_x_0: R.Tensor((1, 128), dtype="float32"), att_x_1: R.Tensor((1, 128), dtype="float32"), att_kv_1: R.Tensor((1, 2, 64, 64), dtype="float32"), ffn_x_1: R.Tensor((1, 128), dtype="float32"), model_model_embeddings_weight: R.Tensor((97, 128), dtype="float32"), model_model_blocks_0_pre_ln_weight: R.Tensor((128,), dtype="float32"), model_model_blocks_0_pre_ln_bias: R.Tensor((128,), dtype="float32"), model_model_blocks_0_ln1_weight: R.Tensor((128,), dtype="float32"), model_model_blocks_0_ln1_bias: R.Tensor((128,), dtype="float32"), model_model_blocks_0_ln2_weight: R.Tensor((128,), dtype="float32"), model_model_blocks_0_ln2_bias: R.Tensor((128,), dtype="float32"), model_model_blocks_0_attention_time_decay: R.Tensor((2, 64), dtype="float32"), model_model_blocks_0_attention_time_faaaa: R.Tensor((2, 64), dtype="float32"), model_model_blocks_0_attention_time_mix_gate: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_0_attention_time_mix_key: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_0_attention_time_mix_value: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_0_attention_time_mix_receptance: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_0_attention_key_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_0_attention_value_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_0_attention_receptance_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_0_attention_gate_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_0_attention_output_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_0_attention_ln_x_weight: R.Tensor((128,), dtype="float32"), model_model_blocks_0_attention_ln_x_bias: R.Tensor((128,), dtype="float32"), model_model_blocks_0_feed_forward_time_mix_key: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_0_feed_forward_time_mix_receptance: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_0_feed_forward_key_weight: R.Tensor((448, 128), dtype="float32"), model_model_blocks_0_feed_forward_receptance_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_0_feed_forward_value_weight: R.Tensor((128, 448), dtype="float32"), model_model_blocks_1_ln1_weight: R.Tensor((128,), dtype="float32"), model_model_blocks_1_ln1_bias: R.Tensor((128,), dtype="float32"), model_model_blocks_1_ln2_weight: R.Tensor((128,), dtype="float32"), model_model_blocks_1_ln2_bias: R.Tensor((128,), dtype="float32"), model_model_blocks_1_attention_time_decay: R.Tensor((2, 64), dtype="float32"), model_model_blocks_1_attention_time_faaaa: R.Tensor((2, 64), dtype="float32"), model_model_blocks_1_attention_time_mix_gate: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_1_attention_time_mix_key: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_1_attention_time_mix_value: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_1_attention_time_mix_receptance: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_1_attention_key_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_1_attention_value_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_1_attention_receptance_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_1_attention_gate_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_1_attention_output_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_1_attention_ln_x_weight: R.Tensor((128,), dtype="float32"), model_model_blocks_1_attention_ln_x_bias: R.Tensor((128,), dtype="float32"), model_model_blocks_1_feed_forward_time_mix_key: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_1_feed_forward_time_mix_receptance: R.Tensor((1, 1, 128), dtype="float32"), model_model_blocks_1_feed_forward_key_weight: R.Tensor((448, 128), dtype="float32"), model_model_blocks_1_feed_forward_receptance_weight: R.Tensor((128, 128), dtype="float32"), model_model_blocks_1_feed_forward_value_weight: R.Tensor((128, 448), dtype="float32"), model_model_ln_out_weight: R.Tensor((128,), dtype="float32"), model_model_ln_out_bias: R.Tensor((128,), dtype="float32"), model_head_weight: R.Tensor((97, 128), dtype="float32")) -> R.Tuple(R.Tensor((1, 1, 97), dtype="float32"), R.Tensor((1, 128), dtype="float32"), R.Tensor((1, 2, 64, 64), dtype="float32"), R.Tensor((1, 128), dtype="float32"), R.Tensor((1, 128), dtype="float32"), R.Tensor((1, 2, 64, 64), dtype="float32"), R.Tensor((1, 128), dtype="float32")):
        R.func_attr({"num_input": 7})
        cls = Module
        with R.dataflow():
            reshape: R.Tensor((1,), dtype="int32") = R.reshape(input_ids, R.shape([1]))
            take: R.Tensor((1, 128), dtype="float32") = R.take(model_model_embeddings_weight, reshape, axis=0, mode="fast")
            reshape1: R.Tensor((1, 1, 128), dtype="float32") = R.reshape(take, R.shape([1, 1, 128]))
            lv: R.Tensor((1, 1, 128), dtype="float32") = reshape1
            layer_norm: R.Tensor((1, 1, 128), dtype="float32") = R.nn.layer_norm(lv, model_model_blocks_0_pre_ln_weight, model_model_blocks_0_pre_ln_bias, axes=[-1], epsilon=1.0000000000000001e-05, center=True, scale=True)
            layer_norm1: R.Tensor((1, 1, 128), dtype="float32") = R.nn.layer_norm(layer_norm, model_model_blocks_0_ln1_weight, model_model_blocks_0_ln1_bias, axes=[-1], epsilon=1.0000000000000001e-05, center=True, scale=True)
            lv_1 = R.call_tir(cls.token_shift, (att_x_0, layer_norm1), out_ty=R.Tensor((1, 1, 128), dtype="float32"))
            lv1: R.Tensor((1, 1, 128), dtype="float32") = lv_1
            mul: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(layer_norm1, model_model_blocks_0_attention_time_mix_key)
            subtract: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_0_attention_time_mix_key)
            mul1: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv1, subtract)
            lv2: R.Tensor((1, 1, 128), dtype="float32") = mul1
            add: R.Tensor((1, 1, 128), dtype="float32") = R.add(mul, lv2)
            mul2: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(layer_norm1, model_model_blocks_0_attention_time_mix_value)
            subtract1: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_0_attention_time_mix_value)
            lv3: R.Tensor((1, 1, 128), dtype="float32") = subtract1
            mul3: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv1, lv3)
            add1: R.Tensor((1, 1, 128), dtype="float32") = R.add(mul2, mul3)
            mul4: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(layer_norm1, model_model_blocks_0_attention_time_mix_receptance)
            lv4: R.Tensor((1, 1, 128), dtype="float32") = mul4
            subtract2: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_0_attention_time_mix_receptance)
            mul5: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv1, subtract2)
            add2: R.Tensor((1, 1, 128), dtype="float32") = R.add(lv4, mul5)
            lv5: R.Tensor((1, 1, 128), dtype="float32") = add2
            mul6: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(layer_norm1, model_model_blocks_0_attention_time_mix_gate)
            subtract3: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_0_attention_time_mix_gate)
            mul7: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv1, subtract3)
            lv6: R.Tensor((1, 1, 128), dtype="float32") = mul7
            add3: R.Tensor((1, 1, 128), dtype="float32") = R.add(mul6, lv6)
            permute_dims: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_0_attention_receptance_weight, axes=None)
            matmul: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(lv5, permute_dims, out_dtype=None)
            lv7: R.Tensor((1, 1, 128), dtype="float32") = matmul
            reshape2: R.Tensor((1, 1, 2, 64), dtype="float32") = R.reshape(lv7, R.shape([1, 1, 2, 64]))
            permute_dims1: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_0_attention_key_weight, axes=None)
            matmul1: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(add, permute_dims1, out_dtype=None)
            lv8: R.Tensor((1, 1, 128), dtype="float32") = matmul1
            reshape3: R.Tensor((1, 1, 2, 64), dtype="float32") = R.reshape(lv8, R.shape([1, 1, 2, 64]))
            permute_dims2: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_0_attention_value_weight, axes=None)
            matmul2: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(add1, permute_dims2, out_dtype=None)
            lv9: R.Tensor((1, 1, 128), dtype="float32") = matmul2
            reshape4: R.Tensor((1, 1, 2, 64), dtype="float32") = R.reshape(lv9, R.shape([1, 1, 2, 64]))
            permute_dims3: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_0_attention_gate_weight, axes=None)
            matmul3: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(add3, permute_dims3, out_dtype=None)
            lv10: R.Tensor((1, 1, 128), dtype="float32") = matmul3
            silu: R.Tensor((1, 1, 128), dtype="float32") = R.nn.silu(lv10)
            lv1_1 = R.call_tir(cls.wkv_func, (reshape2, reshape3, reshape4, model_model_blocks_0_attention_time_decay, model_model_blocks_0_attention_time_faaaa, att_kv_0), out_ty=[R.Tensor((1, 1, 2, 64), dtype="float32"), R.Tensor((1, 2, 64, 64), dtype="float32")])
            wkv5_0: R.Tensor((1, 1, 2, 64), dtype="float32") = lv1_1[0]
            lv11: R.Tensor((1, 1, 2, 64), dtype="float32") = wkv5_0
            wkv5_1: R.Tensor((1, 2, 64, 64), dtype="float32") = lv1_1[1]
            reshape5: R.Tensor((1, 128), dtype="float32") = R.reshape(layer_norm1, R.shape([1, 128]))
            reshape6: R.Tensor((1, 1, 128), dtype="float32") = R.reshape(lv11, R.shape([1, 1, 128]))
            lv12: R.Tensor((1, 1, 128), dtype="float32") = reshape6
            group_norm: R.Tensor((1, 1, 128), dtype="float32") = R.nn.group_norm(lv12, model_model_blocks_0_attention_ln_x_weight, model_model_blocks_0_attention_ln_x_bias, num_groups=2, channel_axis=-1, axes=[], epsilon=1.0000000000000001e-05, center=True, scale=True)
            mul8: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(group_norm, silu)
            permute_dims4: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_0_attention_output_weight, axes=None)
            lv13: R.Tensor((128, 128), dtype="float32") = permute_dims4
            matmul4: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(mul8, lv13, out_dtype=None)
            add4: R.Tensor((1, 1, 128), dtype="float32") = R.add(layer_norm, matmul4)
            layer_norm2: R.Tensor((1, 1, 128), dtype="float32") = R.nn.layer_norm(add4, model_model_blocks_0_ln2_weight, model_model_blocks_0_ln2_bias, axes=[-1], epsilon=1.0000000000000001e-05, center=True, scale=True)
            lv14: R.Tensor((1, 1, 128), dtype="float32") = layer_norm2
            lv2_1 = R.call_tir(cls.token_shift, (ffn_x_0, lv14), out_ty=R.Tensor((1, 1, 128), dtype="float32"))
            mul9: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv14, model_model_blocks_0_feed_forward_time_mix_key)
            subtract4: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_0_feed_forward_time_mix_key)
            lv15: R.Tensor((1, 1, 128), dtype="float32") = subtract4
            mul10: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv2_1, lv15)
            add5: R.Tensor((1, 1, 128), dtype="float32") = R.add(mul9, mul10)
            mul11: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv14, model_model_blocks_0_feed_forward_time_mix_receptance)
            lv16: R.Tensor((1, 1, 128), dtype="float32") = mul11
            subtract5: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_0_feed_forward_time_mix_receptance)
            mul12: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv2_1, subtract5)
            add6: R.Tensor((1, 1, 128), dtype="float32") = R.add(lv16, mul12)
            lv17: R.Tensor((1, 1, 128), dtype="float32") = add6
            reshape7: R.Tensor((1, 128), dtype="float32") = R.reshape(lv14, R.shape([1, 128]))
            permute_dims5: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_0_feed_forward_receptance_weight, axes=None)
            matmul5: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(lv17, permute_dims5, out_dtype=None)
            lv18: R.Tensor((1, 1, 128), dtype="float32") = matmul5
            sigmoid: R.Tensor((1, 1, 128), dtype="float32") = R.sigmoid(lv18)
            permute_dims6: R.Tensor((128, 448), dtype="float32") = R.permute_dims(model_model_blocks_0_feed_forward_key_weight, axes=None)
            matmul6: R.Tensor((1, 1, 448), dtype="float32") = R.matmul(add5, permute_dims6, out_dtype=None)
            lv19: R.Tensor((1, 1, 448), dtype="float32") = matmul6
            relu: R.Tensor((1, 1, 448), dtype="float32") = R.nn.relu(lv19)
            square: R.Tensor((1, 1, 448), dtype="float32") = R.square(relu)
            permute_dims7: R.Tensor((448, 128), dtype="float32") = R.permute_dims(model_model_blocks_0_feed_forward_value_weight, axes=None)
            lv20: R.Tensor((448, 128), dtype="float32") = permute_dims7
            matmul7: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(square, lv20, out_dtype=None)
            mul13: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(sigmoid, matmul7)
            add7: R.Tensor((1, 1, 128), dtype="float32") = R.add(add4, mul13)
            lv21: R.Tensor((1, 1, 128), dtype="float32") = add7
            layer_norm3: R.Tensor((1, 1, 128), dtype="float32") = R.nn.layer_norm(lv21, model_model_blocks_1_ln1_weight, model_model_blocks_1_ln1_bias, axes=[-1], epsilon=1.0000000000000001e-05, center=True, scale=True)
            lv3_1 = R.call_tir(cls.token_shift, (att_x_1, layer_norm3), out_ty=R.Tensor((1, 1, 128), dtype="float32"))
            mul14: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(layer_norm3, model_model_blocks_1_attention_time_mix_key)
            lv22: R.Tensor((1, 1, 128), dtype="float32") = mul14
            subtract6: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_1_attention_time_mix_key)
            mul15: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv3_1, subtract6)
            add8: R.Tensor((1, 1, 128), dtype="float32") = R.add(lv22, mul15)
            lv23: R.Tensor((1, 1, 128), dtype="float32") = add8
            mul16: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(layer_norm3, model_model_blocks_1_attention_time_mix_value)
            subtract7: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_1_attention_time_mix_value)
            mul17: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv3_1, subtract7)
            lv24: R.Tensor((1, 1, 128), dtype="float32") = mul17
            add9: R.Tensor((1, 1, 128), dtype="float32") = R.add(mul16, lv24)
            mul18: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(layer_norm3, model_model_blocks_1_attention_time_mix_receptance)
            subtract8: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_1_attention_time_mix_receptance)
            lv25: R.Tensor((1, 1, 128), dtype="float32") = subtract8
            mul19: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv3_1, lv25)
            add10: R.Tensor((1, 1, 128), dtype="float32") = R.add(mul18, mul19)
            mul20: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(layer_norm3, model_model_blocks_1_attention_time_mix_gate)
            lv26: R.Tensor((1, 1, 128), dtype="float32") = mul20
            subtract9: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_1_attention_time_mix_gate)
            mul21: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv3_1, subtract9)
            add11: R.Tensor((1, 1, 128), dtype="float32") = R.add(lv26, mul21)
            lv27: R.Tensor((1, 1, 128), dtype="float32") = add11
            permute_dims8: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_1_attention_receptance_weight, axes=None)
            matmul8: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(add10, permute_dims8, out_dtype=None)
            reshape8: R.Tensor((1, 1, 2, 64), dtype="float32") = R.reshape(matmul8, R.shape([1, 1, 2, 64]))
            lv28: R.Tensor((1, 1, 2, 64), dtype="float32") = reshape8
            permute_dims9: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_1_attention_key_weight, axes=None)
            matmul9: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(lv23, permute_dims9, out_dtype=None)
            reshape9: R.Tensor((1, 1, 2, 64), dtype="float32") = R.reshape(matmul9, R.shape([1, 1, 2, 64]))
            lv29: R.Tensor((1, 1, 2, 64), dtype="float32") = reshape9
            permute_dims10: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_1_attention_value_weight, axes=None)
            matmul10: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(add9, permute_dims10, out_dtype=None)
            reshape10: R.Tensor((1, 1, 2, 64), dtype="float32") = R.reshape(matmul10, R.shape([1, 1, 2, 64]))
            lv30: R.Tensor((1, 1, 2, 64), dtype="float32") = reshape10
            permute_dims11: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_1_attention_gate_weight, axes=None)
            matmul11: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(lv27, permute_dims11, out_dtype=None)
            silu1: R.Tensor((1, 1, 128), dtype="float32") = R.nn.silu(matmul11)
            lv31: R.Tensor((1, 1, 128), dtype="float32") = silu1
            lv4_1 = R.call_tir(cls.wkv_func, (lv28, lv29, lv30, model_model_blocks_1_attention_time_decay, model_model_blocks_1_attention_time_faaaa, att_kv_1), out_ty=[R.Tensor((1, 1, 2, 64), dtype="float32"), R.Tensor((1, 2, 64, 64), dtype="float32")])
            wkv5_01: R.Tensor((1, 1, 2, 64), dtype="float32") = lv4_1[0]
            wkv5_11: R.Tensor((1, 2, 64, 64), dtype="float32") = lv4_1[1]
            lv32: R.Tensor((1, 2, 64, 64), dtype="float32") = wkv5_11
            reshape11: R.Tensor((1, 128), dtype="float32") = R.reshape(layer_norm3, R.shape([1, 128]))
            reshape12: R.Tensor((1, 1, 128), dtype="float32") = R.reshape(wkv5_01, R.shape([1, 1, 128]))
            group_norm1: R.Tensor((1, 1, 128), dtype="float32") = R.nn.group_norm(reshape12, model_model_blocks_1_attention_ln_x_weight, model_model_blocks_1_attention_ln_x_bias, num_groups=2, channel_axis=-1, axes=[], epsilon=1.0000000000000001e-05, center=True, scale=True)
            lv33: R.Tensor((1, 1, 128), dtype="float32") = group_norm1
            mul22: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv33, lv31)
            permute_dims12: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_1_attention_output_weight, axes=None)
            matmul12: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(mul22, permute_dims12, out_dtype=None)
            lv34: R.Tensor((1, 1, 128), dtype="float32") = matmul12
            add12: R.Tensor((1, 1, 128), dtype="float32") = R.add(lv21, lv34)
            layer_norm4: R.Tensor((1, 1, 128), dtype="float32") = R.nn.layer_norm(add12, model_model_blocks_1_ln2_weight, model_model_blocks_1_ln2_bias, axes=[-1], epsilon=1.0000000000000001e-05, center=True, scale=True)
            lv5_1 = R.call_tir(cls.token_shift, (ffn_x_1, layer_norm4), out_ty=R.Tensor((1, 1, 128), dtype="float32"))
            lv35: R.Tensor((1, 1, 128), dtype="float32") = lv5_1
            mul23: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(layer_norm4, model_model_blocks_1_feed_forward_time_mix_key)
            subtract10: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_1_feed_forward_time_mix_key)
            mul24: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv35, subtract10)
            lv36: R.Tensor((1, 1, 128), dtype="float32") = mul24
            add13: R.Tensor((1, 1, 128), dtype="float32") = R.add(mul23, lv36)
            mul25: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(layer_norm4, model_model_blocks_1_feed_forward_time_mix_receptance)
            subtract11: R.Tensor((1, 1, 128), dtype="float32") = R.subtract(R.const(1.0, "float32"), model_model_blocks_1_feed_forward_time_mix_receptance)
            lv37: R.Tensor((1, 1, 128), dtype="float32") = subtract11
            mul26: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv35, lv37)
            add14: R.Tensor((1, 1, 128), dtype="float32") = R.add(mul25, mul26)
            reshape13: R.Tensor((1, 128), dtype="float32") = R.reshape(layer_norm4, R.shape([1, 128]))
            lv38: R.Tensor((1, 128), dtype="float32") = reshape13
            permute_dims13: R.Tensor((128, 128), dtype="float32") = R.permute_dims(model_model_blocks_1_feed_forward_receptance_weight, axes=None)
            matmul13: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(add14, permute_dims13, out_dtype=None)
            sigmoid1: R.Tensor((1, 1, 128), dtype="float32") = R.sigmoid(matmul13)
            lv39: R.Tensor((1, 1, 128), dtype="float32") = sigmoid1
            permute_dims14: R.Tensor((128, 448), dtype="float32") = R.permute_dims(model_model_blocks_1_feed_forward_key_weight, axes=None)
            matmul14: R.Tensor((1, 1, 448), dtype="float32") = R.matmul(add13, permute_dims14, out_dtype=None)
            relu1: R.Tensor((1, 1, 448), dtype="float32") = R.nn.relu(matmul14)
            lv40: R.Tensor((1, 1, 448), dtype="float32") = relu1
            square1: R.Tensor((1, 1, 448), dtype="float32") = R.square(lv40)
            permute_dims15: R.Tensor((448, 128), dtype="float32") = R.permute_dims(model_model_blocks_1_feed_forward_value_weight, axes=None)
            matmul15: R.Tensor((1, 1, 128), dtype="float32") = R.matmul(square1, permute_dims15, out_dtype=None)
            lv41: R.Tensor((1, 1, 128), dtype="float32") = matmul15
            mul27: R.Tensor((1, 1, 128), dtype="float32") = R.multiply(lv39, lv41)
            add15: R.Tensor((1, 1, 128), dtype="float32") = R.add(add12, mul27)
            layer_norm5: R.Tensor((1, 1, 128), dtype="float32") = R.nn.layer_norm(add15, model_model_ln_out_weight, model_model_ln_out_bias, axes=[-1], epsilon=1.0000000000000001e-05, center=True, scale=True)
            lv42: R.Tensor((1, 1, 128), dtype="float32") = layer_norm5
            permute_dims16: R.Tensor((128, 97), dtype="float32") = R.permute_dims(model_head_weight, axes=None)
            matmul16: R.Tensor((1, 1, 97), dtype="float32") = R.matmul(lv42, permute_dims16, out_dtype=None)
            gv: R.Tuple(R.Tensor((1, 1, 97), dtype="float32"), R.Tensor((1, 128), dtype="float32"), R.Tensor((1, 2, 64, 64), dtype="float32"), R.Tensor((1, 128), dtype="float32"), R.Tensor((1, 128), dtype="float32"), R.Tensor((1, 2, 64, 64), dtype="float32"), R.Tensor((1, 128), dtype="float32")) = matmul16, reshape5, wkv5_1, reshape7, reshape11, lv32, lv38
            R.output(gv)
        return gv
