"""Random models, calls and searches against their plain twins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import families
import plain_search
import pytest
import torch
from catalogue import ACTIVATIONS, joined, some
from hypothesis import assume
from hypothesis import strategies as st
from model_checks import DEVICE, PAD_SRC, PAD_TRG, VOCAB
from search_cases import BOS, EOS, PAD, make_model
from test_changed_children import TREATMENTS, for_each, replace, with_bias
from torch import Tensor, nn

from fastattn import FusedTransformer, accelerate, generate, use_backend
from fastattn.backends.reference import philox

pytestmark = pytest.mark.full

MAPS = ("w_qs", "w_ks", "w_vs", "fc", "trg_word_prj")
CHANGES: dict[str, Callable[[nn.Module], None]] = TREATMENTS | {
    f"bias of {name}": for_each(lambda model, name: replace(model, name, with_bias), name) for name in MAPS
}
BOOL = st.booleans()


@st.composite
def batch(draw: Any, longest: int = 9, whole: bool = True) -> dict[str, Any]:
    """Padding before and after the tokens of each sequence; of some, with `whole`, nothing else."""
    B, seed = draw(st.integers(1, 4)), draw(st.integers(0, 99))
    drawn = {"seed": seed}
    for side in ("src", "trg"):
        L = draw(st.integers(1, longest))
        ends = st.tuples(st.integers(0, L), st.integers(0, L)).map(sorted)
        ends = ends if whole else ends.filter(lambda pair: pair[0] < pair[1])
        drawn[side] = (L, draw(st.lists(st.just([0, L]) | ends, min_size=B, max_size=B)))
    return drawn


def tokens(drawn: dict[str, Any], side: str, pad: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Of one side of a batch: (B, L) tokens from 3 on, and which are no padding."""
    L, ends = drawn[side]
    generator = torch.Generator().manual_seed(drawn["seed"] + len(side) * L)
    place, ends = torch.arange(L), torch.tensor(ends)
    real = (place >= ends[:, :1]) & (place < ends[:, 1:])
    drawn_tokens = torch.randint(3, vocabulary, real.shape, generator=generator)
    return drawn_tokens.masked_fill(~real, pad).to(DEVICE), real.to(DEVICE)


SIZES = st.fixed_dictionaries(
    {
        "d_model": st.sampled_from((8, 12, 20, 33)),
        "d_inner": st.sampled_from((1, 16, 24)),
        "n_head": st.sampled_from((1, 2, 4)),
        "d_k": st.sampled_from((1, 8, 12)),
        "d_v": st.sampled_from((3, 8)),
    }
)
FLAGS = some(
    trg_emb_prj_weight_sharing=BOOL,
    emb_src_trg_weight_sharing=BOOL,
    scale_emb_or_prj=st.sampled_from(("emb", "prj", "none")),
    norm_first=BOOL,
    activation=st.sampled_from(ACTIVATIONS),
    n_head_kv=st.just(1),
    pack_padding=BOOL,
)
# Of packed attention a layer of aten drops other weights than the formula.
DROPOUT = ({"dropout": 0.0, "attn_dropout": 0.0}, {"attn_dropout": 0.3, "pack_padding": False}, {"attn_dropout": 0.0})
TRANSFORMER = st.fixed_dictionaries(
    {
        "model": joined(SIZES, FLAGS, st.sampled_from(DROPOUT)),
        "change": st.none() | st.sampled_from([*CHANGES]),
        "batch": batch(),
        "loss": some(
            label_smoothing=st.just(0.1),
            smooth_over=st.sampled_from(("all", "others")),
            reduction=st.sampled_from(("sum", "mean")),
        ),
        "autocast": BOOL,
        "seed": st.integers(0, 99),
    }
)


def test_transformer(fuzz: Callable[..., None]) -> None:
    """Logits, loss and gradients against the formula in float64, as near as the formula in the same dtypes comes."""

    def solve(drawn: dict[str, Any], backend: str, dtype: torch.dtype, autocast: bool) -> dict[str, Tensor]:
        torch.manual_seed(drawn["seed"])
        model = FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, n_layers=2, n_position=12, **drawn["model"]).to(DEVICE)
        if drawn["change"]:
            CHANGES[drawn["change"]](model)
        model = model.to(dtype)
        (src, _), (trg, real) = (
            tokens(drawn["batch"], "src", PAD_SRC, VOCAB),
            tokens(drawn["batch"], "trg", PAD_TRG, VOCAB),
        )
        context = torch.autocast(DEVICE, torch.bfloat16) if autocast else contextlib.nullcontext()
        with use_backend(backend), context:
            logits = model(src, trg).view(*trg.shape, -1)[real]
            loss = model.loss(src, trg, trg, **drawn["loss"])
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"logits": logits.detach(), "loss": loss.detach()} | grads

    def check(drawn: dict[str, Any]) -> None:
        sharing = drawn["model"].get("trg_emb_prj_weight_sharing", True)
        assume(not (sharing and drawn["change"] == "embedding wrapped"))
        _, ends = drawn["batch"]["trg"]
        assume(any(b > a for a, b in ends))
        with philox.reference_dropout_rule("aten"):
            truth = solve(drawn, "reference", torch.float64, False)
            baseline = solve(drawn, "reference", torch.float32, drawn["autocast"])
            found = solve(drawn, "aten", torch.float32, drawn["autocast"])
        assert found.keys() == baseline.keys() == truth.keys()
        u = torch.finfo(torch.bfloat16 if drawn["autocast"] else torch.float32).eps / 2
        largest = max(t.norm() for name, t in truth.items() if name not in ("logits", "loss"))
        for name, t in truth.items():
            allowed = 4 * (baseline[name] - t).norm() + 4 * u * (t.norm() if name in ("logits", "loss") else largest)
            assert found[name].dtype == baseline[name].dtype and (found[name] - t).norm() <= allowed, name

    fuzz(check, TRANSFORMER, share=0.5)


TORCH_NN = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([kind for kind in families.KINDS if kind != "attention"]),
        "options": some(
            norm_first=BOOL,
            batch_first=BOOL,
            bias=BOOL,
            activation=st.sampled_from(("relu", "gelu")),
            nhead=st.sampled_from((1, 2)),
            dim_feedforward=st.sampled_from((1, 40)),
        ),
        "masks": st.tuples(*[st.sampled_from((None, torch.bool, torch.float32))] * 2),
        "is_3d": BOOL,
        "training": BOOL,
        "grad": BOOL,
    }
)


def test_torch_nn(fuzz: Callable[..., None]) -> None:
    """torch.nn's layers and stacks, accelerated, against untouched ones."""

    def check(drawn: dict[str, Any]) -> None:
        kind, options, grad = drawn["kind"], drawn["options"], drawn["grad"]
        masks = families.masks_of(kind, drawn["masks"], drawn["is_3d"] and "nhead" not in options)
        inputs = families.tensors_of(kind, batch_first=options.get("batch_first", True)) | masks
        theirs, ours = (families.layer(kind, **options).train(drawn["training"]) for _ in range(2))
        accelerate(ours)
        with families.fast_path(False):
            expected = families.solve(theirs, inputs, grad=grad)
        families.check(families.solve(ours, inputs, grad=grad), expected, dict(rtol=1e-5, atol=2e-5))

    fuzz(check, TORCH_NN, share=0.5)


HUGGINGFACE = st.fixed_dictionaries(
    {
        "name": st.sampled_from(("bart", "t5", "bert", "llama", "gpt2")),
        "batch": batch(whole=False),
        "training": BOOL,
        "grad": BOOL,
        "frozen": st.sampled_from(("nothing", "bias", "weight", "0")),
    }
)


def test_huggingface(fuzz: Callable[..., None]) -> None:
    """Models of transformers, accelerated, against untouched ones; some of their parameters frozen."""

    def check(drawn: dict[str, Any]) -> None:
        theirs, ours = (families.FAMILIES[drawn["name"]].build().train(drawn["training"]) for _ in range(2))
        accelerate(ours)
        ids, real = tokens(drawn["batch"], "src", 1, 99)
        inputs = {"input_ids": ids, "attention_mask": real.long(), "use_cache": False}
        if theirs.config.is_encoder_decoder:
            ids, real = tokens(drawn["batch"], "trg", 1, 99)
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": real.long()}
        for model in (theirs, ours):
            for name, p in model.named_parameters():
                p.requires_grad_(drawn["frozen"] not in name)
        expected = families.solve(theirs, inputs, real, drawn["grad"])
        families.check(families.solve(ours, inputs, real, drawn["grad"]), expected, dict(rtol=1e-4, atol=2e-4))

    fuzz(check, HUGGINGFACE, share=0.5)


SEARCH = st.fixed_dictionaries(
    {
        "model": FLAGS,
        "batch": batch(whole=False),
        "options": st.fixed_dictionaries(
            {
                "beam_size": st.integers(1, 12),  # of 11 tokens
                "max_len": st.integers(1, 9),
                "length_penalty": st.sampled_from((0.7, 0.0, 2.0, -0.5)),
            }
        ),
        "n_best": st.integers(1, 12),
    }
)


def test_searches(fuzz: Callable[..., None]) -> None:
    """greedy and beam_search against searches that decode every prefix again; in float64, where nothing is a tie."""

    def check(drawn: dict[str, Any]) -> None:
        options = drawn["options"] | {"n_best": min(drawn["n_best"], drawn["options"]["beam_size"])}
        model, (src, _) = make_model(**drawn["model"]).double(), tokens(drawn["batch"], "src", PAD, 11)
        ends = {"max_len": options["max_len"], "bos_idx": BOS, "eos_idx": EOS}
        greedy = generate.greedy(model, src, **ends)
        beams = generate.beam_search(model, src, **options | ends)
        for sentence, of_greedy, found in zip(src, greedy, beams, strict=True):
            plain = plain_search.of_model(model, sentence[None])
            assert of_greedy == plain_search.greedy(plain, **ends)
            expected = plain_search.beam_search(plain, **options | ends)
            assert [h.tokens for h in found] == [tokens for tokens, _ in expected]
            assert [h.score for h in found] == pytest.approx([score for _, score in expected], rel=1e-6, abs=1e-6)

    fuzz(check, SEARCH, share=0.25)
