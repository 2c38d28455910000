"""Faults in fastattn/masks and kernels/mask."""

from planted.fault import Fault

MASK, FORMAT = "fastattn/masks/attention_mask.py", "fastattn/masks/kernel_format.py"
CONVERSIONS, RELATIVE = "fastattn/masks/conversions.py", "fastattn/masks/relative.py"
KERNEL = "kernels/mask/prepare.py"
LOOPS = "tests/masks/test_attention_mask.py -k loops"
HISTORIES = "tests/masks/test_histories.py"
LAUNCHED = "tests/masks/test_kernel_format.py"

FAULTS: list[Fault] = [
    Fault("bias of a reused mask is stale", MASK,
        "other._cache, other._bias_cache = cache, []", "other._cache, other._bias_cache = cache, self._bias_cache",
        HISTORIES),
    Fault("edits in place not seen", MASK, "0 if traced or t.is_inference() else t._version", "0", HISTORIES),
    Fault("a copied mask keeps what was prepared", MASK, ' | {"_cache": [], "_bias_cache": []}', "", HISTORIES),
    Fault("replaced padding keeps what was prepared", MASK, "only_biases = all(", "only_biases = any(", HISTORIES),
    Fault("what validation prepares cannot be trained with", MASK,
        "with torch.inference_mode(False):", "with torch.inference_mode(True):", HISTORIES),
    Fault("the smaller mask of two bands is the wider one", MASK,
        "return (max(lows) if lows else None)", "return (min(lows) if lows else None)",
        "tests/masks/test_attention_mask.py -k means_both"),
    Fault("a window without keys on its right has no right side", MASK,
        "return (None if left is None else -left), right", "return (None if left is None else -left), right or None",
        LOOPS),
    Fault("packed masks combined with any band", MASK,
        "same_packing = packed.cu_seqlens_q is packed.cu_seqlens_k", "same_packing = True",
        "tests/masks/test_attention_mask.py -k means_both"),
    Fault("query padding read as key padding", MASK,
        "(self.query_padding, (1, 3))", "(self.query_padding, (1, 1))", LOOPS),
    Fault("keys that a band alone hides reach the sums", MASK,
        "self.cu_seqlens_q is not None or self.has_band\n            keys",
        "self.cu_seqlens_q is not None\n            keys",
        "--full 'tests/ops/test_attention.py::test_against_float64[aten-a band of nothing]'"),
    Fault("the end of packed offsets not checked", MASK,
        "if t[-1] != length:", "if t[-1] > length:", "tests/masks/test_attention_mask.py -k errors"),
    Fault("bottom_right of packed sequences ignores the queries' length", FORMAT,
        "shift_last = shift_first + (end - begin) - length", "shift_last = shift_first + (end - begin)", LOOPS),
    Fault("a band by keys keeps its sides", FORMAT,
        "(None if high is None else -high, None if low is None else -low) for", "(low, high) for", LOOPS),
    Fault("a tile with one full row is full", FORMAT,
        "(end.amin(-1)[..., None] >=", "(end.amax(-1)[..., None] >=", LOOPS),
    Fault("a partial block is full", FORMAT, "2 * every.long()", "2 * some.long()", LOOPS),
    Fault("classes in another order", KERNEL,
        "down[:, None, None] * ACROSS +", "down[:, None, None] +", f"{LAUNCHED} -k classes"),
    Fault("a matrix of one row is not read with the padding", FORMAT,
        "padding = row if mask.column_padding is None else row & mask.column_padding", "padding = row",
        "tests/masks/test_attention_mask.py -k means_both"),
    Fault("a document that comes back is the first one again", CONVERSIONS,
        "changes = ids[1:] != ids[:-1]", "changes = ids[1:] > ids[:-1]",
        "tests/masks/test_attention_mask.py -k documents"),
    Fault("the prefix is not visible before its end", CONVERSIONS,
        "return causal | prefix[:, None, None]", "return causal & prefix[:, None, None]",
        "tests/masks/test_attention_mask.py -k prefixes"),
    Fault("T5: the own position is a later one", RELATIVE,
        "buckets * (distance > 0)", "buckets * (distance >= 0)", "tests/masks/test_relative.py -k t5"),
    Fault("distances of packed sequences count from the whole", RELATIVE,
        "return seqlen_q - 1 if length == seqlen_q + seqlen_k - 1 else length // 2", "return seqlen_q - 1",
        "--full 'tests/ops/test_attention.py::test_against_float64[reference-distances in packed ones]'"),
    Fault("the padding of a row is forgotten in a launch", KERNEL,
        "begin, end = tl.where(is_real, begin, 0), tl.where(is_real, end, 0)", "begin, end = begin, end", LAUNCHED),
]  # fmt: skip
