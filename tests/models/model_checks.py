"""Twins for the tests of models: fastattn's model next to the same in plain PyTorch, with equal weights."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import skip_without_triton
from plain_captioner import PlainCaptioner
from plain_transformer import PlainTransformer
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import fastattn.backends.cuda
from fastattn import FusedTransformer
from fastattn.models import ABDTransformer, Decoder, Encoder, src_trg_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAD_SRC, PAD_TRG, VOCAB = 1, 2, 40
SMALL = dict(d_word_vec=32, d_model=32, d_inner=64, n_layers=2, n_head=4, d_k=8, d_v=12, n_position=30)
TINY = dict(d_word_vec=16, d_model=16, d_inner=24, n_layers=1, n_head=2, d_k=8, d_v=12)
NO_DROPOUT = dict(dropout=0.0, attn_dropout=0.0)

# Options of layers alone, with which the stacks are made again.
OF_LAYERS = ("norm", "qk_norm", "softcap", "attention_bias")
OURS_ALONE = ("pack_padding", "backend", "graphs")


def fused(**changes: Any) -> FusedTransformer:
    given = SMALL | changes
    of_layers = {name: given.pop(name) for name in OF_LAYERS if name in given}
    model = FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **given)
    if of_layers:
        names = ("d_word_vec", "n_layers", "n_head", "d_k", "d_v", "d_model", "d_inner", "n_position", "dropout")
        names += ("attn_dropout", "norm_first", "activation", "n_head_kv", "backend")
        options = {name: given[name] for name in names if name in given} | of_layers
        options["scale_emb"] = model.encoder.scale_emb
        model.encoder = Encoder(VOCAB, pad_idx=PAD_SRC, **options)
        model.decoder = Decoder(VOCAB, pad_idx=PAD_TRG, **options)
        if given.get("trg_emb_prj_weight_sharing", True):
            model.trg_word_prj.weight = model.decoder.trg_word_emb.weight
        if given.get("emb_src_trg_weight_sharing", True):
            model.encoder.src_word_emb.weight = model.decoder.trg_word_emb.weight
    return model.to(DEVICE)


def plain(**changes: Any) -> PlainTransformer:
    given = {name: value for name, value in (SMALL | changes).items() if name not in OURS_ALONE}
    position = given.pop("position", "sine")
    model = PlainTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **given)
    for stack in (model.encoder, model.decoder) if position == "learned" else ():
        stack.position_enc.pos_table = nn.Parameter(stack.position_enc._buffers.pop("pos_table"))
    return model.to(DEVICE)


# Twins.


class Result(NamedTuple):
    """Outputs of real target tokens, (n, words) of each decoder, and the gradient of each parameter that has one."""

    outputs: list[Tensor]
    grads: dict[str, Tensor]


class Twins(NamedTuple):
    """ours, theirs: the same model by fastattn and in plain PyTorch, in training mode, without dropout.

    batch: the arguments of both. targets: what each decoder is trained to give, padded with `pad`.
    """

    ours: Any
    theirs: Any
    batch: tuple[Any, ...]
    targets: tuple[Tensor, ...]
    pad: int

    def train(self, mode: bool = True) -> Twins:
        self.ours.train(mode), self.theirs.train(mode)
        return self

    def each(self, change: Callable[[nn.Module], Any]) -> Twins:
        """Both changed."""
        for model in (self.ours, self.theirs):
            torch.manual_seed(4)
            change(model)
        return self

    def outputs(self, model: Callable[..., Any]) -> list[Tensor]:
        made = model(*self.batch)
        made = made if isinstance(made, tuple) else (made,)
        return [t.view(*gold.shape, -1)[gold != self.pad] for t, gold in zip(made, self.targets, strict=True)]

    def loss(self, model: Callable[..., Any]) -> Tensor:
        return self.loss_of(self.outputs(model))

    def loss_of(self, outputs: list[Tensor]) -> Tensor:
        outputs = [t if t.dtype == torch.float64 else t.float() for t in outputs]
        losses = [
            F.cross_entropy(t, gold[gold != self.pad], label_smoothing=0.1)
            for t, gold in zip(outputs, self.targets, strict=True)
        ]
        return torch.stack(losses).mean()

    def solve(self, model: nn.Module, grad: bool = True, call: Any = None) -> Result:
        """call: what is called in place of the model."""
        model.zero_grad()
        with torch.set_grad_enabled(grad):
            outputs = self.outputs(model if call is None else call)
            if grad:
                self.loss_of(outputs).backward()
        return Result([t.detach() for t in outputs], gradients(model))

    def compare(self, grad: bool = True, atol: float = 5e-5) -> None:
        check(self.solve(self.ours, grad), self.solve(self.theirs, grad), atol)


def trained(model: nn.Module, loss: Callable[[nn.Module], Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    """The losses of three steps."""
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss(model))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in found.items()}


def check(found: Result, expected: Result, atol: float = 5e-5) -> None:
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    check_gradients(found.grads, expected.grads, 10 * atol)


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 1e-3) -> None:
    """By the norm of each; of one that is 0 but for rounding, as of a bias of keys, by the norm of the largest."""
    assert found.keys() == expected.keys()
    noise = 1e-2 * max((grad.norm() for grad in expected.values()), default=0)
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= relative * max(grad.norm(), noise), name


def place_of(name: str) -> str:
    """Where a dropout is: the last two names of its path, or "weights" of attention."""
    *_, parent, last = name.split(".") if "." in name else ("", name)
    return "weights" if last == "attn_dropout" or parent in ("attention", "attn") else f"{parent}.{last}"


def set_dropout(model: nn.Module, p: float, *places: str) -> nn.Module:
    """Of the dropouts in these places, or of all."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and (not places or place_of(name) in places):
            module.p = p
    return model


def tokens() -> tuple[Tensor, Tensor]:
    """Three sentence pairs, (3, 11) and (3, 9), with padding after, before and between the words."""
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(3, VOCAB, (3, 11), generator=generator)
    trg = torch.randint(3, VOCAB, (3, 9), generator=generator)
    src[1, 7:], src[2, 4:], trg[0, 8:], trg[2, 5:] = PAD_SRC, PAD_SRC, PAD_TRG, PAD_TRG
    src[2, 1], src[1, :2], trg[2, 3], trg[0, 4] = PAD_SRC, PAD_SRC, PAD_TRG, PAD_TRG
    return src.to(DEVICE), trg.to(DEVICE)


Batch = tuple[Tensor, Tensor, Tensor]


def batch(seed: int = 0, rows: int = 3, src_length: int = 6, trg_length: int = 7) -> Batch:
    """src_seq, trg_seq and gold: sentences of different lengths, the first without padding, the last without tokens."""
    generator = torch.Generator().manual_seed(seed)
    src, trg = (torch.randint(3, VOCAB, (rows, n), generator=generator) for n in (src_length, trg_length + 1))
    trg, gold = trg[:, :-1].clone(), trg[:, 1:].clone()
    for row in range(1, rows):
        src[row, max(src_length - row, 1) :] = PAD_SRC
        trg[row, max(trg_length - row, 0) :], gold[row, max(trg_length - row, 0) :] = PAD_TRG, PAD_TRG
    return src.to(DEVICE), trg.to(DEVICE), gold.to(DEVICE)


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """Norms and biases differ from those of a new model, and scores are large enough that a wrong mask shows."""
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        drawn = torch.randn(p.shape, generator=generator).to(p)
        p.add_(drawn, alpha=0.3) if p.dim() == 1 else p.mul_(1.0 if "emb" in name else 1.5)
        if isinstance(model, PlainCaptioner) and p.dim() > 1:  # so that captions differ
            p.copy_(0.4 * drawn)
    return model


def transformer(**options: Any) -> Twins:
    """FusedTransformer and the public architecture, whose tables of positions are long enough."""
    torch.manual_seed(0)
    theirs = set_dropout(randomised(plain(**options | {"n_position": SMALL["n_position"]})), 0.0)
    ours = set_dropout(fused(**options), 0.0)
    length = ours.encoder.position_enc.pos_table.shape[1]
    ours.load_state_dict({n: t[:, :length] if "pos_table" in n else t for n, t in theirs.state_dict().items()})
    src, trg = tokens()
    return Twins(ours, theirs, (src, trg), (trg,), PAD_TRG)


PAD, ENDS, WORDS = 0, 1, 13
VOCABULARY = SimpleNamespace(
    n_vocabs=WORDS,
    word2idx={"<PAD>": PAD, "<S>": ENDS} | {f"w{i}": i for i in range(2, WORDS)},
    idx2word={PAD: "<PAD>", ENDS: "<S>"} | {i: f"w{i}" for i in range(2, WORDS)},
)
WIDTHS = {"one": 10, "two": (10, 7), "three": (10, 7, 5), "four": (10, 7, 5, 9)}


def captioner(mode: str, positions: str = "batch", dropout: float = 0.0, **options: Any) -> Twins:
    """ABDTransformer and the same in plain PyTorch. Three videos; one is padded at its end, one at its start."""
    torch.manual_seed(3)
    sizes = (WIDTHS[mode], 16, 24, 4, 2, dropout, mode)
    theirs = randomised(PlainCaptioner(VOCABULARY, *sizes, 8, positions))
    ours = ABDTransformer(VOCABULARY, *sizes, "cpu", 8, positions=positions, **options)
    ours.load_state_dict(theirs.state_dict())
    if not dropout:
        set_dropout(ours, 0.0), set_dropout(theirs, 0.0)
    src = [torch.randn(3, 6, width) for width in (WIDTHS[mode] if mode != "one" else (WIDTHS[mode],))]
    for t in src:
        t[1, 4:], t[2, :2] = PAD, PAD
    src[min(1, len(src) - 1)][0, 5:] = PAD
    trg, r2l_trg = torch.randint(2, WORDS, (3, 7)), torch.randint(2, WORDS, (3, 5))
    trg[:, 0] = r2l_trg[:, 0] = ENDS
    trg[1, 4:], r2l_trg[2, 3:] = PAD, PAD
    source = src[0] if mode == "one" else tuple(src)
    mask = theirs.masks(source, r2l_trg, trg, PAD)
    torch.testing.assert_close(src_trg_mask(source, r2l_trg, trg, PAD), mask)
    given = tree_map_only(Tensor, lambda t: t.to(DEVICE), ((source, r2l_trg, trg, mask), (r2l_trg, trg)))
    return Twins(ours.to(DEVICE), theirs.to(DEVICE), *given, PAD)


BEYOND = dict(norm_first=True, n_head_kv=2, activation="swiglu")
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "public": {},
    "beyond": BEYOND,
    "small": dict(d_v=8, attention_bias=True),
    "gated": dict(norm_first=True, activation="geglu", d_v=8),
    "packed": dict(pack_padding=True, scale_emb_or_prj="emb"),
    "grown": dict(n_position=4),
    "learned": dict(position="learned", pack_padding=True),
    "modern": dict(norm="rms", qk_norm=True, attention_bias=True, activation="gelu"),
    "capped": dict(softcap=0.5, norm_first=True, trg_emb_prj_weight_sharing=False),
}
CAPTIONERS = {f"captioner {mode}": mode for mode in WIDTHS}


def build(name: str, **changes: Any) -> Twins:
    """The twins of this name. In modes three and four positions are those in the sequence, as they should be."""
    if name in CAPTIONERS:
        mode = CAPTIONERS[name]
        return captioner(mode, "batch" if mode in ("one", "two") else "sequence", **changes)
    return transformer(**TRANSFORMERS[name] | changes)


def twins(*everyday: str, of: Any = (*TRANSFORMERS, *CAPTIONERS)) -> Any:
    """These twins in the everyday tier, all with --full."""
    rows = [pytest.param(name, marks=() if name in everyday else pytest.mark.full) for name in of]
    return pytest.mark.parametrize("name", rows)


def rows(everyday: Any, others: Any) -> list[Any]:
    """Parameters of which only these are in the everyday tier."""
    values = [*everyday, *(row for row in others if row not in everyday)]
    return [pytest.param(*row, marks=() if row in everyday else pytest.mark.full) for row in values]


@pytest.fixture
def triton() -> None:
    skip_without_triton()


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> None:
    """Skips, with the reason, where the CUDA kernels cannot run. Without a GPU they run through csrc/emulator."""
    if DEVICE == "cpu":
        request.getfixturevalue("emulator")
    if reason := fastattn.backends.cuda.refuse_device(torch.empty(0, device=DEVICE)):
        pytest.skip(reason)


def request_backend(request: pytest.FixtureRequest, backend: str) -> None:
    """Skips where its kernels cannot run. There is no CUDA kernel of embeddings and of the loss."""
    for name in {"triton": ["triton"], "cuda": ["triton", "cuda"]}.get(backend, []):
        request.getfixturevalue(name)


def gold_of(trg: Tensor) -> Tensor:
    """The next token of each target token, and padding at the end."""
    return F.pad(trg[:, 1:], (0, 1), value=PAD_TRG)


class Doubled(nn.Module):
    """A wrapper that doubles what a module returns, and has none of its attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any, **options: Any) -> Any:
        return doubled(self.inner(*given, **options))


def doubled(out: Any) -> Any:
    return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


def cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, tuple):
        return tuple(cast(t, dtype) for t in batch)
    return batch.to(dtype) if batch.is_floating_point() else batch


def in_float64(models: Twins) -> Twins:
    models.ours.double(), models.theirs.double()
    return models._replace(batch=cast(models.batch, torch.float64))


@torch.no_grad()
def steps(models: Twins, on_device: bool = False) -> tuple[Tensor, Tensor]:
    """Of our decoder, one token after another; of the plain model, the whole sentence at once, without padding."""
    ours, theirs = models.train(False)[:2]
    if isinstance(ours, ABDTransformer):
        source, *_, (mask, *_) = models.batch
        memory, _, mask = theirs.encodings(source, mask)
        states, found = ours.greedy_decode(3, mask, memory, 8)
        expected_states, expected = theirs.greedy(mask, memory, 8)
        assert torch.equal(found, expected)
        return states, expected_states
    src, trg = models.batch
    trg = trg.masked_fill(trg == PAD_TRG, 5)
    cache = ours.start_decoding(src, 1, trg.shape[1])
    cache.on_device |= on_device
    found = [ours.next_logits(trg[:, n : n + 1], cache) for n in range(trg.shape[1])]
    return torch.cat(found, 1).flatten(0, 1), theirs(src, trg)


def check_steps(models: Twins, atol: float = 5e-5, on_device: bool = False) -> None:
    torch.testing.assert_close(*steps(models, on_device), rtol=0, atol=atol)
