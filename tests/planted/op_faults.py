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
    Fault("attention: is_causal ignored where there is a mask", ATTENTION,
        "mask = causal if mask is None else mask & causal", "mask = causal if mask is None else mask",
        "tests/ops/test_attention.py -k equal_masks"),
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
        "of_call = slice(some.start, some.stop)", aten("products, both paddings")),
    Fault("aten: the heads of a block counted from the first", f"{ATEN}/_visible.py",
        "slice(of_call.start * H + few.start,", "slice(of_call.start * H,", aten("blocks of queries, none")),
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
    Fault("aten: NaN is looked for in queries and keys alone", f"{ATEN}/_plain.py",
        "_known_finite(q, k, v)", "_known_finite(q, k)", nan("aten", "a mask of heads, with lse", "value")),
    Fault("merge: a call without keys", "fastattn/ops/_combine.py",
        "lse2.masked_fill(sees_none, 0.0)", "lse2", "tests/ops/test_combine.py"),
    # --- decode_attention ---
    Fault("decoding: a bias for each row in another order", f"{ATEN}/decode_attention.py",
        "bias.repeat_interleave(R, 1)", "bias.repeat(1, R)", f"{DECODING} and aten and bias'"),
    Fault("decoding: lengths ignored where one is whole", f"{ATEN}/decode_attention.py",
        "(lengths >= M).all()", "(lengths >= M).any()", f"{DECODING} and aten and ancestors'"),
]  # fmt: skip
