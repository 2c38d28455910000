"""Models and comparisons that the model tests share."""

import torch
import torch.nn.functional as F
from plain_transformer import PlainTransformer
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import CheckpointPolicy

from fastattn import FusedTransformer
from fastattn.nn import EncoderLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAD_SRC, PAD_TRG, VOCAB = 1, 2, 40
SMALL = dict(d_word_vec=32, d_model=32, d_inner=64, n_layers=2, n_head=4, d_k=8, d_v=12, n_position=30)
NO_DROPOUT = dict(dropout=0.0, attn_dropout=0.0)


def fused(**changes):
    return FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL | changes).to(DEVICE)


def plain(**changes):
    return PlainTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL | changes).to(DEVICE)


def pair(**options):
    """A FusedTransformer and a PlainTransformer with the same weights, without dropout."""
    ours, theirs = fused(**NO_DROPOUT, **options), plain(**NO_DROPOUT, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def gold_of(trg):
    """The next token of each target token, and padding at the end."""
    return F.pad(trg[:, 1:], (0, 1), value=PAD_TRG)


class Doubled(torch.nn.Module):
    """A wrapper that doubles what a module returns."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return 2 * self.inner(*inputs)


def train_step(model, batch):
    """Logits, and each parameter's gradient of the cross entropy over real target tokens."""
    src, trg = batch
    logits = model(src, trg)
    F.cross_entropy(logits.float(), trg.roll(-1, 1).reshape(-1), ignore_index=PAD_TRG, reduction="sum").backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected, relative):
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / grad.norm()
        assert error <= relative, f"{name}: relative error {error:.1e}"


TINY = dict(d_word_vec=16, d_model=16, d_inner=24, n_layers=1, n_head=2, d_k=8, d_v=12)


def keep_products(ctx, op, *args, **kwargs):
    """A policy of selective activation checkpointing."""
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def draw_own_seeds(layer, *args, **kwargs):
    """layer(..) with the dropout that it has under activation checkpointing: each call draws its own seeds."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return layer(*args, **kwargs)


class UsersTransformer(FusedTransformer):
    """A user's class."""


def _load(model, factor, **options):
    model.load_state_dict({name: t * factor for name, t in model.state_dict().items()}, **options)


def _freeze(model, but):
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(but))


def model_to_change():
    """The encoder's layers are a, b, a."""
    torch.manual_seed(3)
    model = fused(**TINY | NO_DROPOUT, trg_emb_prj_weight_sharing=False, emb_src_trg_weight_sharing=False)
    layers = model.encoder.layer_stack
    layers.append(fused(**TINY | NO_DROPOUT).encoder.layer_stack[0])
    layers.append(layers[0])
    model.linear = torch.nn.Linear(TINY["d_model"], TINY["d_inner"], device=DEVICE)
    return model


# Changes of it with graphs=True. First what follows: graphs are kept, captured again, or why calls are eager.
GRAPH_CHANGES = {
    "weights in place": ("kept", lambda m: _load(m, 1.1)),
    "weights assigned": ("captured", lambda m: _load(m, 0.9, assign=True)),
    "new memory": ("captured", lambda m: [setattr(p, "data", p.data * 0.8) for p in m.parameters()]),
    "encoder frozen": ("captured", lambda m: _freeze(m, but=("decoder", "trg_word_prj"))),
    "all but the projection frozen": ("captured", lambda m: _freeze(m, but="trg_word_prj")),
    "eps": ("captured", lambda m: setattr(m.encoder.layer_norm, "eps", 0.5)),
    "padding": ("captured", lambda m: setattr(m, "trg_pad_idx", 5)),
    "activation": ("captured", lambda m: setattr(m.decoder.layer_stack[0].pos_ffn, "activation", "gelu")),
    "backend": ("captured", lambda m: setattr(m.decoder, "backend", "reference")),
    "evaluation": ("captured", lambda m: m.eval()),
    "child": ("captured", lambda m: setattr(m.decoder.layer_stack[0].pos_ffn, "w_1", m.linear)),
    "layer removed": ("captured", lambda m: m.encoder.layer_stack.__delitem__(0)),
    "layer shared": ("captured", lambda m: m.encoder.layer_stack.__setitem__(-1, m.encoder.layer_stack[1])),
    "buffer in place": ("kept", lambda m: m.encoder.position_enc.pos_table.mul_(0.5)),
    "buffer": (
        "captured",
        lambda m: setattr(m.encoder.position_enc, "pos_table", m.encoder.position_enc.pos_table / 2),
    ),
    "float64": ("captured", lambda m: m.double()),
    "a forward hook": ("hook", lambda m: m.encoder.layer_norm.register_forward_hook(lambda *_: _[2] * 2)),
    "a pre-hook": ("hook", lambda m: m.encoder.layer_norm.register_forward_pre_hook(lambda *_: (_[1][0] * 2,))),
    "a backward hook": ("hook", lambda m: m.encoder.layer_norm.register_full_backward_hook(lambda *_: None)),
    "checkpointed": (
        "CheckpointWrapper is a class",
        lambda m: apply_activation_checkpointing(m, check_fn=lambda child: isinstance(child, EncoderLayer)),
    ),
    "a user's class": ("UsersTransformer is a class", lambda m: setattr(m, "__class__", UsersTransformer)),
}
