"""Faults in the Triton kernels. Those in csrc/: cuda_faults.py."""

from planted.fault import Fault

ATTENTION = "kernels/attention"
TILES, FORWARD, BACKWARD = f"{ATTENTION}/masked_tiles.py", f"{ATTENTION}/forward.py", f"{ATTENTION}/backward.py"
ONE_TILE, DIAGONALS = f"{ATTENTION}/short.py", f"{ATTENTION}/relative_bias_gradient.py"
BIAS, MASK, DECODING = f"{ATTENTION}/bias_gradient.py", "kernels/mask/prepare.py", "kernels/decode_attention/forward.py"
NORM, NORM_BACKWARD = "kernels/add_layer_norm/forward.py", "kernels/add_layer_norm/backward.py"
HIDDEN, HIDDEN_BACKWARD = "kernels/feed_forward/forward.py", "kernels/feed_forward/backward.py"
EMPTY = "tests/ops/test_properties.py -k 'empty_dimensions and attention and triton'"
ROWS, LAUNCH = "kernels/linear_cross_entropy/rows.py", "kernels/common/launch.py"
SEARCH, LAUNCHES = "kernels/search/tokens.py", "--full tests/codegen/test_triton.py -k bound"


def attention(name: str) -> str:
    """The row of catalogue.SIZES."""
    return f"--full 'tests/ops/test_attention.py::test_against_float64[triton-{name}]'"


def row(op: str, name: str) -> str:
    return f"--full 'tests/ops/test_properties.py::test_against_float64[{op}-triton-{name}]'"


def searches(words: str) -> str:
    return f"tests/generate/test_search_kernels.py -k '{words}'"


BLOCKS, BY_STD = row("add_layer_norm", "several blocks"), row("add_layer_norm", "several blocks by std")
LOSS, DISTANCES = row("linear_cross_entropy", "smooth over others"), attention("distances of neighbours")
SHORT, HOLES, BAND = attention("window, one tile"), attention("key_padding_holes"), attention("window")
BIAS_OF_KEYS = attention("bias of keys, long")
FAULTS: list[Fault] = [
    # --- norms ---
    Fault("norm: x_bias's gradient of the last turn", NORM_BACKWARD, "dx_sum += grad", "dx_sum = grad",
        row("add_layer_norm", "bfloat16")),
    Fault("norm: columns outside the row counted", NORM,
        "tl.where(in_row[None, :], value - center[:, None], 0.0)", "value - center[:, None]", BLOCKS),
    Fault("norm: no Bessel's correction", NORM, "squares / (hidden - 1)", "squares / hidden", BY_STD),
    Fault("norm: the ratio of another row", NORM_BACKWARD, "TICKETS + row,", "TICKETS + row + 1,", BY_STD),
    Fault("norm: a program's sums left out", NORM_BACKWARD, "(row < count)[:, None]", "(row + 1 < count)[:, None]",
        BLOCKS),
    # --- feed-forwards ---
    Fault("feed-forward: the gate's bias for both", HIDDEN, "bias1 + d_inner + col", "bias1 + col",
        row("feed_forward", "swiglu")),
    Fault("feed-forward: the first half's mask for both", HIDDEN,
        "n * BLOCK_N + half * (BLOCK_N // 2), BLOCK_N // 2)", "n * BLOCK_N, BLOCK_N // 2)",
        row("feed_forward", "gelu")),
    Fault("feed-forward: relu's slope at 0", HIDDEN_BACKWARD, "tl.where(gate <= 0,", "tl.where(gate < 0,",
        row("feed_forward", "relu")),
    Fault("feed-forward: the second half's first weights again", "kernels/feed_forward/matmul.py",
        "            b_second += BLOCK_K * stride_bk\n", "", row("feed_forward", "geglu_tanh")),
    Fault("feed-forward: the slope of z^3 in gelu_tanh", "kernels/feed_forward/activations.py",
        "(3 * TANH_CUBIC)", "TANH_CUBIC", row("feed_forward", "geglu_tanh")),
    # --- the loss ---
    Fault("loss: columns after the classes counted", ROWS,
        "tl.sum(tl.where(inside, z, 0.0), axis=1)", "tl.sum(z, axis=1)",
        row("linear_cross_entropy", "mean in bfloat16")),
    Fault("loss: the gradient of a sum", ROWS, "rate /= tl.load(count).to(tl.float32)", "rate /= 1", LOSS),
    Fault("loss: ignored rows keep their logits", ROWS,
        "for start in range(0, n_class", "for start in range(0, 0", LOSS),
    Fault("loss: the first row's gradient for all", ROWS, "tl.load(dloss + row * dloss_stride)", "tl.load(dloss)",
        row("linear_cross_entropy", "two blocks of classes")),
    # --- attention: which keys are visible ---
    Fault("attention: interval one key long", TILES, "(col < end[:, None])", "(col <= end[:, None])", BAND),
    Fault("attention: bits of the neighbour", TILES, "2 * octet + tl.arange(0, 2)[None, None, None, :]",
        "2 * octet + 1 - tl.arange(0, 2)[None, None, None, :]", attention("attn_mask")),
    Fault("attention: partial tile as full", TILES, "first_full = tl.cdiv(begin_of_last, BLOCK_COLUMNS)",
        "first_full = begin_of_last // BLOCK_COLUMNS", DISTANCES),
    Fault("attention: the first tile again", TILES, "mask.tiles + first + i", "mask.tiles + first + i * 0", HOLES),
    Fault("mask: unchecked offsets are not clamped", MASK,
        "        begin = tl.minimum(tl.maximum(begin, 0), other_length)\n"
        "        end = tl.minimum(tl.maximum(end, 0), other_length)\n", "",
        "tests/masks/test_kernel_format.py -k positions_in_no_sequence"),
    Fault("mask: a tile with padding is full", MASK, "all_visible &= num_real == WIDTH",
        "all_visible &= num_real > 0", HOLES),
    # --- attention: products and gradients ---
    Fault("attention: accumulator not rescaled", FORWARD, "acc * rescale[:, None]", "acc", HOLES),
    Fault("attention: 16-bit accumulator", FORWARD, "acc * rescale[:, None]",
        "(acc * rescale[:, None]).to(v_tile.dtype).to(tl.float32)", attention("a long row")),
    Fault("attention: gradient of lse lost", BACKWARD, "delta -= tl.load(dlse_ptr", "delta -= 0 * tl.load(dlse_ptr",
        HOLES),
    Fault("attention: another row's dropout", BACKWARD, "dropout.threshold, row0 + m, n0",
        "dropout.threshold, row0 + m + 1, n0", BIAS_OF_KEYS),
    Fault("attention: one head of the group", BACKWARD, "for g in range(group):", "for g in range(1):", BAND),
    Fault("attention: gradient of lse lost in one tile", ONE_TILE,
        "delta -= tl.load(dlse_ptr", "delta -= 0 * tl.load(dlse_ptr", SHORT),
    Fault("attention: delta without dropout in one tile", ONE_TILE,
        "dp = tl.where(kept, dp * dropout.scale, 0.0)", "dp *= 1.0", SHORT),
    Fault("attention: one head of the group in one tile", ONE_TILE, "in range(group * num_tiles)",
        "in range(num_tiles)", SHORT),
    # --- attention: biases and softcap ---
    Fault("attention: bias gradient of one sample", BIAS, "first_b + i // (loop_m * loop_h)",
        "first_b + 0 * (i // (loop_m * loop_h))", BIAS_OF_KEYS),
    Fault("attention: bias of the next distance", TILES,
        "place = n - m + first", "place = n - m + first + 1", DISTANCES),
    Fault("attention: a shifted diagonal", DIAGONALS, "start = zero +", "start = 1 + zero +", DISTANCES),
    Fault("attention: a bias by distance without a turn is not written", DIAGONALS,
        "torch.zeros_like(bias)", "torch.empty_like(bias)", EMPTY),
    Fault("attention: a bias without queries is not written", BIAS,
        "if programs == 0:", "if programs == 0 or q.shape[2] == 0:", EMPTY),
    Fault("attention: no derivative of tanh in dq", BACKWARD, "p *= slope", "p *= 1.0", DISTANCES),
    Fault("attention: no derivative of tanh in one tile", ONE_TILE, "ds *= slope", "ds *= 1.0",
        attention("distances in one tile")),
    Fault("attention: tanh that cancels", "kernels/common/softcap.py", "< 0.5", "< 0.0", attention("softcap 10000.0")),
    # --- decoding ---
    Fault("decoding: positions past the length are read", DECODING, "mask=visible, other=-1)", "mask=visible, other=0)",
        row("decode_attention", "ancestors")),
    Fault("decoding: the bias of the key's head", DECODING, "h[:, None] * bias.stride_h", "h_k * bias.stride_h",
        row("decode_attention", "a bias of each head")),
    Fault("decoding: parts merged by powers of 2", DECODING,
        "weight = tl.exp(lse - tl.where(top == float(\"-inf\"), 0.0, top))",
        "weight = tl.exp2(lse - tl.where(top == float(\"-inf\"), 0.0, top))",
        row("decode_attention", "one part is empty")),
    Fault("decoding: a step's own key is read from the cache", DECODING, "tl.where(n == last, given, ptrs)",
        "tl.where(n > last, given, ptrs)", "tests/ops/test_decode_attention.py -k 'writes and triton'"),
    # --- the search ---
    Fault("search: equal logits, the last", SEARCH, "| (0x7FFFFFFF - index)", "| index", searches("greedy and equal")),
    Fault("search: a chunk gives its best again", SEARCH, "keys < top", "keys <= top", searches("beams and odd")),
    Fault("search: a sentence gets another beam's history", SEARCH, "(b * W + beam_of_source)[:, None]",
        "(b * W + tl.minimum(row, W - 1))[:, None]", searches("beams and odd")),
    Fault("search: sentences that ended before come last", SEARCH, "(row[None, :] < row[:, None])",
        "(row[None, :] > row[:, None])", searches("beams and ties and end")),
    # --- launches that are bound to a compiled kernel ---
    Fault("launch: any address as if 16 divided it", LAUNCH, "return found, not bits & 15 or tuple(", "return found, (",
        LAUNCHES),
    Fault("launch: the default stream", LAUNCH, "current_stream(device), self.function", "0, self.function", LAUNCHES),
    Fault("launch: another device's launch", LAUNCH, "device != current_device()", "device < 0", LAUNCHES),
    Fault("launch: constants before the arguments", LAUNCH, "*arguments, *self.constants,",
        "*self.constants, *arguments,", LAUNCHES),
    Fault("launch: no residual as if there were one", NORM, "x_bias_dtype, residual is None, weight.dtype",
        "x_bias_dtype, weight.dtype", LAUNCHES),
    Fault("launch: another mask's", f"{ATTENTION}/arguments.py", "(*key, tiles_per_sample, tiles_per_head)",
        "(tiles_per_sample, tiles_per_head)", LAUNCHES),
]  # fmt: skip
