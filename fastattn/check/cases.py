"""The catalogue of calls: random problems of every op, and their solution by any backend.

One function for each op makes a problem from sizes: `attention`, `decode_attention`, `add_layer_norm` (and RMSNorm),
`feed_forward` and `linear_cross_entropy`. Each also takes dtype, device and seed. `problems` lists what the doctor
compares. The tests and the benchmarks make their calls here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import fastattn
from fastattn.check.tolerance import measure_rounding_scale

SEED = 20170612  # of the problems and of their dropout, so that a report can be repeated


class Problem(NamedTuple):
    """One random call of an op: `function(**problem.arguments(), backend=...)`.

    tensors: each has a gradient, unless differentiable is False.
    options: the other arguments. An attn_mask that is a dict has the arguments of AttentionMask, without the biases.
    douts: the gradients that arrive at the outputs; without them `solve` draws some.
    """

    op: str
    case: str
    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    differentiable: bool = True
    douts: tuple[Tensor, ...] = ()

    def but(self, **changes: Any) -> Problem:
        """With other values of some arguments."""
        tensors = {name: changes.pop(name, t) for name, t in self.tensors.items()}
        return self._replace(tensors=tensors, options=self.options | changes)

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """With each tensor changed, those of the options and of the mask too."""
        tensors, options = tree_map_only(Tensor, change, (self.tensors, self.options))
        return self._replace(tensors=tensors, options=options)

    def arguments(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """The keyword arguments of the call, with these tensors in place of the problem's own. A mask is built here."""
        given = self.options | (self.tensors if tensors is None else tensors)
        if isinstance(mask := given.get("attn_mask"), dict):
            biases = {name: given.pop(name) for name in ("bias", "relative_bias") if name in given}
            given["attn_mask"] = fastattn.AttentionMask(**mask, **biases)
        return given

    def explain(self, dtype: torch.dtype) -> fastattn.Explanation:
        """Which backend computes the call with its tensors in this dtype, and why the others do not."""
        tensors = {name: t.to(dtype) for name, t in self.tensors.items()}
        return fastattn.explain(self.op, **self.arguments(tensors))


class _Random:
    """Random tensors, drawn on the CPU and in float64, so that they are equal on all devices and in all dtypes.

    options: dtype, device and seed are taken out of them.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.dtype, self.device = options.pop("dtype", torch.float32), options.pop("device", "cpu")
        self.generator = torch.Generator().manual_seed(options.pop("seed", SEED))

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return (drawn * scale + shift).to(self.device, dtype or self.dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator, dtype=dtype).to(self.device)


def attention(
    case: str = "",
    *,
    B: int = 2,
    H: int = 2,
    Lq: int = 21,
    Lk: int = 37,
    D: int = 32,
    Hk: int | None = None,
    Hv: int | None = None,
    Dv: int | None = None,
    mask: dict[str, Any] | None = None,
    bias: Sequence[int] | None = None,
    bias_dtype: torch.dtype | None = None,
    relative_bias: Sequence[int] | None = None,
    common: float = 0.0,
    **options: Any,
) -> Problem:
    """mask: arguments of AttentionMask. bias, relative_bias: the shapes of learned ones. options: others of the op.

    common: the size of what the keys of a head have in common, and its values, as those of a projection with a bias.
    The row sums of the backward are then larger than the gradients of scores."""
    random, Hk, Dv = _Random(options), Hk or H, Dv or D
    Hv = Hv or Hk
    tensors = {
        "query": random.normal(B, H, Lq, D),
        "key": random.normal(B, Hk, Lk, D),
        "value": random.normal(B, Hv, Lk, Dv),
    }
    if common:
        for name in ("key", "value"):
            tensors[name] += random.normal(1, Hk, 1, tensors[name].shape[3], scale=common)
    if relative_bias is not None:
        mask, tensors["relative_bias"] = mask or {}, random.normal(*relative_bias, dtype=bias_dtype)
    if mask is not None:
        options["attn_mask"] = {name: t.to(random.device) if isinstance(t, Tensor) else t for name, t in mask.items()}
    if bias is not None:
        tensors["attn_mask" if mask is None else "bias"] = random.normal(*bias, dtype=bias_dtype)
    if Hk != H or Hv != H:
        options["enable_gqa"] = True
    return Problem("attention", case, fastattn.scaled_dot_product_attention, tensors, options)


def decode_attention(
    case: str = "",
    *,
    batch: int = 2,
    queries: int = 3,
    heads: int = 2,
    heads_k: int = 2,
    positions: int = 37,
    head_dim: int = 32,
    value_dim: int | None = None,
    rows: int | None = None,
    lengths: Sequence[int] | None = None,
    ancestors: bool = False,
    bias: int = 0,
    **options: Any,
) -> Problem:
    """rows: of the cache, as many as queries unless given. bias: the rows that it has. The first half of the ancestors
    are those of one query, as beams have a common history."""
    random = _Random(options)
    rows, value_dim = queries if rows is None else rows, head_dim if value_dim is None else value_dim
    tensors = {
        "query": random.normal(batch, queries, heads, head_dim),
        "key": random.normal(batch, positions, rows, heads_k, head_dim),
        "value": random.normal(batch, positions, rows, heads_k, value_dim),
    }
    if bias:
        tensors["bias"] = random.normal(bias, positions)
    if lengths is not None:
        options["lengths"] = torch.tensor(lengths, dtype=torch.int32, device=random.device)
    if ancestors:
        table = random.integers(max(rows, 1), batch, queries, positions, dtype=torch.int32)
        table[..., : positions // 2] = table[:, :1, : positions // 2].clone()
        options["ancestors"] = table
    return Problem("decode_attention", case, fastattn.decode_attention, tensors, options, differentiable=False)


def add_layer_norm(
    case: str = "",
    *,
    rows: Sequence[int] = (37,),
    hidden: int = 48,
    residual: bool = True,
    x_bias: bool = False,
    rms: bool = False,
    weight_dtype: torch.dtype | None = None,
    mean: float = 0.0,
    std: float = 1.0,
    **options: Any,
) -> Problem:
    """rms: RMSNorm, without a bias. mean, std: of x. The residual is not as large as x, so that a mix-up shows."""
    random = _Random(options)
    tensors = {"x": random.normal(*rows, hidden, scale=std, shift=mean)}
    if residual:
        tensors["residual"] = random.normal(*rows, hidden, scale=0.7 * std)
    else:
        options["residual"] = None
    tensors["weight"] = random.normal(hidden, scale=0.3, shift=1.0, dtype=weight_dtype)
    if not rms:
        tensors["bias"] = random.normal(hidden, dtype=weight_dtype)
    if x_bias:
        tensors["x_bias"] = random.normal(hidden, scale=0.6 * std, shift=0.3)
    if rms:
        return Problem("add_rms_norm", case, fastattn.dropout_add_rms_norm, tensors, options)
    return Problem("add_layer_norm", case, fastattn.dropout_add_layer_norm, tensors, options)


def feed_forward(
    activation: str = "relu",
    case: str = "",
    *,
    tokens: Sequence[int] = (21,),
    d: int = 32,
    d_ff: int = 56,
    d_out: int = 24,
    has_bias: bool = True,
    **options: Any,
) -> Problem:
    random, d_up = _Random(options), 2 * d_ff if activation.removesuffix("_tanh").endswith("glu") else d_ff
    tensors = {
        "x": random.normal(*tokens, d),
        "weight1": random.normal(d_up, d, scale=max(d, 1) ** -0.5),
        "bias1": random.normal(d_up, scale=0.5),
        "weight2": random.normal(d_out, d_ff, scale=max(d_ff, 1) ** -0.5),
        "bias2": random.normal(d_out),
    }
    if not has_bias:
        options |= dict.fromkeys(("bias1", "bias2"))
        tensors = {name: t for name, t in tensors.items() if name not in options}
    options["activation"] = activation
    return Problem("feed_forward", case or activation, fastattn.feed_forward, tensors, options)


def linear_cross_entropy(
    case: str = "",
    *,
    tokens: Sequence[int] = (21,),
    d: int = 32,
    classes: int = 70,
    has_bias: bool = True,
    ignore_index: int = 2,
    **options: Any,
) -> Problem:
    """One token in four is ignored. ignore_index may be a class."""
    random = _Random(options)
    tensors = {"x": random.normal(*tokens, d), "weight": random.normal(classes, d, scale=2 * max(d, 1) ** -0.5)}
    if has_bias:
        tensors["bias"] = random.normal(classes, scale=0.5)
    target = random.integers(classes, *tokens)
    target.view(-1)[1::4] = ignore_index
    options |= {"target": target, "ignore_index": ignore_index}
    return Problem("linear_cross_entropy", case, fastattn.linear_cross_entropy, tensors, options)


def problems(device: torch.device, large: bool | None = None) -> Iterator[Problem]:
    """The problems of every op that the doctor compares, in float64, with lengths that leave ragged tiles. Equal on all
    devices except for their size: large on a GPU, unless `large` is given."""
    large = device.type == "cuda" if large is None else large
    place: dict[str, Any] = {"device": device, "dtype": torch.float64}

    sizes: dict[str, Any] = {"B": 2, "H": 4, "Lq": 200, "Lk": 168, "D": 64} if large else {"Lq": 72, "Lk": 104, "D": 64}
    sizes |= {"common": 1.0, **place}
    lengths = torch.tensor([sizes["Lk"] // 3, sizes["Lk"]], device=device)
    key_padding = torch.arange(sizes["Lk"], device=device) < lengths[:, None]
    drawn = torch.rand(2, 1, sizes["Lq"], sizes["Lk"], generator=torch.Generator().manual_seed(SEED))
    attn_mask = (drawn < 0.6).to(device)
    attn_mask[0, 0, 3] = False  # a query that may attend to nothing
    yield attention("no mask, with lse", **sizes, return_lse=True)
    yield attention("causal", **sizes, is_causal=True)
    yield attention("key padding", **sizes, attn_mask=fastattn.AttentionMask(key_padding=key_padding))
    yield attention("bool mask", **sizes, attn_mask=attn_mask)
    yield attention("bias", **sizes, bias=(1, sizes.get("H", 2), sizes["Lq"], sizes["Lk"]))
    yield attention("grouped-query", **sizes, Hk=1)
    yield attention("relative bias", **sizes, relative_bias=(1, sizes["Lq"] + sizes["Lk"] - 1))
    yield attention("softcap", **sizes, softcap=3.0)
    yield attention("causal, dropout", **sizes, is_causal=True, dropout_p=0.2)

    queries, positions = (5, 600) if large else (3, 70)
    sizes = {"queries": queries, "positions": positions, "heads": 4 if large else 2, "head_dim": 64, **place}
    shared = {**sizes, "heads_k": sizes["heads"], "lengths": [positions // 3, positions]}
    yield decode_attention("beams of one history", **shared, ancestors=True)
    yield decode_attention("shared keys", **shared, rows=1)
    yield decode_attention("own rows, grouped-query", **sizes, heads_k=1)

    rows, hidden = (300, 512) if large else (40, 96)
    sizes = {"rows": (2, rows), "hidden": hidden, **place}
    yield add_layer_norm("residual, with sum", **sizes, return_sum=True)
    yield add_layer_norm("no residual", **sizes, residual=False)
    yield add_layer_norm("residual, dropout, x_bias", **sizes, x_bias=True, dropout_p=0.2)
    yield add_layer_norm("eps on std", **sizes, eps_on_std=True)
    yield add_layer_norm("with sum", **sizes, rms=True, return_sum=True)
    yield add_layer_norm("dropout", **sizes, rms=True, dropout_p=0.2)

    tokens, d, d_ff = (300, 256, 512) if large else (40, 48, 96)
    sizes = {"tokens": (2, tokens), "d": d, "d_ff": d_ff, "d_out": d, **place}
    yield feed_forward("relu", **sizes)
    yield feed_forward("gelu", **sizes)
    yield feed_forward("swiglu", **sizes)
    yield feed_forward("relu", "relu, dropout", **sizes, dropout_p=0.2)

    tokens, d, classes = ((32, 20), 128, 5003) if large else ((16, 5), 32, 83)
    sizes = {"tokens": tokens, "d": d, "classes": classes, "ignore_index": 0, **place}
    options: dict[str, Any] = {"logit_scale": 0.5, "label_smoothing": 0.1}
    yield linear_cross_entropy("mean", **sizes, **options, reduction="mean")
    yield linear_cross_entropy("none, others", **sizes, **options, reduction="none", smooth_over="others")


def timed_problems(device: torch.device) -> Iterator[Problem]:
    """The calls that ``doctor --time`` times, in float32: of sizes that a training has, smaller on a CPU."""
    batch, length, classes = (16, 1024, 32000) if device.type == "cuda" else (4, 128, 4000)
    place: dict[str, Any] = {"device": device}
    tokens, d = batch * length, 512
    for n, count in ((64, tokens // 64), (length, batch)):
        padding = torch.arange(n, device=device) < torch.linspace(n // 2, n, count, device=device)[:, None]
        sizes = {"B": count, "H": 8, "Lq": n, "Lk": n, "D": 64, **place}
        yield attention(f"{count} x {n}", **sizes)
        yield attention(f"{count} x {n} causal", **sizes, is_causal=True)
        yield attention(f"{count} x {n} padding", **sizes, attn_mask=fastattn.AttentionMask(key_padding=padding))
    yield add_layer_norm(f"{tokens} x {d} dropout", rows=(tokens,), hidden=d, dropout_p=0.1, **place)
    yield feed_forward(
        "relu", f"{tokens} x {d} dropout", tokens=(tokens,), d=d, d_ff=4 * d, d_out=d, dropout_p=0.1, **place
    )
    yield linear_cross_entropy(f"{tokens} x {d} -> {classes}", tokens=(tokens,), d=d, classes=classes, **place)
    sizes = {"batch": 32, "queries": 5, "heads": 8, "heads_k": 8, "positions": 64, "head_dim": 64, **place}
    yield decode_attention("32 x 5 beams, 64 keys", **sizes)


def solve(
    problem: Problem,
    backend: str | Callable[..., Any],
    given: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    change: Callable[[Tensor], Tensor] = lambda t: t,
) -> dict[str, Tensor]:
    """Outputs and gradients of `problem`, of its tensors rounded to `given`, computed in `dtype`. Without these dtypes
    each tensor keeps its own.

    backend: a name, or what is called in place of the op.
    change: of the tensors and the gradients of outputs before they are used, see tolerance.measure_rounding_scale."""

    def convert(t: Tensor) -> Tensor:
        return change(t.to(given or t.dtype).to(dtype or t.dtype)).detach()

    tensors = {name: convert(t) for name, t in problem.tensors.items()}
    leaves = {name: t.requires_grad_() for name, t in tensors.items()} if problem.differentiable else {}
    torch.manual_seed(SEED)  # one dropout mask for every backend and dtype
    arguments = problem.arguments(tensors)
    call = partial(problem.function, backend=backend) if isinstance(backend, str) else backend
    outputs = call(**arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = ()
    if leaves:
        # Rounded to the dtype of the problem, so that a solution in float64 is given the same.
        first = next(iter(problem.tensors.values()))
        random = _Random({"dtype": given or first.dtype, "seed": SEED + 1})  # other numbers than those of `first`
        douts = problem.douts or [random.normal(*out.shape) for out in outputs]
        pairs = [(out, dout) for out, dout in zip(outputs, douts, strict=True) if out.requires_grad]
        douts = [change(dout.to(given or dout.dtype).to(out)) for out, dout in pairs]
        grads = torch.autograd.grad([out for out, _ in pairs], list(leaves.values()), douts)
    results = {"out" if i == 0 else f"out[{i}]": out.detach() for i, out in enumerate(outputs)}
    return results | {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def expected_results(
    problem: Problem, dtype: torch.dtype | None = None, formula: str | Callable[..., Any] = "reference"
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """truth, baseline and rounding_scale of check_error for each result, of tensors rounded to `dtype`; without it
    each tensor keeps its own."""
    truth = solve(problem, formula, dtype, torch.float64)
    baseline = solve(problem, formula, dtype, dtype)
    scale = measure_rounding_scale(lambda change: solve(problem, formula, dtype, torch.float64, change), truth)
    return {name: (truth[name], baseline[name], scale[name]) for name in truth}
