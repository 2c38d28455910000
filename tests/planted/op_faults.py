"""Faults in fastattn/ops and in the backends reference and aten."""

from planted.fault import Fault

ATEN, REFERENCE = "fastattn/backends/aten", "fastattn/backends/reference"
ATTENTION, PHILOX = "fastattn/ops/attention.py", f"{REFERENCE}/philox.py"
DECODING = "tests/ops/test_properties.py -k 'float64 and decode_attention"
RULE = "tests/ops/test_attention_dropout.py"


def row(backend: str, name: str) -> str:
    """The row of catalogue.SIZES."""
    return f"--full 'tests/ops/test_attention.py::test_against_float64[{backend}-{name}]'"


def aten(name: str) -> str:
    return row("aten", f"aten: {name}")


def nan(backend: str, case: str, name: str) -> str:
    return f"--full 'tests/ops/test_attention.py::test_hidden_nan_stays_in[{backend}-{case}-{name}]'"


FAULTS: list[Fault] = [
    # --- attention ---
    Fault("attention: heads of keys repeated the other way", ATTENTION,
        "t = t.repeat_interleave(H // h, dim=-3)", "t = torch.cat([t] * (H // h), dim=-3)",
        row("reference", "6 heads of queries, 2 of keys, 3 of values")),
    Fault("attention: keys have heads where query has none", ATTENTION, "q[1] > 0 < k[1]", "k[1] > 0",
        "'tests/ops/test_properties.py::test_empty_dimensions[attention without H, two of keys-triton]'"),
    Fault("attention: is_causal ignored where there is a mask", ATTENTION,
        "mask = causal if mask is None else mask & causal", "mask = causal if mask is None else mask",
        "tests/masks/test_histories.py"),
    Fault("attention: float64 summed in float32", f"{REFERENCE}/attention.py",
        "acc = torch.float64 if q.dtype == torch.float64 else torch.float32", "acc = torch.float32",
        row("reference", "float64")),
    Fault("attention: a query without keys may be NaN, forgotten", f"{REFERENCE}/attention.py",
        "    q = q.where(has_keys, 0)\n", "", nan("reference", "paddings", "query")),
    Fault("attention: a bias of -inf masks no row", f"{REFERENCE}/attention.py",
        "            visible = visible & (bias != -torch.inf)\n", "            pass\n",
        row("reference", "bias with -inf")),
    Fault("philox: the high half first", PHILOX,
        "lanes[..., n, 0], lanes[..., n, 1] = c, c >> 16", "lanes[..., n, 1], lanes[..., n, 0] = c, c >> 16",
        f"{RULE} -k reference_lanes"),
    Fault("philox: a lane that equals the threshold is dropped, in products", PHILOX,
        "lanes.ge_(limit - 32768)  # int16 has no larger", "lanes.gt_(limit - 32768)  # int16 has no larger",
        f"{RULE} -k 'by_the_rule and aten'"),
    Fault("aten: one key of a group is hidden, so all are", f"{ATEN}/_visible.py",
        "unflatten(1, (sizes[2], -1)).all(2)", "unflatten(1, (sizes[2], -1)).any(2)",
        nan("aten", "a mask of heads", "key")),
    Fault("aten: the sentences of a block counted from the first", f"{ATEN}/_visible.py",
        "of_call = slice(batch.start + some.start, batch.start + some.stop)",
        "of_call = slice(some.start, some.stop)", aten("products, padding, 12 heads")),
    Fault("aten: a distance of the next key in the gradient", f"{ATEN}/_blocks.py",
        "keys.start - rows.stop + 1 + zero", "keys.start - rows.stop + zero", aten("distances, short")),
    Fault("aten: gradients of keys from one block alone", f"{ATEN}/_blocks.py",
        "total.add_(grad) if visible.shares_keys else total.copy_(grad)", "total.copy_(grad)",
        aten("operator, window")),
    Fault("aten: NaN is looked for in values alone", f"{ATEN}/attention.py",
        "for t in tensors[-2:]])", "for t in tensors[-1:]])", nan("aten", "a mask of heads", "key")),
    Fault("aten: a scale of 0", f"{ATEN}/attention.py",
        "if softmax_scale <= 0:  #", "if softmax_scale < 0:  #", row("aten", "scale 0.0, causal")),
    Fault("aten: gradients past the end of a sequence", f"{ATEN}/_sequences.py",
        "return ctx.axis.clear_beyond_end(ctx.axis.unpack(dout)), None", "return ctx.axis.unpack(dout), None",
        aten("unpacked, own, bfloat16")),
    Fault("aten: lse of a query without keys", f"{ATEN}/_plain.py",
        "lse.where(has_keys.squeeze(-1), -torch.inf)", "lse", row("aten", "attn_mask")),
    Fault("merge: a call without keys", "fastattn/ops/_combine.py",
        "torch.logaddexp(lse1, lse2).masked_fill(sees_none, -torch.inf)", "torch.logaddexp(lse1, lse2)",
        "tests/ops/test_combine.py"),
    # --- decode_attention ---
    Fault("decoding: a bias for each row in another order", f"{ATEN}/decode_attention.py",
        "bias.repeat_interleave(R, 1)", "bias.repeat(1, R)", f"{DECODING} and aten and bias'"),
    Fault("decoding: lengths ignored where one is whole", f"{ATEN}/decode_attention.py",
        "(lengths >= M).all()", "(lengths >= M).any()", f"{DECODING} and aten and ancestors'"),
]  # fmt: skip

OPS = "fastattn/ops"
NORM, LOSS, FEED, DECODE = "add_layer_norm.py", "linear_cross_entropy.py", "feed_forward.py", "decode_attention.py"
NUMBERS, DERIVED = "tests/ops/test_properties.py", "tests/ops/test_derived.py"
CHUNKS = "fastattn/backends/cross_entropy_chunks.py"

FAULTS += [
    Fault("decoding: a query without keys is not 0", f"{ATEN}/{DECODE}",
        "return out.where(visible.any(-1)[..., None, None], 0).contiguous()", "return out.contiguous()",
        "tests/ops/test_decode_attention.py -k 'attended and aten'"),
    Fault("decoding: groups of heads in the wrong order", f"{ATEN}/{DECODE}",
        "q.reshape(B * Hk, H // Hk * W, Dk)",
        "q.unflatten(1, (-1, Hk)).transpose(1, 2).reshape(B * Hk, H // Hk * W, Dk)",
        "tests/ops/test_decode_attention.py -k 'attended and aten'"),
    Fault("loss: float16 gradients before the loss scale", f"{OPS}/{LOSS}",
        'reduction != "none" and dtype != torch.float16', 'reduction != "none"',
        "tests/ops/test_linear_cross_entropy.py -k loss_scale"),
    Fault("loss: a kept graph's gradients are changed by the caller", f"{OPS}/{LOSS}",
        "dloss.item() == 1 and not torch._C._autograd._get_current_graph_task_keep_graph()", "dloss.item() == 1",
        f"{DERIVED} -k 'callers and loss and aten'"),
    Fault("loss: smoothing over the others counts the target", f"{OPS}/{LOSS}",
        "return float(label_smoothing) * classes / (classes - 1) if", "return float(label_smoothing) if",
        f"{NUMBERS} -k 'float64 and others and aten'"),
    Fault("loss: a chunk reads the first chunk's gradient", CHUNKS,
        "dloss if dloss is None or dloss.dim() == 0 else dloss[rows]",
        "dloss if dloss is None or dloss.dim() == 0 else dloss[:step][: len(target[rows])]",
        "tests/ops/test_linear_cross_entropy.py -k chunks"),
    Fault("loss: the mean divides by all tokens", CHUNKS,
        "count = tokens if valid is None else valid.sum()", "count = tokens",
        f"{NUMBERS} -k 'float64 and mean and triton'"),
    Fault("loss: what the backward gets of ignored rows", f"{ATEN}/{LOSS}",
        "dloss = dloss.index_select(0, valid_index)", "dloss = dloss[: len(valid_index)]",
        f"{NUMBERS} -k 'float64 and each and aten'"),
    Fault("loss: denormal numbers on a CPU", f"{ATEN}/{LOSS}",
        "SMALLEST_LOG_P = -80.0", "SMALLEST_LOG_P = -800.0", "tests/ops/test_linear_cross_entropy.py -k denormal"),
    Fault("norm: the standard deviation without Bessel's correction", f"{ATEN}/{NORM}",
        "(z.shape[-1] - 1) ** -0.5", "z.shape[-1] ** -0.5", f"{NUMBERS} -k 'float64 and std and aten'"),
    Fault("norm: the backward of a kernel gets x for the sum", f"{OPS}/{NORM}",
        "return NormCall(z, None, *call[2:]), (statistics,)", "return NormCall(call.x, None, *call[2:]), (statistics,)",
        f"{NUMBERS} -k 'float64 and norm and cuda'"),
    Fault("norm: two leaves share the memory of one gradient", f"{OPS}/{NORM}",
        "dx = dresidual = dx.view(z.shape)", "dx, dresidual = dx.view(z.shape), dx.view(z.shape)",
        f"{DERIVED} -k 'callers and norm and cuda'"),
    Fault("norm: a seed is drawn without dropout", f"{OPS}/{NORM}",
        "draw_rng_state(device, chosen.name) if dropout_p > 0 else None", "draw_rng_state(device, chosen.name)",
        f"{NUMBERS} -k 'drawn and norm and aten'"),
    Fault("norm: float16's infinite gradient of what is dropped", f"{ATEN}/{NORM}",
        "if x.dtype == torch.float16:", "if x.dtype == torch.float64:", f"{NUMBERS} -k 'dropped and norm and aten'"),
    Fault("feed-forward: relu in place under selective checkpoints", f"{ATEN}/{FEED}",
        'activation == "relu" and may_write_in_place()', 'activation == "relu"', f"{DERIVED} -k selective"),
    Fault("a fused backward is recorded without its second derivative", "fastattn/ops/_autograd.py",
        "            refuse_second_derivative(*dresults)\n", "", f"{DERIVED} -k 'second and cuda'"),
    Fault("a traced operator returns its argument", "fastattn/ops/_autograd.py",
        "made.append(t.clone() if _is_among(t, (*given, *made)) else t)", "made.append(t)",
        f"{DERIVED} -k 'opcheck and alone'"),
    Fault("a fake has another layout than attention's result", f"{OPS}/attention.py",
        "if x.stride(1) < x.stride(2):", "if x.stride(1) > x.stride(2):",
        f"{DERIVED} -k 'opcheck and attention and cuda'"),
    Fault("float64 is cast under autocast", f"{OPS}/_autocast.py",
        "t.is_floating_point() and t.dtype != torch.float64 else t\n        for t in tensors",
        "t.is_floating_point() else t\n        for t in tensors", f"{NUMBERS} -k 'autocast and loss and aten'"),
    Fault("autocast: x is added to the residual in 16 bits", f"{OPS}/_autocast.py",
        "stream = x if residual is None else residual", "stream = x", f"{NUMBERS} -k 'autocast and norm and aten'"),
]  # fmt: skip
