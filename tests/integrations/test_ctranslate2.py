"""fastattn.integrations.ctranslate2: an exported model translates the same, or export refuses it with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiers
from torch import nn

from fastattn import FusedTransformer, generate

ctranslate2 = pytest.importorskip("ctranslate2")
from fastattn.integrations.ctranslate2 import export  # noqa: E402

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
INDICES = {"bos_idx": BOS, "eos_idx": EOS, "unk_idx": UNKNOWN}
SIZES = {"d_model": 32, "d_inner": 48, "n_layers": 2, "n_head": 4, "d_k": 8, "d_v": 8, "n_position": 40}
SOURCES = [[5, 6, 7, 8, 9, EOS], [10, 11, EOS], [12, UNKNOWN, 14, 15, EOS]]
TARGETS = [[5, 6, 7], [8, 9, 10, 11, 12], []]


def build(source: int = 50, target: int = 50, bias: bool = False, **options: Any) -> FusedTransformer:
    """A model in which every number matters: no norm weight is 1 and no bias is 0."""
    torch.manual_seed(0)
    model = FusedTransformer(source, target, PAD, PAD, **(SIZES | options)).eval()
    for linear in (module for module in model.modules() if bias and isinstance(module, nn.Linear)):
        linear.bias = nn.Parameter(torch.zeros(linear.out_features))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p)) if p.dim() == 1 else p.mul_(1.5)
    return model


def words(model: FusedTransformer) -> tuple[list[str], list[str]]:
    source, target = model.encoder.src_word_emb.num_embeddings, model.decoder.trg_word_emb.num_embeddings
    return [f"s{i}" if i > UNKNOWN else f"<{i}>" for i in range(source)], [
        f"t{i}" if i > UNKNOWN else f"<{i}>" for i in range(target)
    ]


def exported(model: FusedTransformer, folder: Path, **options: Any) -> Any:
    export(model, folder, *words(model), **INDICES, **options)
    return ctranslate2.Translator(str(folder), intra_threads=1)


def as_words(tokens: list[str], sentences: list[list[int]]) -> list[list[str]]:
    return [[tokens[i] for i in sentence] for sentence in sentences]


def change(*names: str, **attributes: Any) -> Callable[[FusedTransformer], None]:
    """Sets attributes of these modules."""

    def apply(model: FusedTransformer) -> None:
        for name in names:
            vars(model.get_submodule(name)).update(attributes)

    return apply


OPTIONS: list[dict[str, Any]] = [
    {"bias": True, "activation": "swiglu", "scale_emb_or_prj": "emb", "position": "learned"},
    {"n_head_kv": 2, "norm_first": True, "n_position": 4},
    {"bias": True, "source": 60, "emb_src_trg_weight_sharing": False, "activation": "gelu_tanh"},
    {"activation": "gelu", "d_k": 16, "d_v": 16, "scale_emb_or_prj": "none"},
    {"activation": "geglu", "norm_first": True, "d_k": 4, "d_v": 4},
    {"trg_emb_prj_weight_sharing": False, "emb_src_trg_weight_sharing": False, "source": 40, "activation": "silu"},
    {"dtype": torch.float64},
]


@pytest.mark.parametrize("options", tiers(OPTIONS, *OPTIONS[:3]))
def test_log_probabilities_and_tokens_are_equal(options: dict[str, Any], tmp_path: Path) -> None:
    model = build(**options)
    change("encoder.layer_stack.1.slf_attn.attention", temperature=5.0)(model)
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        norm.eps = 0.1
    model.encoder.grow(12), model.decoder.grow(12)
    translator, (source, target) = exported(model, tmp_path), words(model)
    scored = translator.score_batch(as_words(source, SOURCES), as_words(target, TARGETS))
    for src, trg, found in zip(SOURCES, TARGETS, scored, strict=True):
        log_p = model(torch.tensor([src]), torch.tensor([[BOS, *trg]])).log_softmax(-1)
        expected = log_p.gather(1, torch.tensor([*trg, EOS])[:, None])[:, 0].float()
        torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=1e-5, rtol=0)
    limits = {"beam_size": 1, "max_decoding_length": 12, "min_decoding_length": 0}
    found = [result.hypotheses[0] for result in translator.translate_batch(as_words(source, SOURCES), **limits)]
    padded = torch.tensor([src + [PAD] * (6 - len(src)) for src in SOURCES])
    assert found == as_words(target, generate.greedy(model, padded, max_len=12, bos_idx=BOS, eos_idx=EOS))


def test_quantisation(tmp_path: Path) -> None:
    """A shared weight is stored once. The model does not change."""
    model = build(dtype=torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    sizes, scores = [], []
    for quantization in (None, "int8"):
        folder = tmp_path / f"made/{quantization}"
        translator = exported(model, folder, quantization=quantization)
        result = translator.score_batch(as_words(words(model)[0], SOURCES), as_words(words(model)[1], TARGETS))
        scores.append(torch.tensor([p for sentence in result for p in sentence.log_probs]))
        sizes.append((folder / "model.bin").stat().st_size)
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()), "the model has changed"
    assert sizes[0] < 4 * (sum(p.numel() for p in model.parameters()) + 40 * 32) + 10_000
    assert sizes[1] < sizes[0] / 2
    torch.testing.assert_close(scores[1], scores[0], atol=0.5, rtol=0)
    assert not torch.equal(scores[1], scores[0])
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["None", "int8"], "nothing else is left"


@pytest.mark.parametrize(
    ("modify", "message"),
    [
        (change("decoder.layer_stack.0.enc_attn.attention", softcap=30.0), "enc_attn.attention has softcap=30.0"),
        (change("encoder", forward=print), "encoder has a forward of its own"),
        (change("encoder.layer_stack.0.pos_ffn", activation="gelu"), "activation is gelu in .* and relu in"),
        (lambda m: m.decoder.layer_stack[1].register_forward_hook(print), r"layer_stack\.1 has forward hooks"),
        (lambda m: setattr(m.encoder, "__class__", type("Other", (type(m.encoder),), {})), "encoder is a .*Other"),
        (lambda m: m.encoder.register_module("layer_norm", nn.RMSNorm(32)), "layer_norm is a .*RMSNorm"),
    ],
)
def test_what_ctranslate2_does_not_have(
    modify: Callable[[FusedTransformer], object], message: str, tmp_path: Path
) -> None:
    model = build()
    modify(model)
    with pytest.raises(ValueError, match=f"^model cannot be exported: .*{message}"):
        exported(model, tmp_path / "folder")
    assert not any(tmp_path.iterdir())


def test_what_is_not_written(tmp_path: Path) -> None:
    """A folder that holds something, and words that are not those of the model."""
    model, (source, target) = build(), words(build())
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="folder must be new or empty"):
        export(model, tmp_path, source, target, **INDICES)
    for tokens, message in (
        (source[1:], "source_tokens has 49 tokens, expected 50"),
        ([*source[1:], "s5"], "source_tokens has 's5' 2 times"),
    ):
        with pytest.raises(ValueError, match=message):
            export(model, tmp_path / "folder", tokens, target, **INDICES)
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis.txt"]
